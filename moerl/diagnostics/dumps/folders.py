"""The files of a dump that is named by its directory, sorted into sets of one kind. Torch-free; any process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moerl.diagnostics.dumps.refused import NotADumpError
from moerl.errors import ConfigError, MoerlError

_ENDINGS = (".parquet", ".jsonl", ".json", ".pt", ".pkl")
_FOLDERS = ("rollouts", "rollout_data", "train_data", ".", "dashboard_columns")
_TRAINED, _EVERY = "effective", "all"
_EVALUATION = re.compile(r"(?:eval_|val_data_step)\d+$")
"""Ends of names: slime's and miles' evaluations, and NeMo-RL's, which are texts alone."""
_MAX_NAMED = 5
_BY_NAME = ", read if named"


@dataclass(frozen=True, slots=True)
class Files:
    """Files of one dump."""

    files: list[Path]
    """In the order of the numbers in their names; at least one."""
    note: str = ""
    """Files that were left out, for people; empty if none."""


def files_of(path: Path, kind_of: Callable[[Path], str]) -> list[Files]:
    """Returns the files that a path names: a file itself, or those of a directory.

    slime and miles may write rollouts and train data into one directory, under two names; `--dump-details` writes them
    into `rollout_data` and `train_data`. prime-rl writes traces and token exports into one run directory. Both are
    returned, one after the other.

    Args:
        kind_of: the format of a file; asked for one file of each name. Raises `NotADumpError` if it has none: such
            files are left out if there are others.

    Raises:
        ConfigError: there is no dump.
    """
    if path.is_file():
        return [Files([path])]
    if path.is_dir():
        found, refused = _in_folders(path, kind_of)
        if found := found or _of_prime_rl(path):
            return found
        if refused is not None:
            raise refused
    raise ConfigError(
        "DUMP: no rollouts",
        seen=path if path.exists() else f"{path}, which does not exist",
        expected=f"a file of rollouts, or a directory with files that end with {', '.join(_ENDINGS)}, or one of"
        " prime-rl with rollouts/step_N/train/effective/traces.jsonl or token_exports/step_N/rank_R.jsonl",
        remedy="see docs/dump_formats.md for the formats that are read",
    )


@dataclass(frozen=True, slots=True)
class _Folder:
    """Files of one directory by kind. evaluations, others: files that are not read. refused: the reason of the first of
    `others`."""

    path: Path
    kinds: dict[str, list[Path]] = field(default_factory=dict[str, list[Path]])
    evaluations: list[Path] = field(default_factory=list[Path])
    others: list[Path] = field(default_factory=list[Path])
    refused: MoerlError | None = None

    @classmethod
    def of(cls, path: Path, kind_of: Callable[[Path], str], *, is_read: bool = True) -> _Folder:
        """Sorts the files of a directory by the kind of the first of each name; numbers do not count.

        Args:
            is_read: whether these files are read; if not, damaged ones have no kind.
        """
        if not path.is_dir():
            return cls(path)
        files = _sorted(file for file in path.iterdir() if file.suffix in _ENDINGS and file.name[0] != ".")
        training = [file for file in files if not _EVALUATION.search(file.stem)] or files
        named: dict[str, list[Path]] = {}
        for file in training:
            named.setdefault(re.sub(r"\d+", "#", file.name), []).append(file)
        if is_read and len(named) == 1 and training[0].suffix == ".pt":
            return cls(path, {"": training}, _without(files, training))  # loaded when it is opened, and not before
        kinds, others = dict[str, list[Path]](), list[Path]()
        refused: MoerlError | None = None
        for several in named.values():
            try:
                kinds.setdefault(kind_of(several[0]), []).extend(several)
            except MoerlError as error:
                if is_read and not isinstance(error, NotADumpError):
                    raise
                others += several
                refused = refused or error
        kinds = {kind: _sorted(each) for kind, each in kinds.items()}
        return cls(path, kinds, _without(files, training), _sorted(others), refused)

    def note(self) -> str:
        """Says which files were left out; those that describe one that is read, under its name, are not named."""
        said: list[str] = []
        if self.evaluations:
            named = _BY_NAME if self.evaluations[0].suffix == ".pt" else ""
            count = _counted(len(self.evaluations), "file")
            said.append(f"{count} of evaluations ({names_of(self.evaluations)}){named}")
        read = {file.stem for files in self.kinds.values() for file in files}
        if others := [file for file in self.others if file.stem not in read]:
            said.append(f"{_counted(len(others), 'file')} of no known format ({names_of(others)})")
        return "; ".join(said)


def _in_folders(path: Path, kind_of: Callable[[Path], str]) -> tuple[list[Files], MoerlError | None]:
    """Returns the files of the first of `_FOLDERS` that has some, by kind, train data behind rollouts; and why a file
    is not read, if one is not."""
    refused: MoerlError | None = None
    names = iter(_FOLDERS)
    for name in names:
        first = _Folder.of(path / name, kind_of)
        refused = refused or first.refused
        if first.kinds:
            break
    else:
        return [], refused
    read, left = [first], list[str]()
    for name in names:
        is_read = first.path.name == "rollout_data" and name == "train_data"
        folder = _Folder.of(path / name, kind_of, is_read=is_read)
        if is_read:
            read.append(folder)
        elif folder.kinds:
            files = [file for several in folder.kinds.values() for file in several]
            left.append(f"{_counted(len(files), 'file')} of {folder.path} ({names_of(files)}){_BY_NAME}")
    left = [*(note for folder in read if (note := folder.note())), *left]
    sets = [files for folder in read for files in folder.kinds.values()]
    return [Files(files, _left_out(left) if number == 0 else "") for number, files in enumerate(sets)], refused


def _of_prime_rl(path: Path) -> list[Files]:
    """Returns the traces of a directory and its token exports, those that there are.

    `effective` has the traces that were trained on, `all` these and others: of a step, one of them is read.
    """
    traces = _sorted(path.glob("**/traces.jsonl"))
    training = [file for file in traces if file.relative_to(path).parts[-3:-2] != ("eval",)] or traces
    evaluations = _without(traces, training)
    steps: dict[Path, dict[str, Path]] = {}
    for file in training:
        steps.setdefault(file.parent.parent, {})[file.parent.name] = file
    read = [file for subsets in steps.values() for file in _trained(subsets)]
    read = _sorted(read) or [subsets[_EVERY] for subsets in steps.values()]
    used = {file.parent.parent for file in read}
    unused = [file for file in training if file not in set(read)]
    left: list[str] = []
    if evaluations:
        left.append(f"{_counted(len(evaluations), 'file')} of evaluations ({evaluations[0]}){_BY_NAME}")
    if pending := [file for file in unused if file.parent.parent not in used]:
        left.append(f"{_counted(len(pending), 'step')} without {_TRAINED} traces ({pending[0]}){_BY_NAME}")
    if extra := [file for file in unused if file.parent.parent in used and file.parent.name != _EVERY]:
        left.append(f"{_counted(len(extra), 'file')} next to {_TRAINED} traces ({extra[0]}){_BY_NAME}")
    sets = [Files(read, _left_out(left))] if read else []
    exports = _sorted(path.glob("**/step_*/rank_*.jsonl"))
    return [*sets, Files(exports)] if exports else sets


def _trained(subsets: dict[str, Path]) -> list[Path]:
    """Returns the traces of a step that were trained on; those of any other name than `all` if none is said to be."""
    if _TRAINED in subsets:
        return [subsets[_TRAINED]]
    return [file for name, file in subsets.items() if name != _EVERY]


def _left_out(said: Sequence[str]) -> str:
    return f"left out: {'; '.join(said)}" if said else ""


def names_of(files: Sequence[Path]) -> str:
    """Returns the names of the first few files, and how many more there are."""
    more = f" and {len(files) - _MAX_NAMED} more" if len(files) > _MAX_NAMED else ""
    return ", ".join(file.name for file in files[:_MAX_NAMED]) + more


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def _without(files: Iterable[Path], others: Iterable[Path]) -> list[Path]:
    removed = set(others)
    return [file for file in files if file not in removed]


def _sorted(files: Iterable[Path]) -> list[Path]:
    return sorted((file for file in files if file.is_file()), key=_natural)


def _natural(file: Path) -> list[tuple[int, int, str]]:
    """Returns a key that sorts step_10 after step_9."""
    parts = re.split(r"(\d+)", str(file))
    return [(1, int(part), "") if part.isdecimal() and part.isascii() else (0, 0, part) for part in parts]
