"""A digest of a whole Parquet file inside its own footer, so that no byte of it can change unseen.

Parquet's checksums cover pages and leave out the footer: names of columns, row counts, small values in statistics. The
digest is a text of 64 hexadecimal digits in the file's metadata; it is that of the file with zeros in its place. Other
readers see one more entry of metadata. It finds damage, not intent: whoever writes a file can seal it. Any process.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

KEY = b"moerl.digest"
BLANK = b"0" * 64
"""The entry's value when the file is written, before `seal`."""

# How Thrift writes the value that follows the key: field 2, a text of 64 bytes.
_MARK = KEY + b"\x18\x40"
_CHUNK_BYTES = 1 << 20


def seal(path: Path) -> None:
    """Puts the digest into a Parquet file that was written with `KEY: BLANK` in its metadata. Raises ValueError for any
    other file."""
    digest = hashlib.blake2b(digest_size=32)
    with path.open("r+b") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        file.seek(-8, 2)
        footer_bytes = 8 + int.from_bytes(file.read(4), "little")
        start = file.seek(-footer_bytes, 2)
        offset = _value_at(file.read(footer_bytes))
        if offset < 0:
            raise ValueError(f"{path} has no place for a digest")
        file.seek(start + offset)
        file.write(digest.hexdigest().encode())


def is_sealed(data: bytes) -> bool:
    """Returns True if the bytes are a file that `seal` sealed, every one of them unchanged."""
    footer_bytes = 8 + int.from_bytes(data[-8:-4], "little")
    start = max(0, len(data) - footer_bytes)
    offset = _value_at(data[start:])
    if offset < 0:
        return False
    at, end = start + offset, start + offset + len(BLANK)
    view = memoryview(data)
    digest = hashlib.blake2b(view[:at], digest_size=32)
    digest.update(BLANK)
    digest.update(view[end:])
    return data[at:end] == digest.hexdigest().encode()


def _value_at(footer: bytes) -> int:
    """Returns the place of the last digest in a footer (statistics come before metadata); -1 if there is none."""
    at = footer.rfind(_MARK)
    return at if at < 0 else at + len(_MARK)
