"""Paths on the command line of commands that read no recipe, checked before torch is loaded. Torch-free."""

from __future__ import annotations

from pathlib import Path

from moerl.errors import ConfigError


def check_verify(model: Path) -> None:
    """Raises `ConfigError` if there is no model to compare rollouts with."""
    if not (model / "config.json").is_file():
        raise ConfigError(
            "--model: not a Hugging Face model directory",
            seen=model,
            expected="a directory with config.json",
            remedy="give the directory of the weights that sampled; `moerl export` writes it from a checkpoint",
        )


def dump_files(dump: Path) -> list[Path]:
    """Returns a Parquet file of rollouts, or all of a directory, by name. Raises `ConfigError` if there is none."""
    files = sorted(dump.glob("*.parquet")) if dump.is_dir() else [dump]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(
            "DUMP: no rollouts",
            seen=dump,
            expected="a Parquet file that a run wrote, or a directory of them",
            remedy="see RUN_DIR/rollouts and RUN_DIR/skipped; dump.rollouts_every says how often a run writes one",
        )
    return files
