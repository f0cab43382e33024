"""Parquet files of any writer, a row at a time. What a file says of itself is read before pyarrow sees it.

pyarrow ends the process where a footer contradicts itself (`moerl.contract.footers`). Any process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moerl.contract.footers import Footer, read_footer
from moerl.errors import ConfigError

_MAX_GROUP_VALUES = 1 << 30
"""Most values of a column of a row group: a row may hold all of them."""

_MAX_FOOTER_BYTES = 64 << 20


def footer_of(file: Path) -> Footer:
    """What the file says of itself. Raises `ConfigError` where it is damaged."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, size - 8))
            length = int.from_bytes(stream.read(8)[:4], "little")
            if length + 12 > size or length > _MAX_FOOTER_BYTES:
                raise ValueError(f"a footer of {length} bytes in a file of {size}")
            stream.seek(size - 8 - length)
            footer = read_footer(b"PAR1" + stream.read(length + 8))
        if sum(group.num_rows for group in footer.row_groups) != footer.num_rows:
            raise ValueError("row groups do not add up to the rows")
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        raise damaged(file, error) from error
    return footer


def columns_of(file: Path) -> list[str]:
    """Names of the columns. Raises `ConfigError` where the file is damaged."""
    footer_of(file)
    try:
        with pq.ParquetFile(file) as parquet:
            return parquet.schema_arrow.names
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(file, error) from error


def rows(file: Path, names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with their place: lists as arrays, all else as Python values; columns that the file lacks are left out.

    A single NaN is a null: pandas writes a missing number so.

    Raises:
        ConfigError: the file is damaged, or a row group is larger than is read.
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
    wanted, index = set(names), 0
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
            columns = [name for name in parquet.schema_arrow.names if name in wanted]
            for batch in parquet.iter_batches(batch_size=1, columns=columns):
                for row in range(batch.num_rows):
                    yield f"{file.name} row {index}", {name: _value(batch.column(name)[row]) for name in columns}
                    index += 1
    except (pa.ArrowException, OSError, ValueError) as error:
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
