"""What a Parquet file says of itself, read before pyarrow sees the file: rows, sizes and encodings of its columns.

pyarrow ends the process where some fields of a column's metadata contradict each other, and builds hundreds of bytes
for each. So the footer is read here first, with a bound on its values. It is a struct in Thrift's compact protocol; the
numbers of fields are those of `parquet.thrift`. Any process; no pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_VALUES = 1 << 20
"""Most fields and elements of a footer. A row group of ours has about two thousand."""

_MAX_DEPTH = 16
_STOP, _TRUE, _FALSE, _BYTE, _SHORT, _LONG, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """A column of a row group. physical_type, encodings: as numbered by Parquet. num_values: of leaves, nulls too."""

    path: str
    physical_type: int
    encodings: frozenset[int]
    num_values: int
    uncompressed_bytes: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    num_rows: int
    columns: tuple[ColumnChunk, ...]


@dataclass(frozen=True, slots=True)
class Footer:
    """metadata: entries of the file, by key."""

    num_rows: int
    row_groups: tuple[RowGroup, ...]
    metadata: dict[bytes, bytes]


def read_footer(data: bytes) -> Footer:
    """The footer of a Parquet file.

    Raises:
        ValueError: it is none, lacks a field that is read here, or has more than `MAX_VALUES` values.
    """
    size = int.from_bytes(data[-8:-4], "little")
    if len(data) < size + 12 or data[:4] != b"PAR1" or data[-4:] != b"PAR1":
        raise ValueError("no Parquet file")
    try:
        file = _Thrift(data[-8 - size : -8]).struct(0)
        return Footer(
            num_rows=_integer(file[3]),
            row_groups=tuple(_row_group(each) for each in _structs(file[4])),
            metadata={_bytes(each[1]): _bytes(each.get(2, b"")) for each in _structs(file.get(5, []))},
        )
    except (KeyError, IndexError) as error:
        raise ValueError(f"the footer lacks {error}") from error


def _row_group(fields: dict[int, Any]) -> RowGroup:
    return RowGroup(_integer(fields[3]), tuple(_column_chunk(each[3]) for each in _structs(fields[1])))


def _column_chunk(fields: Any) -> ColumnChunk:
    (fields,) = _structs([fields])
    return ColumnChunk(
        path=".".join(_bytes(name).decode() for name in _list(fields[3])),
        physical_type=_integer(fields[1]),
        encodings=frozenset(_integer(each) for each in _list(fields[2])),
        num_values=_integer(fields[5]),
        uncompressed_bytes=_integer(fields[6]),
    )


def _integer(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("the footer holds no number where one should be")
    return value


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise ValueError("the footer holds no text where one should be")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError("the footer holds no list where one should be")
    return value


def _structs(value: Any) -> Iterator[dict[int, Any]]:
    for each in _list(value):
        if type(each) is not dict:
            raise ValueError("the footer holds no struct where one should be")
        yield each


class _Thrift:
    """Reads values of the compact protocol, one after the other; a struct is a map from field numbers to values."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._left = MAX_VALUES

    def struct(self, depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != _STOP:
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            if number in fields:
                raise ValueError(f"the footer has field {number} twice")
            kind = head & 15
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise ValueError(f"the footer has more than {MAX_VALUES} values, or deeper ones than {_MAX_DEPTH}")
        if _SHORT <= kind <= _LONG:
            return self._zigzag()
        if kind == _BINARY:
            return self._take(self._varint())
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._byte()
        if kind == _DOUBLE:
            return self._take(8)
        if kind in (_LIST, _SET):
            head = self._byte()
            size = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15, depth + 1) for _ in range(size)]
        if kind == _STRUCT:
            return self.struct(depth + 1)
        raise ValueError(f"the footer has a value of kind {kind}")

    def _byte(self) -> int:
        byte = self._data[self._at]
        self._at += 1
        return byte

    def _take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        if len(taken) != size:
            raise ValueError("the footer ends too early")
        self._at += size
        return taken

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("the footer has a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 if not value & 1 else -(value >> 1) - 1
