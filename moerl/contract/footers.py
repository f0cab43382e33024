"""Descriptions that Parquet files give of themselves, read before pyarrow sees the file: rows, sizes and encodings of
its columns, and sizes of its pages.

pyarrow ends the process if some fields of a column's metadata contradict each other, and builds hundreds of bytes
for each. So the footer is read here first, with a bound on its values. It is a struct in Thrift's compact protocol; the
numbers of fields are those of `parquet.thrift`. Headers of pages are read, too, without unpacking a page: a column
takes as much memory as its pages state, for pyarrow makes room for that much. Any process; no pyarrow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

MAX_VALUES = 1 << 20
"""Most fields and elements of a footer. A row group of ours has about two thousand."""

_MAX_FOOTER_BYTES = 64 << 20
_MAX_HEADER_BYTES = 16 << 20
"""Largest header of a page. pyarrow's limit; it holds two values of the column."""
_FIRST_BYTES = 4096
"""Bytes of a header that are read at first; few headers are longer."""

_MAX_DEPTH = 16
_BYTE_ARRAY, _FIXED = 6, 7
_DECIMAL, _LOGICAL_DECIMAL, _DECIMAL_BYTES = 5, 5, 32
_DATA_PAGES = {0: (5, 2), 3: (8, 4)}
"""Kinds of data pages, with the field of a page's header that is theirs, and its field of the encoding."""
_DICTIONARY_PAGE = 2
_CODED = (2, 8)
"""Encodings that give a value by its number in the dictionary."""

_STOP, _TRUE, _FALSE, _BYTE, _SHORT, _LONG, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """A column of a row group."""

    path: str
    """Names from the table's column down to the leaf, joined by dots."""
    root: str
    """Name of the table's column that the chunk is a part of."""
    physical_type: int
    """Number of the type, as in Parquet."""
    is_text: bool
    """True for texts or bytes of any length."""
    width: int
    """Bytes of a value if all take the same and it is no plain number, else 0."""
    encodings: frozenset[int]
    """Numbers of the encodings, as in Parquet."""
    num_values: int
    """Values of leaves, nulls too."""
    uncompressed_bytes: int
    """Bytes of all pages, unpacked."""
    start: int
    """Byte of the file at which its pages begin."""
    packed_bytes: int
    """Bytes of its pages in the file."""
    coded_values: int = 0
    """Values that its pages give by their number in the dictionary; 0 in a footer that was not measured."""
    dictionary_bytes: int = 0
    """Size of the dictionary; 0 in a footer that was not measured."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    num_rows: int
    """Rows of the group."""
    columns: tuple[ColumnChunk, ...]
    """One chunk per leaf of the schema, in its order."""


@dataclass(frozen=True, slots=True)
class Footer:
    """The description that a Parquet file gives of itself."""

    num_rows: int
    """Rows of the file."""
    row_groups: tuple[RowGroup, ...]
    """In the order of the file."""
    metadata: dict[bytes, bytes]
    """Entries of the file, by key."""


def read_footer(data: bytes) -> Footer:
    """Returns the footer of a Parquet file.

    Raises:
        ValueError: it is no Parquet file, lacks a field that is read here, or has more than `MAX_VALUES` values.
    """
    size = int.from_bytes(data[-8:-4], "little")
    if len(data) < size + 12 or data[:4] != b"PAR1" or data[-4:] != b"PAR1":
        raise ValueError("no Parquet file")
    try:
        file = _Thrift(data[-8 - size : -8]).struct(0)
        leaves = [each for each in _structs(file.get(2, [])) if 1 in each]
        return Footer(
            num_rows=_typed(int, file[3]),
            row_groups=tuple(_row_group(each, leaves) for each in _structs(file[4])),
            metadata={_typed(bytes, each[1]): _typed(bytes, each.get(2, b"")) for each in _structs(file.get(5, []))},
        )
    except (KeyError, IndexError) as error:
        raise ValueError(f"the footer lacks {error}") from error


def measured_footer(stream: BinaryIO) -> Footer:
    """Reads the footer of a Parquet file; a column gets the size that its pages state, if that is larger.

    Raises:
        ValueError: as `read_footer`, or the pages or row groups are not those of the footer.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - 8))
    length = int.from_bytes(stream.read(8)[:4], "little")
    if length + 12 > size or length > _MAX_FOOTER_BYTES:
        raise ValueError(f"a footer of {length} bytes in a file of {size}")
    stream.seek(0)
    start = stream.read(4)
    stream.seek(size - 8 - length)
    footer = read_footer(start + stream.read(length + 8))
    if sum(group.num_rows for group in footer.row_groups) != footer.num_rows:
        raise ValueError("row groups do not add up to the rows")
    groups = tuple(
        RowGroup(group.num_rows, tuple(_measured(stream, column, size) for column in group.columns))
        for group in footer.row_groups
    )
    return replace(footer, row_groups=groups)


def _measured(stream: BinaryIO, column: ColumnChunk, file_bytes: int) -> ColumnChunk:
    """Looks at the headers of all pages that pyarrow would read."""
    at, end = column.start, column.start + column.packed_bytes
    if end > file_bytes:
        raise ValueError(f"the pages of {column.path} end behind the file")
    num_values = coded_values = unpacked = dictionary = 0
    try:
        while num_values < column.num_values:
            header, header_bytes = _page_header(stream, at, end)
            kind, page_bytes = _typed(int, header[1]), _typed(int, header[2])
            unpacked += page_bytes
            at += header_bytes + _typed(int, header[3])
            if kind in _DATA_PAGES:
                field, encoding = _DATA_PAGES[kind]
                (data,) = _structs([header[field]])
                values = _typed(int, data[1])
                num_values += values
                coded_values += values if _typed(int, data[encoding]) in _CODED else 0
            elif kind == _DICTIONARY_PAGE:
                dictionary = page_bytes
    except (KeyError, IndexError) as error:
        raise ValueError(f"a page of {column.path} is damaged, or there are too few: lacks {error}") from error
    return replace(
        column,
        num_values=num_values,
        uncompressed_bytes=max(unpacked, column.uncompressed_bytes),
        coded_values=coded_values,
        dictionary_bytes=dictionary,
    )


def _page_header(stream: BinaryIO, at: int, end: int) -> tuple[dict[int, Any], int]:
    """Returns the header at a byte of the file, and how many bytes the header takes."""
    for most in (_FIRST_BYTES, _MAX_HEADER_BYTES):
        stream.seek(at)
        thrift = _Thrift(stream.read(min(most, end - at)))
        try:
            return thrift.struct(0), thrift.at
        except (IndexError, ValueError):
            if most == _MAX_HEADER_BYTES or most >= end - at:
                raise
    raise AssertionError("the last try returns or raises")


def _row_group(fields: dict[int, Any], leaves: Sequence[dict[int, Any]]) -> RowGroup:
    columns = [each[3] for each in _structs(fields[1])]
    if len(columns) != len(leaves):
        raise ValueError(f"the footer has {len(columns)} columns in a row group, and {len(leaves)} in its schema")
    return RowGroup(_typed(int, fields[3]), tuple(map(_column_chunk, columns, leaves)))


def _column_chunk(fields: Any, leaf: dict[int, Any]) -> ColumnChunk:
    (fields,) = _structs([fields])
    path = [_typed(bytes, name).decode() for name in _typed(list, fields[3])]
    decimal = leaf.get(6) == _DECIMAL or (type(logical := leaf.get(10)) is dict and _LOGICAL_DECIMAL in logical)
    kind, pages, dictionary = _typed(int, fields[1]), _typed(int, fields[9]), _typed(int, fields.get(11, 0))
    return ColumnChunk(
        path=".".join(path),
        root=path[0],
        physical_type=kind,
        is_text=kind == _BYTE_ARRAY and not decimal,
        width=_DECIMAL_BYTES if decimal else _typed(int, leaf[2]) if kind == _FIXED else 0,
        encodings=frozenset(_typed(int, each) for each in _typed(list, fields[2])),
        num_values=_typed(int, fields[5]),
        uncompressed_bytes=_typed(int, fields[6]),
        start=dictionary if 0 < dictionary < pages else pages,
        packed_bytes=_typed(int, fields[7]),
    )


_KINDS: dict[type[Any], str] = {int: "number", bytes: "text", list: "list", dict: "struct"}


def _typed[T](kind: type[T], value: Any) -> T:
    """Returns a value, which must be of this kind; a number must not be negative."""
    number: Any = value
    if type(value) is not kind or (kind is int and number < 0):
        raise ValueError(f"the footer lacks a {_KINDS[kind]} that should be there")
    return value


def _structs(value: Any) -> Iterator[dict[int, Any]]:
    return (_typed(dict, each) for each in _typed(list, value))


class _Thrift:
    """A reader of values of the compact protocol, one after the other; a struct is a map from field numbers to
    values."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0
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
        byte = self._data[self.at]
        self.at += 1
        return byte

    def _take(self, size: int) -> bytes:
        taken = self._data[self.at : self.at + size]
        if len(taken) != size:
            raise ValueError("the footer ends too early")
        self.at += size
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
