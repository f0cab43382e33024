"""Checkpoints that `moerl diagnose` is given: which directory, and which policy version. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moerl.errors import ConfigError
from moerl.machine.hub import hub_name, model_directory


@dataclass(frozen=True, slots=True)
class HuggingFaceCheckpoint:
    """A Hugging Face directory with weights of the policy."""

    folder: Path
    """Model directory; that of the cache for a model of the hub."""
    version: int | None
    """Policy version of the weights; None if the command line names none."""


def split_version(named: str) -> tuple[Path, int | None]:
    """Returns the directory and the policy version of `HF_DIR[@VERSION]`. If a directory of the whole name exists, the
    @ is part of its name. A model of the hub is fetched; after its name, digits alone are a policy version, and
    anything else is a revision.

    Raises:
        ConfigError: there is no such model, or the version is no number.
    """
    before, at, version = named.rpartition("@")
    if Path(named).is_dir() or not at:
        return model_directory(named, "--model"), None
    if version.isdecimal():
        return model_directory(before, "--model"), int(version)
    if hub_name(named) is None or Path(before).is_dir():
        raise ConfigError(
            "--model: version", seen=version, expected="a policy version, a whole number", remedy="HF_DIR@12"
        )
    return model_directory(named, "--model"), None
