"""`sweep.json`: the runs of a sweep, their values and states. Reads and writes one file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Literal

import msgspec

from moerl.contract.files import atomic_file, writing
from moerl.errors import ConfigError
from moerl.reading import read_file

MANIFEST_FILE = "sweep.json"
SCHEMA = "moerl-sweep-1"
State = Literal["waiting", "running", "finished", "stopped", "failed"]
_NAME_LENGTH = 80


class SweepRun(msgspec.Struct, forbid_unknown_fields=True):
    """One run of a sweep."""

    name: str
    """Name of its directory within that of the sweep."""
    values: dict[str, str]
    """Values by swept key, as on a command line."""
    state: State = "waiting"
    """State when the manifest was last written; stopped = a signal ended the run, and it can go on."""
    status: int | None = None
    """Exit status of its process, None before it ended; negative: the signal that killed it."""

    @property
    def overrides(self) -> list[str]:
        """Its values as on a command line."""
        return [f"{key}={value}" for key, value in self.values.items()]


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """A sweep, as `sweep.json` stores it."""

    common: list[str]
    """Overrides KEY=VALUE that all runs have."""
    config_dir: str | None
    """Absolute path of `--config-dir`; None if it was not given."""
    keys: list[str]
    """Keys that are swept."""
    runs: list[SweepRun]
    """All runs, in the order in which they start."""
    schema: str = SCHEMA
    """Name of the file format; another one is refused."""


def new_manifest(common: list[str], swept: Mapping[str, Sequence[str]], config_dir: Path | None) -> Manifest:
    """Makes the manifest of a sweep that has not begun: every value of a key with every one of the others; the last key
    changes first.

    Args:
        common: overrides of all runs.
        swept: by key, the texts of its values.
    """
    values = [dict(zip(swept, point, strict=True)) for point in product(*swept.values())]
    runs = [SweepRun(_name(number, each), each) for number, each in enumerate(values)]
    folder = None if config_dir is None else str(config_dir.resolve())
    return Manifest(common, folder, [*swept], runs)


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a sweep's directory. Raises `ConfigError` if there is none, or it is of another build."""
    path = folder / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(read_file(path), type=Manifest)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            "sweep.dir: holds no sweep",
            seen=f"{path}: {error}",
            expected="what `moerl train -m` writes",
            remedy="give the directory that the sweep printed when it started",
        ) from error
    if manifest.schema != SCHEMA:
        raise ConfigError(
            f"{path}: of another build", seen=manifest.schema, expected=SCHEMA, remedy="start a new sweep"
        )
    return manifest


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Writes the manifest, all of it or nothing. Raises `MoerlError` if the file system refuses."""
    path = folder / MANIFEST_FILE
    with writing(path), atomic_file(path) as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def refuse_changes(before: Manifest, now: Manifest, folder: Path) -> None:
    """Raises `ConfigError` naming the first key by which a command line is not that of the sweep in `folder`."""
    old, new = _by_key(before), _by_key(now)
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) != new.get(key):
            raise ConfigError(
                f"{key}: not as in the sweep that is in {folder}",
                seen=new.get(key, "nothing"),
                expected=old.get(key, "nothing"),
                remedy=f"go on with `moerl train -m sweep.dir={folder}`, or choose another sweep.dir",
            )


def _by_key(manifest: Manifest) -> dict[str, str]:
    values = {key: text for text in manifest.common for key, _, text in [text.partition("=")]}
    for key in manifest.keys:
        values[key] = ",".join(dict.fromkeys(run.values[key] for run in manifest.runs))
    return values | {"--config-dir": manifest.config_dir or "none"}


def _name(number: int, values: dict[str, str]) -> str:
    """Makes a file name that people can read, and that no other run of the sweep has."""
    parts = [f"{key.rpartition('.')[2]}-{value}" for key, value in values.items()]
    text = "_".join(re.sub(r"[^A-Za-z0-9.+]+", "-", part) for part in parts)
    return f"{number:03d}_{text}"[:_NAME_LENGTH].rstrip("-_.")
