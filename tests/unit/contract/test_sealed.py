"""A sealed folder is one in which every file is what was written; anything else is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moerl.contract import sealed
from moerl.contract.sealed import SEAL, find_damage, seal


def make(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    (folder / "config.json").write_text("{}")
    seal(folder)
    return folder


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[7] ^= 1
    file.write_bytes(data)


def put_a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("name", "harm", "problem"),
    [
        ("model.safetensors", cut, "model.safetensors has 699 bytes, not 700"),
        ("model.safetensors", flip, "model.safetensors does not match its hash"),
        ("model.safetensors", Path.unlink, "model.safetensors is missing"),
        ("model.safetensors", put_a_directory, "model.safetensors is missing"),
        ("config.json", Path.unlink, "config.json is missing"),
        (SEAL, Path.unlink, f"no {SEAL}"),
        (SEAL, put_a_directory, f"no {SEAL}"),
        (SEAL, cut, f"{SEAL} cannot be read"),
        (SEAL, lambda file: file.write_text('{"files": {"../a": {"bytes": 1, "blake2b": ""}}}'), "../a is missing"),
        (SEAL, lambda file: file.write_text('{"files": {"a": 1}}'), f"{SEAL} cannot be read"),
        (SEAL, lambda file: file.write_text("[" * 100_000), f"{SEAL} cannot be read"),
        (SEAL, lambda file: os.truncate(file, 1 << 33), f"no {SEAL}"),
    ],
)
def test_damage_is_named(name: str, harm: Callable[[Path], None], problem: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    assert find_damage(folder) is None
    harm(folder / name)
    damage = find_damage(folder)
    assert damage is not None
    assert damage.startswith(problem)


def test_a_file_beside_the_listed_ones_is_no_damage(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    (folder / "notes.txt").touch()
    assert find_damage(folder) is None
    assert find_damage(tmp_path / "none") == "it is not there"


def test_every_file_and_the_folder_are_on_disk_before_the_seal_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(sealed, "sync", lambda path: synced.append(path.name))
    make(tmp_path / "model")
    assert synced == ["config.json", "model.safetensors", SEAL, "model"]
