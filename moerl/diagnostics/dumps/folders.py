"""The files of a dump that is named by its directory, sorted into sets of one kind. Torch-free; any process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moerl.errors import ConfigError

_ENDINGS = (".parquet", ".jsonl", ".json", ".pt", ".pkl")
_FOLDERS = ("rollouts", "rollout_data", ".", "dashboard_columns")
_TRACES = ("effective", "all")


@dataclass(frozen=True, slots=True)
class Files:
    """Files of one dump, in the order of the numbers in their names. note: what was left out, for people."""

    files: list[Path]
    note: str = ""


def files_of(path: Path, kind_of: Callable[[Path], str]) -> list[Files]:
    """Returns the files that a path names: a file itself, or those of a directory.

    slime and miles may write rollouts and train data into one directory, under two names; `--dump-details` writes them
    into `rollout_data` and `train_data`. Both are returned, one after the other.

    Args:
        kind_of: the format of a file; asked for one file of each name if a directory has several names.

    Raises:
        ConfigError: there is no dump.
    """
    if path.is_file():
        return [Files([path])]
    for folder in _FOLDERS if path.is_dir() else ():
        for ending in _ENDINGS:
            if files := _sorted((path / folder).glob(f"*{ending}")):
                if ending != ".pt":
                    return [Files(files)]
                train = _sorted((path / "train_data").glob("*.pt")) if folder == "rollout_data" else []
                return [*_by_kind(files, kind_of), *([Files(train)] if train else [])]
    for subset in _TRACES if path.is_dir() else ():
        # prime-rl: the sequences that were trained on are among all of them.
        if files := [*path.glob(f"**/train/{subset}/traces.jsonl"), *path.glob(f"**/{subset}/traces.jsonl")]:
            return [Files(_sorted(set(files)))]
    if path.is_dir() and (files := _sorted(path.glob("**/step_*/rank_*.jsonl"))):
        return [Files(files)]
    raise ConfigError(
        "DUMP: no rollouts",
        seen=path if path.exists() else f"{path}, which does not exist",
        expected=f"a file of rollouts, or a directory with files that end with {', '.join(_ENDINGS)}",
        remedy="see docs/dump_formats.md for the formats that are read",
    )


def _by_kind(files: Sequence[Path], kind_of: Callable[[Path], str]) -> list[Files]:
    """Splits the files by the kind of the first of each name; numbers do not count. Evaluations are left out."""
    training = [file for file in files if not re.search(r"eval_\d+$", file.stem)] or list(files)
    left = len(files) - len(training)
    note = f"{left} files of evaluations (eval_N) were left out; name one to read it" if left else ""
    named: dict[str, list[Path]] = {}
    for file in training:
        named.setdefault(re.sub(r"\d+", "#", file.name), []).append(file)
    if len(named) == 1:
        return [Files(training, note)]
    kinds: dict[str, list[Path]] = {}
    for several in named.values():
        kinds.setdefault(kind_of(several[0]), []).extend(several)
    return [Files(_sorted(each), note) for each in kinds.values()]


def _sorted(files: Iterable[Path]) -> list[Path]:
    return sorted((file for file in files if file.is_file()), key=_natural)


def _natural(file: Path) -> list[tuple[int, int, str]]:
    """Sorts step_10 after step_9."""
    parts = re.split(r"(\d+)", str(file))
    return [(1, int(part), "") if part.isdecimal() and part.isascii() else (0, 0, part) for part in parts]
