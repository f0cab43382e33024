"""Frames: a byte string that says what it is, how long it is, and whether it arrived whole.

A frame is a 28-byte little-endian header followed by one zstd frame:

    magic "MOER" | schema version u16 | kind u16 | payload bytes u64 | body bytes u64 | CRC-32 u32 | zstd body

The CRC covers the header before it and the compressed body, so every flipped bit is caught before anything is
decompressed; the zstd content checksum covers the payload once more. Sizes are compared with the limits before memory
is spent, and decompression can never write more than the declared payload. Any process; no pickle.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import zstandard

from moerl.contract.reasons import Reason
from moerl.errors import ContractError

SCHEMA_VERSION = 1
"""Rises with every change of the payload; a reader refuses every version but its own."""

Buffer = bytes | memoryview

MAGIC = b"MOER"
_PREFIX = struct.Struct("<4sHHQQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = _PREFIX.size + _CRC.size
# Expert ids are close to random bytes: level 1 gets what entropy coding can give, higher levels only take longer.
_ZSTD_LEVEL = 1


class FrameKind(IntEnum):
    """Kind of payload."""

    TRAJECTORIES = 1
    BATCHES = 2


@dataclass(frozen=True, slots=True)
class WireLimits:
    """The most that a receiver accepts of one frame."""

    max_frame_bytes: int = 1 << 30
    """Bytes of the frame as received."""
    max_payload_bytes: int = 2 << 30
    """Bytes of the frame decompressed."""

    @property
    def max_values(self) -> int:
        """How many values (names, numbers, arrays) a document may hold; as objects each takes a hundred bytes or so."""
        return min(1 << 20, max(1 << 10, self.max_payload_bytes >> 7))


DEFAULT_LIMITS = WireLimits()


def pack_frame(parts: Iterable[Buffer], payload_bytes: int, kind: FrameKind) -> bytes:
    """Compresses and seals a payload given in parts, of `payload_bytes` together; a part may be overwritten once the
    next is asked for.

    A payload of hundreds of megabytes is never in memory in one piece.
    """
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True, write_content_size=True)
    stream = compressor.compressobj(size=payload_bytes)
    body = [stream.compress(part) for part in parts]
    body.append(stream.flush())
    prefix = _PREFIX.pack(MAGIC, SCHEMA_VERSION, kind, payload_bytes, sum(map(len, body)))
    crc = zlib.crc32(prefix)
    for piece in body:
        crc = zlib.crc32(piece, crc)
    return b"".join((prefix, _CRC.pack(crc), *body))


def unpack_frame(frame: bytes, kind: FrameKind, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    """Returns the payload of a frame.

    Raises:
        ContractError: `frame_too_large`, `frame_truncated`, `frame_corrupt`, `schema_version_unknown` or
            `frame_kind_wrong`.
    """
    if len(frame) > limits.max_frame_bytes:
        raise ContractError(
            Reason.FRAME_TOO_LARGE, field="frame", seen=len(frame), expected=f"at most {limits.max_frame_bytes} bytes"
        )
    if len(frame) < HEADER_BYTES:
        raise ContractError(
            Reason.FRAME_TRUNCATED, field="frame", seen=len(frame), expected=f"at least {HEADER_BYTES} bytes"
        )
    payload_bytes, body = _check_header(frame, kind)
    if payload_bytes > limits.max_payload_bytes:
        raise ContractError(
            Reason.FRAME_TOO_LARGE,
            field="payload_bytes",
            seen=payload_bytes,
            expected=f"at most {limits.max_payload_bytes} bytes",
        )
    return _decompress(body, payload_bytes)


def is_whole(frame: Buffer) -> bool:
    """Returns True for a frame whose bytes match its CRC, of any version and kind. Decompresses nothing."""
    if len(frame) < HEADER_BYTES:
        return False
    crc_seen, crc = _crcs(memoryview(frame))
    return crc_seen == crc


def _crcs(frame: memoryview) -> tuple[int, int]:
    """Returns the CRC that a frame states, and the one of its bytes."""
    (stated,) = _CRC.unpack_from(frame, _PREFIX.size)
    return stated, zlib.crc32(frame[HEADER_BYTES:], zlib.crc32(frame[: _PREFIX.size]))


def _check_header(frame: bytes, kind: FrameKind) -> tuple[int, memoryview]:
    view = memoryview(frame)
    magic, version, kind_seen, payload_bytes, body_bytes = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise ContractError(Reason.FRAME_CORRUPT, field="magic", seen=magic, expected=MAGIC)
    if version != SCHEMA_VERSION:
        raise ContractError(
            Reason.SCHEMA_VERSION_UNKNOWN,
            field="schema_version",
            seen=version,
            expected=SCHEMA_VERSION,
            remedy="run the same moerl version on both sides",
        )
    body = view[HEADER_BYTES:]
    if len(body) != body_bytes:
        reason = Reason.FRAME_TRUNCATED if len(body) < body_bytes else Reason.FRAME_CORRUPT
        raise ContractError(reason, field="body", seen=len(body), expected=f"{body_bytes} bytes")
    crc_seen, crc = _crcs(view)
    if crc_seen != crc:
        raise ContractError(Reason.FRAME_CORRUPT, field="crc", seen=f"{crc_seen:08x}", expected=f"{crc:08x}")
    if kind_seen != kind:
        raise ContractError(Reason.FRAME_KIND_WRONG, field="kind", seen=kind_seen, expected=f"{kind} ({kind.name})")
    return payload_bytes, body


def _decompress(body: memoryview, payload_bytes: int) -> bytes:
    """Decompresses into exactly `payload_bytes`; zstd's own header must declare the same size."""
    try:
        header = zstandard.get_frame_parameters(body)
        if header.content_size != payload_bytes or not header.has_checksum:
            raise ContractError(
                Reason.FRAME_CORRUPT,
                field="zstd header",
                seen=f"content size {header.content_size}, checksum {header.has_checksum}",
                expected=f"content size {payload_bytes}, checksum True",
            )
        decompressor = zstandard.ZstdDecompressor()
        return decompressor.decompress(body, max_output_size=payload_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ContractError(
            Reason.FRAME_CORRUPT, field="zstd body", seen=error, expected="one whole zstd frame"
        ) from error
