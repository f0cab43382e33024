"""Rows of data sets, wherever they are: JSON lines, and what Hugging Face `datasets` reads. Runs in the controller.

JSON lines are read by `moerl.tasks.data.jsonl_rows`: the library guesses types over many rows, and its errors name no
line. Parquet is streamed, so that no second copy of it is made in a cache.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.errors import ConfigError
from moerl.tasks.data.jsonl_rows import MAX_LINE_BYTES, check_depth, read_rows
from moerl.tasks.data.section import DataSet, Split
from moerl.telemetry.terminal import excerpt

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

SHUFFLE_BUFFER = 10_000
"""Rows of a stream that are held to shuffle it."""

JSON_LINES = (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a set. place: where it is, for messages. label: unique in its set. values: plain data, by column."""

    place: str
    label: str
    values: dict[str, Any]


def read_set(data: DataSet, split: Split, seed: int) -> Iterator[Row] | None:
    """The rows that a set has for a split (train, dev or heldout); None where it has no such split of its own.

    Args:
        seed: of the shuffling of a stream.

    Raises:
        ConfigError: They cannot be read, or a row is not plain data. Also while rows are taken.
    """
    named = (data.splits or {}).get(split)
    if named is None and split != "train":
        return None
    rows = _numbered(data, named or "train", is_named=named is not None, seed=seed)
    return islice(rows, data.max_rows)


def _numbered(data: DataSet, split: str, *, is_named: bool, seed: int) -> Iterator[Row]:
    path = data.path
    if path is not None and not path.is_dir():
        if is_named:
            raise ConfigError(
                f"{data.of('splits')}: a file has no splits",
                seen=f"{split} of {path}",
                expected="a directory, or a data set of the hub",
                remedy=f"leave {data.of('splits')} away, or give the directory",
            )
        if path.suffix == ".parquet":
            return _rows(data, path.name, _parquet(data, [path], seed))
        return _json_rows(data, path, seed)
    if path is not None:
        return _rows(data, f"{path.name}/{split}", _directory(data, path, split, is_named, seed))
    return _rows(data, f"{data.hub}/{split}", _hub(data, split, seed))


def _json_rows(data: DataSet, path: Path, seed: int) -> Iterator[Row]:
    rows = (Row(f"{path}:{n}", f"{path.name}:{n}", row) for n, row in read_rows(path, data.of("path")))
    return _shuffled(rows, seed) if data.streaming else rows


def _shuffled(rows: Iterator[Row], seed: int) -> Iterator[Row]:
    """Each row comes out of a buffer in place of a later one."""
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
        chosen = files
    if not chosen:
        raise ConfigError(
            f"{data.of('path')}: a directory without rows" + (f" of the split {split}" if files else ""),
            seen=excerpt(", ".join(sorted(each.name for each in path.iterdir())) or "nothing", 200),
            expected="Parquet files, their names beginning with that of the split, or what save_to_disk wrote",
            remedy="give the directory with the files, or one JSONL file",
        )
    return _parquet(data, chosen, seed)


def _parquet(data: DataSet, files: list[Path], seed: int) -> Iterable[Any]:
    with _reading(data, ", ".join(map(str, files))):
        import datasets

        datasets.disable_progress_bars()
        rows = datasets.load_dataset("parquet", data_files=[str(file) for file in files], split="train", streaming=True)
    return _streamed(data, rows, seed)


def _saved(data: DataSet, path: Path, split: str, is_named: bool) -> Iterable[Any]:
    with _reading(data, str(path)):
        import datasets

        datasets.disable_progress_bars()
        saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.Dataset):
        if is_named:
            raise _no_split(data, split, "one set without splits")
        return saved
    if split not in saved and not is_named and len(saved) == 1:
        return next(iter(saved.values()))
    if split not in saved:
        raise _no_split(data, split, ", ".join(map(str, saved)))
    return saved[split]


def _hub(data: DataSet, split: str, seed: int) -> Iterable[Any]:
    with _reading(data, f"{data.hub}, subset {data.subset}, split {split}"):
        import datasets

        datasets.disable_progress_bars()
        rows = datasets.load_dataset(
            str(data.hub), data.subset, revision=data.revision, split=split, streaming=bool(data.streaming)
        )
    return _streamed(data, rows, seed)


def _streamed(data: DataSet, rows: Dataset | IterableDataset, seed: int) -> Iterable[Any]:
    return rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER) if data.streaming else rows  # pyright: ignore


def _no_split(data: DataSet, split: str, seen: str) -> ConfigError:
    return ConfigError(
        f"{data.of('splits')}: the set has no split {split}",
        seen=seen,
        expected="a split of the set",
        remedy=f"name those that it has, for example {data.of('splits')}.train=NAME",
    )


def _rows(data: DataSet, name: str, rows: Iterable[Any]) -> Iterator[Row]:
    """Rows with their numbers, from 0 as the library counts them."""
    iterator = iter(rows)
    for number in range(1 << 62):
        with _reading(data, f"{name}, row {number}"):
            row = next(iterator, None)
        if row is None:
            return
        place = f"{name}:{number}"
        _check_plain(place, row)
        yield Row(place, place, row)


def _check_plain(place: str, row: dict[str, Any]) -> None:
    """Rewards get rows as JSON in UTF-8, and a tokenizer takes no half of a surrogate pair."""
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


@contextmanager
def _reading(data: DataSet, what: str) -> Iterator[None]:
    """Errors of the library as `ConfigError`."""
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
