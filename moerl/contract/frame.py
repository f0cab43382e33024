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
from moerl.contract.requirements import require
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
    size, most = len(frame), limits.max_frame_bytes
    require(size <= most, Reason.FRAME_TOO_LARGE, "frame", size, f"at most {most} bytes")
    require(size >= HEADER_BYTES, Reason.FRAME_TRUNCATED, "frame", size, f"at least {HEADER_BYTES} bytes")
    payload_bytes, body = _check_header(memoryview(frame), kind)
    most = limits.max_payload_bytes
    require(payload_bytes <= most, Reason.FRAME_TOO_LARGE, "payload_bytes", payload_bytes, f"at most {most} bytes")
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


def _check_header(frame: memoryview, kind: FrameKind) -> tuple[int, memoryview]:
    magic, version, kind_seen, payload_bytes, body_bytes = _PREFIX.unpack_from(frame)
    require(magic == MAGIC, Reason.FRAME_CORRUPT, "magic", magic, MAGIC)
    is_known, remedy = version == SCHEMA_VERSION, "run the same moerl version on both sides"
    require(is_known, Reason.SCHEMA_VERSION_UNKNOWN, "schema_version", version, SCHEMA_VERSION, remedy=remedy)
    body = frame[HEADER_BYTES:]
    reason = Reason.FRAME_TRUNCATED if len(body) < body_bytes else Reason.FRAME_CORRUPT
    require(len(body) == body_bytes, reason, "body", len(body), f"{body_bytes} bytes")
    crc_seen, crc = _crcs(frame)
    require(crc_seen == crc, Reason.FRAME_CORRUPT, "crc", f"{crc_seen:08x}", f"{crc:08x}")
    require(kind_seen == kind, Reason.FRAME_KIND_WRONG, "kind", kind_seen, f"{kind} ({kind.name})")
    return payload_bytes, body


def _decompress(body: memoryview, payload_bytes: int) -> bytes:
    """Decompresses into exactly `payload_bytes`; zstd's own header must declare the same size."""
    try:
        header = zstandard.get_frame_parameters(body)
        agrees = header.content_size == payload_bytes and header.has_checksum
        seen = f"content size {header.content_size}, checksum {header.has_checksum}"
        expected = f"content size {payload_bytes}, checksum True"
        require(agrees, Reason.FRAME_CORRUPT, "zstd header", seen, expected)
        decompressor = zstandard.ZstdDecompressor()
        return decompressor.decompress(body, max_output_size=payload_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ContractError(
            Reason.FRAME_CORRUPT, field="zstd body", seen=error, expected="one whole zstd frame"
        ) from error
