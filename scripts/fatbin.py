"""Leaves the code of some GPU architectures in a shared library: ``trim(library, {90})``. Standard library alone.

CUDA libraries hold their kernels for many architectures in sections of fat binaries. Those of all others are
overwritten with zeros: offsets stay, the library loads as before, and compresses to a fraction. A kernel that was
overwritten cannot be launched, so the library is good for the named architectures alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_FATBIN_MAGIC = 0xBA55ED50
_FATBIN = struct.Struct("<IHHQ")
"""Magic, version, bytes of this header, bytes of the entries that follow."""
_ENTRY = struct.Struct("<HHIQ")
"""Kind, attributes, bytes of this header, bytes of the code that follows."""
_ENTRY_ARCHITECTURE = 28
"""Offset of the architecture in the header of an entry, for example 90."""
_MACHINE_CODE = 2
"""Kind of an entry that needs no compiler; 1 is PTX."""
_ALIGNMENT = 8


class Code(NamedTuple):
    """A kernel image: its architecture, if it is machine code, and its bytes from `start` to `end`."""

    architecture: int
    is_machine_code: bool
    start: int
    end: int


def trim(library: Path, keep: set[int]) -> dict[int, int]:
    """Overwrites all PTX, and machine code of architectures that are not in `keep`.

    Returns:
        Bytes of the machine code that stays, by architecture.

    Raises:
        ValueError: the file is no 64-bit ELF library, or holds no machine code of one of `keep`; it is unchanged.
    """
    data = bytearray(library.read_bytes())
    kept = dict.fromkeys(sorted(keep), 0)
    for start, end in _sections(data, library):
        for code in _codes(data, start, end):
            if code.is_machine_code and code.architecture in keep:
                kept[code.architecture] += code.end - code.start
            else:
                data[code.start : code.end] = bytes(code.end - code.start)
    if missing := [architecture for architecture, size in kept.items() if not size]:
        raise ValueError(
            f"{library} holds no machine code of sm_{missing[0]}; name an architecture that it was built for"
        )
    library.write_bytes(data)
    return kept


def _sections(data: bytes | bytearray, library: Path) -> Iterator[tuple[int, int]]:
    """Offsets of the sections with fat binaries, from first byte to behind the last."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError(f"{library} is no 64-bit ELF library")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, number, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + index * size) for index in range(number)]
    names = headers[names_index][4]
    for name, _, _, _, offset, length in headers:
        end = data.index(0, names + name)
        if data[names + name : end].decode() in SECTIONS:
            yield offset, offset + length


def _codes(data: bytes | bytearray, start: int, end: int) -> Iterator[Code]:
    position = start
    while position + _FATBIN.size <= end:
        magic, _, header, length = _FATBIN.unpack_from(data, position)
        if magic != _FATBIN_MAGIC:
            position += _ALIGNMENT
            continue
        entry, position = position + header, position + header + length
        while entry < position:
            kind, _, entry_header, size = _ENTRY.unpack_from(data, entry)
            if entry_header < _ENTRY_ARCHITECTURE + 4 or entry + entry_header + size > position:
                raise ValueError(f"an entry of a fat binary at byte {entry} is not as expected: {entry_header}, {size}")
            (architecture,) = struct.unpack_from("<I", data, entry + _ENTRY_ARCHITECTURE)
            first = entry + entry_header
            yield Code(architecture, kind == _MACHINE_CODE, first, first + size)
            entry = first + size
