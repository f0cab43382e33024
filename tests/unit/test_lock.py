"""The lock files cover what pyproject.toml asks for, every entry with hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
LOCKS = ("build.lock", "run.lock", "transformer_engine.lock", "gpu.lock")


def entries(text: str) -> list[list[str]]:
    """The requirement of each entry of a lock file, and its hashes."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [re.split(r"\s+--hash=", entry) for entry in "\n".join(lines).replace("\\\n", "").splitlines() if entry]


def locked() -> dict[str, Requirement]:
    found = {}
    for name in LOCKS:
        for requirement, *_ in entries((REQUIREMENTS / name).read_text()):
            parsed = Requirement(requirement)
            found[canonicalize_name(parsed.name)] = parsed
    return found


def asked_for() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = [line for file in sorted(REQUIREMENTS.glob("*.in")) for line in file.read_text().splitlines()]
    extras = project["project"]["optional-dependencies"]
    return [
        *project["project"]["dependencies"],
        *(text for name in ("tasks", "hf", "train", "dev") for text in extras[name] if not text.startswith("moerl[")),
        *project["build-system"]["requires"],
        *(line for line in lines if line and not line.startswith("#")),
    ]


@pytest.mark.parametrize("text", asked_for())
def test_the_lock_holds_a_version_that_is_asked_for(text: str) -> None:
    wanted = Requirement(text)
    pinned = locked().get(canonicalize_name(wanted.name))
    assert pinned is not None, f"{text} is not locked: run `make lock`"
    [specifier] = pinned.specifier
    assert wanted.specifier.contains(specifier.version), f"{text} is locked at {specifier}: run `make lock`"


@pytest.mark.parametrize("name", LOCKS)
def test_every_entry_of_a_lock_names_one_version_and_its_hashes(name: str) -> None:
    text = (REQUIREMENTS / name).read_text()
    assert "://" not in text
    found = entries(text)
    assert len(found) >= 4
    for requirement, *hashes in found:
        assert re.match(r"^[A-Za-z0-9._-]+==[^ ,*]+( ; .*)?$", requirement), requirement
        assert hashes, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value.strip()) for value in hashes), requirement
