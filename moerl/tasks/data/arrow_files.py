"""Arrow files of `save_to_disk`, looked at before Hugging Face `datasets` maps them into memory.

The library maps buffers as they are, but unpacks compressed ones all at once: 3 KB can stand for 3 GB. It writes none.
The metadata of a message are a flatbuffer; numbers of fields are those of Arrow's format. Runs in the controller.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa

_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_HEADER_KIND, _HEADER = 1, 2
_BATCH_OF_DICTIONARY = 1
_COMPRESSION = 3


def find_compressed(folder: Path) -> Path | None:
    """Returns the first Arrow file in a folder, or one level below, that has compressed buffers; None if none has.

    Raises:
        ValueError, OSError, pa.ArrowException: a file is damaged.
    """
    for file in sorted([*folder.glob("*.arrow"), *folder.glob("*/*.arrow")]):
        with pa.memory_map(str(file)) as stream:
            messages = pa.ipc.MessageReader.open_stream(stream)
            if any(_is_compressed(message.metadata.to_pybytes()) for message in messages):
                return file
    return None


def _is_compressed(message: bytes) -> bool:
    try:
        (root,) = struct.unpack_from("<I", message)
        kind_at = _field(message, root, _HEADER_KIND)
        kind = message[kind_at] if kind_at else 0
        if kind not in (_DICTIONARY_BATCH, _RECORD_BATCH):
            return False
        batch = _table(message, root, _HEADER)
        if kind == _DICTIONARY_BATCH:
            batch = _table(message, batch, _BATCH_OF_DICTIONARY)
        return _field(message, batch, _COMPRESSION) > 0
    except (struct.error, IndexError) as error:
        raise ValueError(f"an Arrow message that ends too early ({error})") from error


def _field(message: bytes, table: int, number: int) -> int:
    """Returns the byte position of a field of a table; 0 for a field that is missing."""
    (back,) = struct.unpack_from("<i", message, table)
    names = table - back
    (size,) = struct.unpack_from("<H", message, names)
    at = 4 + 2 * number
    offset = struct.unpack_from("<H", message, names + at)[0] if at + 2 <= size else 0
    return table + offset if offset else 0


def _table(message: bytes, table: int, number: int) -> int:
    """Returns the byte position of the table that a field points to."""
    at = _field(message, table, number)
    return at + struct.unpack_from("<I", message, at)[0]
