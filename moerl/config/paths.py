"""Paths on the command line of commands that read no recipe, checked before torch is loaded. Torch-free."""

from __future__ import annotations

from pathlib import Path

from moerl.config.load import CONFIG_FILE, load_resolved
from moerl.config.schema import RunConfig
from moerl.errors import ConfigError


def check_export(run_dir: Path, output: Path) -> RunConfig:
    """Reads the configuration of the run to export. Raises `ConfigError` if it cannot be read, or `output` exists."""
    config = load_resolved(run_dir / CONFIG_FILE)
    if output.exists():
        raise ConfigError(
            "--output: exists already", seen=output, expected="a directory to be made", remedy="choose another name"
        )
    return config


def check_verify(dump: Path, model: Path) -> None:
    """Raises `ConfigError` if there are no rollouts, or no model, to compare."""
    dump_files(dump)
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
