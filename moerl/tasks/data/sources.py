"""Rows of data sets, wherever they are: JSON lines, and what Hugging Face `datasets` reads. Runs in the controller.

JSON lines are read by `moerl.tasks.data.jsonl_rows`: the library guesses types over many rows, and its errors name no
line. Parquet is read by pyarrow: the library would make a second copy of it in a cache, or import torch to stream it.
"""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from moerl.contract.parquet import LEAST_BYTES, MOST_TIMES, most_bytes, read_batches
from moerl.errors import ConfigError
from moerl.reading import check_depth, find_irregular
from moerl.tasks.data.arrow_files import find_compressed
from moerl.tasks.data.hub_sets import commit_of_set
from moerl.tasks.data.jsonl_rows import MAX_LINE_BYTES, read_rows
from moerl.tasks.data.section import DataSet, Split
from moerl.telemetry.terminal import excerpt

SHUFFLE_BUFFER = 10_000
"""Rows of a stream in memory at once, to shuffle it."""

READ_ROWS = 1000
"""Rows of a Parquet file in memory at once."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a set."""

    place: str
    """Place of the row, for messages: file and line, or set and row."""
    label: str
    """Name of the row, unique in its set."""
    values: dict[str, Any]
    """Plain data, by column."""


def read_set(data: DataSet, split: Split, seed: int) -> Iterator[Row] | None:
    """Reads the rows that a set has for a split (train, dev or heldout); None if the set has no such split of its own.

    Args:
        seed: of the shuffling of a stream.

    Raises:
        ConfigError: Rows cannot be read, or one is not plain data. Also raised by the iterator.
    """
    named = (data.splits or {}).get(split)
    if named is None and split != "train":
        return None
    rows = _numbered(data, named or "train", is_named=named is not None, seed=seed)
    return islice(rows, data.max_rows)


def _numbered(data: DataSet, split: str, *, is_named: bool, seed: int) -> Iterator[Row]:
    path, most = data.path, None
    if path is None:
        return _rows(data, f"{data.hub}/{split}", _hub(data, split, seed))
    if path.is_dir():
        most = most_bytes(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
        name, rows = f"{path.name}/{split}", _directory(data, path, split, is_named, seed)
    else:
        if is_named:
            raise ConfigError(
                f"{data.of('splits')}: a file has no splits",
                seen=f"{split} of {path}",
                expected="a directory, or a data set of the hub",
                remedy=f"leave {data.of('splits')} away, or give the directory",
            )
        if path.suffix != ".parquet":
            lines = (Row(f"{path}:{n}", f"{path.name}:{n}", row) for n, row in read_rows(path, data.of("path")))
            return _shuffled(lines, seed) if data.streaming else lines
        name, rows = path.name, _parquet(data, [path], seed)
    return _rows(data, name, _shuffled(iter(rows), seed) if data.streaming else rows, most)


def _shuffled[T](rows: Iterator[T], seed: int) -> Iterator[T]:
    """Yields rows at random from a buffer, which later rows refill."""
    draws, held = random.Random(seed), list(islice(rows, SHUFFLE_BUFFER))
    for row in rows:
        place = draws.randrange(len(held))
        yield held[place]
        held[place] = row
    draws.shuffle(held)
    yield from held


def _directory(data: DataSet, path: Path, split: str, is_named: bool, seed: int) -> Iterable[Any]:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _saved(data, path, split, is_named)
    files = sorted(path.glob("*.parquet"))
    chosen = [file for file in files if file.name.startswith(split)]
    if not chosen and not is_named:
        others = tuple((data.splits or {}).values())
        chosen = [file for file in files if not others or not file.name.startswith(others)]
    if not chosen:
        raise ConfigError(
            f"{data.of('path')}: a directory without rows" + (f" of the split {split}" if files else ""),
            seen=excerpt(", ".join(sorted(each.name for each in path.iterdir())) or "nothing", 200),
            expected="Parquet files, their names beginning with that of the split, or what save_to_disk wrote",
            remedy="give the directory with the files, or one JSONL file",
        )
    return _parquet(data, chosen, seed)


def _parquet(data: DataSet, files: list[Path], seed: int) -> Iterator[Any]:
    if data.streaming:
        files = files.copy()
        random.Random(seed).shuffle(files)
    for path in files:
        batches = read_batches(path, rows=READ_ROWS)
        while True:
            with _reading(data, str(path)):
                batch = next(batches, None)
            if batch is None:
                break
            yield from batch.to_pylist()


def _saved(data: DataSet, path: Path, split: str, is_named: bool) -> Iterable[Any]:
    with _reading(data, str(path)):
        if irregular := find_irregular(path):
            raise OSError(errno.EINVAL, f"not a regular file, {irregular}")
        if compressed := find_compressed(path):
            raise ValueError(f"{compressed.name} has compressed buffers, which may unpack to any size")
        library = _library()
        saved = library.load_from_disk(str(path))
    if isinstance(saved, library.Dataset):
        if is_named:
            raise _no_split(data, split, "one set without splits")
        return saved
    if split not in saved and not is_named and len(saved) == 1:
        split = next(iter(saved))
    if split not in saved:
        raise _no_split(data, split, ", ".join(map(str, saved)))
    return saved[split]


def _hub(data: DataSet, split: str, seed: int) -> Iterable[Any]:
    name = str(data.hub)
    with _reading(data, f"{data.hub}, subset {data.subset}, split {split}"):
        library = _library()
        if data.streaming:
            rows = library.load_dataset(name, data.subset, revision=data.revision, split=split, streaming=True)
            # Of a stream the order of its files is shuffled, too.
            return rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        commit = commit_of_set(name, data.revision)
        # Without a network the library takes whatever its folder has of this name, of any revision and subset.
        folder = Path(library.config.HF_DATASETS_CACHE) / "moerl" / commit / quote(data.subset or "-", safe="")
        return library.load_dataset(name, data.subset, revision=commit, split=split, cache_dir=str(folder))


def _library() -> Any:
    """Imports Hugging Face `datasets` in a process that reads a set, so that it does not import torch, which login
    nodes lack, nor draw over the lines of the run."""
    import datasets
    import datasets.config

    datasets.config.TORCH_AVAILABLE = False
    datasets.disable_progress_bars()
    return datasets


def _no_split(data: DataSet, split: str, seen: str) -> ConfigError:
    return ConfigError(
        f"{data.of('splits')}: the set has no split {split}",
        seen=seen,
        expected="a split of the set",
        remedy=f"name those that it has, for example {data.of('splits')}.train=NAME",
    )


def _rows(data: DataSet, name: str, rows: Iterable[Any], most: int | None = None) -> Iterator[Row]:
    """Yields rows with their numbers, from 0 as the library counts them.

    Args:
        most: bytes that all of them may take as JSON; files of Arrow can repeat a text as those of Parquet can.
    """
    iterator, taken = iter(rows), 0
    for number in range(1 << 62):
        with _reading(data, f"{name}, row {number}"):
            row = next(iterator, None)
        if row is None:
            return
        place = f"{name}:{number}"
        taken += _check_plain(place, row)
        if most is not None and taken > most:
            raise ConfigError(
                f"{data.of('path')}: {data.path} unpacks to far more than it holds",
                seen=f"{taken:,} bytes up to row {number}",
                expected=f"at most {most:,}: {MOST_TIMES} times the size of its files, or {LEAST_BYTES:,}",
                remedy="remove texts that repeat, or write the rows as JSON lines",
            )
        yield Row(place, place, row)


def _check_plain(place: str, row: dict[str, Any]) -> int:
    """Returns the bytes of a row as JSON: rewards get rows so, in UTF-8, and a tokenizer takes no half of a surrogate
    pair."""
    total = 0
    for column, value in row.items():
        try:
            check_depth(value)
            size = len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{place}: the column {column!r} is not plain data",
                seen=excerpt(f"{type(value).__name__}: {error}", 200),
                expected="text, numbers, booleans, null, and lists and mappings of them",
                remedy="convert the column, or remove it from the set",
            ) from error
        if size > MAX_LINE_BYTES:
            raise ConfigError(
                f"{place}: the column {column!r} is too large",
                seen=f"{size:,} bytes",
                expected=f"at most {MAX_LINE_BYTES:,}",
                remedy="shorten it, or remove the row",
            )
        total += size
    return total


@contextmanager
def _reading(data: DataSet, what: str) -> Iterator[None]:
    """Raises errors of the library as `ConfigError`."""
    key = data.of("path" if data.path is not None else "hub")
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError):
            raise
        where = "the network and the name" if data.hub is not None else "that the files are whole"
        raise ConfigError(
            f"{key}: cannot read {what}",
            seen=excerpt(" ".join(f"{type(error).__name__}: {error}".split()), 400),
            expected="a data set that Hugging Face datasets reads",
            remedy=f"check {where}",
        ) from error
