"""Dumps that are not read, with the reason and what to do instead. Any process."""

from __future__ import annotations

from pathlib import Path

from moerl.errors import ConfigError

CONVERTER = Path(__file__).with_name("converter.py.txt")
"""A script to copy to the machine where such a dump was made, and to run there: it writes the minimal schema."""

_REMEDY = (
    f"run a copy of {CONVERTER} on the machine where the dump was made, and read what it writes;"
    " see docs/dump_formats.md"
)

_KNOWN = "a dump of moerl, slime, miles, NeMo-RL or prime-rl, answers of SGLang, or the minimal schema"


class NotADumpError(ConfigError):
    """A file that is of no known format, or of one that is not read. In a directory it is left out, and a note names
    it. A damaged file is none."""


def pickled(file: Path) -> NotADumpError:
    return NotADumpError(
        f"DUMP: {file} is a pickle, and reading one runs the code in it",
        seen="the first byte of a pickle (SkyRL's batches, verl's DataProto, an old torch.save)",
        expected="a file of data: see docs/dump_formats.md",
        remedy=_REMEDY,
    )


def texts_only(file: Path) -> NotADumpError:
    return NotADumpError(
        f"DUMP: {file} holds texts alone, as verl's trainer.rollout_data_dir writes them",
        seen="input, output and score",
        expected="token ids and the log-probs under which they were sampled",
        remedy=_REMEDY,
    )


def refused_globals(file: Path, reason: str) -> ConfigError:
    """Returns the error. reason: torch's message."""
    return ConfigError(
        f"DUMP: {file} holds more than data, and loading it whole could run code",
        seen=reason,
        expected="tensors, arrays, numbers, texts, lists and dicts",
        remedy=_REMEDY,
    )


def unknown(file: Path, seen: str) -> NotADumpError:
    return NotADumpError(f"DUMP: {file} is of no known format", seen=seen, expected=_KNOWN, remedy=_REMEDY)


def damaged(file: Path, seen: str) -> ConfigError:
    return ConfigError(f"DUMP: {file} is of no known format", seen=seen, expected=_KNOWN, remedy=_REMEDY)
