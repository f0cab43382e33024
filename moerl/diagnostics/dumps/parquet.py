"""Parquet files of any writer, a row at a time. Any process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from moerl.contract import parquet
from moerl.contract.footers import Footer
from moerl.errors import ConfigError

MAGIC = b"PAR1"
"""First bytes of a file."""

_ROWS = 1024
"""Rows that are read at a time if only a few columns are read."""

_MAX_GROUP_VALUES = 1 << 30
"""Most values of a column of a row group: a single row may contain all of them."""


def footer_of(file: Path) -> Footer:
    """Returns the footer of the file. Raises `ConfigError` if the file is damaged."""
    with _reading(file):
        return parquet.footer_of(file)


def columns_of(file: Path) -> list[str]:
    """Returns the names of the columns. Raises `ConfigError` if the file is damaged."""
    with _reading(file):
        return parquet.columns_of(file)


def rows(file: Path, names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields rows with their place: lists as arrays, all else as Python values; columns that the file lacks are left
    out.

    A single NaN is a null: pandas writes a missing number so.

    Raises:
        ConfigError: the file is damaged, a row group is larger than is read, or the file unpacks to far more than it
            holds.
    """
    for number, group in enumerate(footer_of(file).row_groups):
        most = max((column.num_values for column in group.columns), default=0)
        if most > _MAX_GROUP_VALUES:
            raise ConfigError(
                f"DUMP: row group {number} of {file} is too large",
                seen=f"{most} values in a column",
                expected=f"at most {_MAX_GROUP_VALUES}",
                remedy="write the file again with smaller row groups (row_group_size=8 or so)",
            )
    index = 0
    with _reading(file):
        for batch in parquet.read_batches(file, rows=1, columns=frozenset(names)):
            for row in range(batch.num_rows):
                yield f"{file.name} row {index}", {name: _value(batch.column(name)[row]) for name in batch.schema.names}
                index += 1


def columns(file: Path, names: Collection[str]) -> dict[str, list[Any]]:
    """Returns whole columns as Python values, and reads nothing else of the file.

    Raises:
        ConfigError: the file is damaged, or has no such column.
    """
    found: dict[str, list[Any]] = {name: [] for name in names}
    with _reading(file):
        for batch in parquet.read_batches(file, rows=_ROWS, columns=names):
            missing = sorted(set(names) - set(batch.schema.names))
            if missing:
                raise damaged(file, f"no column {missing[0]}")
            for name, values in found.items():
                values.extend(batch.column(name).to_pylist())
    return found


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        raise damaged(file, error) from error


def damaged(file: Path, seen: object) -> ConfigError:
    return ConfigError(
        f"DUMP: cannot read {file}",
        seen=str(seen).partition("\n")[0][:300],
        expected="a whole Parquet file",
        remedy="copy the file again from where it was written",
    )


def _value(scalar: Any) -> Any:
    if not scalar.is_valid:
        return None
    kind = scalar.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return scalar.values.to_numpy(zero_copy_only=False)
    value = scalar.as_py()
    return None if isinstance(value, float) and value != value else value
