"""The one reader of Parquet files: whatever a file holds, it takes memory and time in proportion to its size.

A dictionary holds a text once, a run-length code a value once, and a null takes nothing: 3 KB can stand for 3 GB of
text, or for millions of rows. So the footer and the headers of all pages are read first, and a file that promises too
much is refused. If texts of a dictionary could be too much, how often each stands in the table is counted before one is
written out. Any process; needs pyarrow.

One thread reads: one of pyarrow's that still held an object of Python when the process ended would abort it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from moerl.contract.footers import ColumnChunk, Footer, measured_footer
from moerl.errors import ConfigError
from moerl.reading import open_regular

compute: Any = pyarrow.compute  # its functions are made when it is imported, and have no types

LEAST_BYTES = 64 << 20
"""Unpacked bytes that every file may have, however small it is: any computer has them."""

MOST_TIMES = 100
"""Unpacked bytes for a byte of a larger file. Tables of prompts have 3 to 10; those that repeat every prompt some ten
times, and flags and settings by token, up to 50."""

_ROW_BYTES = 128
"""Taken by an empty row as a Python object."""

_VALUE_BYTES = 8
"""Taken by a number or a null at least, as an array or in a Python list."""


def most_bytes(file_bytes: int) -> int:
    """Returns how many bytes a file of this size may have unpacked."""
    return max(LEAST_BYTES, MOST_TIMES * file_bytes)


def unpacked_bytes(footer: Footer, columns: Collection[str] | None = None) -> int:
    """Returns the bytes that a table takes in memory, repeated texts of dictionaries not counted.

    Args:
        columns: those that are read; None = all.
    """
    total = _ROW_BYTES * footer.num_rows
    for group in footer.row_groups:
        for chunk in group.columns:
            if columns is None or chunk.root in columns:
                total += max(chunk.uncompressed_bytes, max(_VALUE_BYTES, chunk.width) * chunk.num_values)
    return total


def footer_of(file: Path) -> Footer:
    """Returns the description that a file gives of itself. Raises `ValueError` if it is damaged, and `OSError`."""
    with open_regular(file) as stream:
        return measured_footer(stream)


def opened(stream: BinaryIO | pa.NativeFile, **options: Any) -> pq.ParquetFile:
    """Opens a file whose footer was measured. Its owner closes it."""
    stream.seek(0)
    return pq.ParquetFile(stream, page_checksum_verification=True, pre_buffer=False, **options)


def read_group(file: pq.ParquetFile, group: int, columns: Sequence[str]) -> pa.Table:
    """Returns columns of one row group."""
    return file.read_row_group(group, columns=columns, use_threads=False)


def columns_of(file: Path) -> list[str]:
    """Returns the names of a file's columns. Raises `ValueError`, `OSError` or `pa.ArrowException` if it is damaged."""
    with open_regular(file) as stream:
        measured_footer(stream)
        return opened(stream).schema_arrow.names


def read_batches(file: Path, *, rows: int, columns: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a file, at most `rows` at a time.

    Args:
        columns: names of those that are wanted; names that the file lacks are left out. None = all.

    Raises:
        ConfigError: it unpacks to more than `most_bytes`; raised before that much memory is taken.
        ValueError, OSError, pa.ArrowException: it is damaged.
    """
    with open_regular(file) as stream:
        footer, most = measured_footer(stream), most_bytes(os.fstat(stream.fileno()).st_size)
        taken = unpacked_bytes(footer, columns)
        _check(file, footer, taken, most)
        parquet = opened(stream)
        names = [name for name in parquet.schema_arrow.names if columns is None or name in columns]
        texts = [
            [each for each in group.columns if each.root in names and each.is_text and each.coded_values]
            for group in footer.row_groups
        ]
        # No text of a dictionary is longer than the dictionary.
        longest = sum(each.coded_values * each.dictionary_bytes for group in texts for each in group)
        for number, group in enumerate(texts):
            if taken + longest > most:
                taken += _count(stream, number, group)
                _check(file, footer, taken, most)
                longest -= sum(each.coded_values * each.dictionary_bytes for each in group)
            yield from parquet.iter_batches(rows, row_groups=[number], columns=names, use_threads=False)


def _count(stream: BinaryIO, group: int, texts: Sequence[ColumnChunk]) -> int:
    """Returns the bytes of texts, each counted as often as it stands in a row group; they stay in their
    dictionaries."""
    coded = opened(stream, read_dictionary=[each.path for each in texts])
    table = read_group(coded, group, [each.path for each in texts])
    return sum(_repeated_bytes(chunk) for column in table.columns for chunk in column.chunks)


def _check(file: Path, footer: Footer, taken: int, most: int) -> None:
    if taken > most:
        raise ConfigError(
            f"{file} unpacks to far more than it holds",
            seen=f"{taken:,} bytes or more in {footer.num_rows:,} rows",
            expected=f"at most {most:,}: {MOST_TIMES} times the file's size, or {LEAST_BYTES:,}",
            remedy="remove rows and columns that say nothing and texts that repeat, or write the rows as JSON lines",
        )


def _repeated_bytes(array: pa.Array) -> int:
    kind: Any = array.type
    if pa.types.is_dictionary(kind):
        lengths = compute.binary_length(array.dictionary).take(array.indices)
        return compute.sum(lengths.cast(pa.int64())).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(map(_repeated_bytes, array.flatten()))
    if pa.types.is_map(kind):
        return _repeated_bytes(array.keys) + _repeated_bytes(array.items)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _repeated_bytes(array.flatten())
    return 0
