"""Frames: whole or refused, bounded before memory is spent."""

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import zstandard

from moerl.contract.frame import HEADER_BYTES, MAGIC, SCHEMA_VERSION, FrameKind, WireLimits, pack_frame, unpack_frame
from moerl.contract.reasons import Reason
from moerl.errors import ContractError

PAYLOAD = b"routing and kept sets " * 9
KIND = FrameKind.TRAJECTORIES


def refusal(frame: bytes, limits: WireLimits | None = None) -> str:
    with pytest.raises(ContractError) as caught:
        unpack_frame(frame, KIND, limits or WireLimits())
    return caught.value.reason


def sealed(body: bytes, payload_bytes: int, version: int = SCHEMA_VERSION) -> bytes:
    """A frame with a right CRC around any body: what a hostile sender can always make."""
    prefix = struct.pack("<4sHHQQ", MAGIC, version, KIND, payload_bytes, len(body))
    return prefix + struct.pack("<I", zlib.crc32(body, zlib.crc32(prefix))) + body


def compress(data: bytes, *, write_checksum: bool = True, write_content_size: bool = True) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=write_checksum, write_content_size=write_content_size)
    return compressor.compress(data)


def test_a_payload_comes_back():
    for payload in (b"", PAYLOAD, bytes(100_000)):
        assert unpack_frame(pack_frame([payload], len(payload), KIND), KIND) == payload
        halves = [payload[:50], payload[50:]]
        assert unpack_frame(pack_frame(halves, len(payload), KIND), KIND) == payload


def test_every_truncation_is_refused():
    frame = pack_frame([PAYLOAD], len(PAYLOAD), KIND)
    assert {refusal(frame[:length]) for length in range(len(frame))} == {Reason.FRAME_TRUNCATED}


def test_every_flipped_bit_is_refused():
    frame = pack_frame([PAYLOAD], len(PAYLOAD), KIND)
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << (bit % 8)
        assert refusal(bytes(flipped)) in {Reason.FRAME_CORRUPT, Reason.FRAME_TRUNCATED, Reason.SCHEMA_VERSION_UNKNOWN}


def test_another_protocol_is_refused_even_with_a_right_crc():
    frame = bytearray(sealed(compress(PAYLOAD), len(PAYLOAD)))
    frame[:4] = b"ELSE"
    frame[24:28] = struct.pack("<I", zlib.crc32(frame[28:], zlib.crc32(frame[:24])))
    with pytest.raises(ContractError) as caught:
        unpack_frame(bytes(frame), KIND)
    assert (caught.value.reason, caught.value.field) == (Reason.FRAME_CORRUPT, "magic")


def test_a_body_of_another_length_is_named_before_the_crc_is_judged():
    with pytest.raises(ContractError) as caught:
        unpack_frame(pack_frame([PAYLOAD], len(PAYLOAD), KIND) + b"x", KIND)
    assert (caught.value.reason, caught.value.field) == (Reason.FRAME_CORRUPT, "body")


def test_trailing_bytes_are_refused():
    frame = pack_frame([PAYLOAD], len(PAYLOAD), KIND)
    assert refusal(frame + b"x") == Reason.FRAME_CORRUPT
    assert refusal(frame + frame) == Reason.FRAME_CORRUPT
    assert refusal(sealed(compress(PAYLOAD) + b"x", len(PAYLOAD))) == Reason.FRAME_CORRUPT
    assert refusal(sealed(compress(PAYLOAD) * 2, len(PAYLOAD))) == Reason.FRAME_CORRUPT


def test_a_frame_of_another_kind_is_refused():
    assert refusal(pack_frame([PAYLOAD], len(PAYLOAD), FrameKind.BATCHES)) == Reason.FRAME_KIND_WRONG


def test_an_unknown_schema_version_is_refused():
    frame = sealed(compress(PAYLOAD), len(PAYLOAD), version=SCHEMA_VERSION + 1)
    assert refusal(frame) == Reason.SCHEMA_VERSION_UNKNOWN


def test_frames_above_the_limits_are_refused():
    frame = pack_frame([PAYLOAD], len(PAYLOAD), KIND)
    assert refusal(frame, WireLimits(max_frame_bytes=len(frame) - 1)) == Reason.FRAME_TOO_LARGE
    assert refusal(frame, WireLimits(max_payload_bytes=len(PAYLOAD) - 1)) == Reason.FRAME_TOO_LARGE
    exact = WireLimits(max_frame_bytes=len(frame), max_payload_bytes=len(PAYLOAD))
    assert unpack_frame(frame, KIND, exact) == PAYLOAD


@pytest.mark.parametrize(
    ("body", "declared"),
    [
        pytest.param(compress(bytes(1 << 26)), 100, id="declares less than it holds"),
        pytest.param(compress(bytes(1 << 26), write_content_size=False), 100, id="omits its size"),
        pytest.param(compress(PAYLOAD), 1 << 25, id="declares more than it holds"),
        pytest.param(compress(PAYLOAD, write_checksum=False), len(PAYLOAD), id="without a checksum"),
        pytest.param(b"\x50\x2a\x4d\x18\x04\x00\x00\x00aaaa", 4, id="skippable frame"),
        pytest.param(b"not zstd at all", 4, id="not zstd"),
        pytest.param(b"", 4, id="empty"),
    ],
)
def test_a_body_that_lies_is_refused_without_spending_memory(body: bytes, declared: int):
    frame = sealed(body, declared)
    tracemalloc.start()
    try:
        assert refusal(frame) == Reason.FRAME_CORRUPT
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_bomb_that_tells_the_truth_meets_the_limit():
    bomb = sealed(compress(bytes(1 << 26)), 1 << 26)
    assert len(bomb) < 1 << 14
    tracemalloc.start()
    try:
        assert refusal(bomb, WireLimits(max_payload_bytes=1 << 24)) == Reason.FRAME_TOO_LARGE
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_zstd_body_whose_inner_size_was_forged_never_writes_beyond_the_declared_size():
    body = bytearray(compress(bytes(300)))
    header = zstandard.get_frame_parameters(bytes(body))
    assert header.content_size == 300
    # Two-byte content sizes are stored less 256, right after the frame header descriptor.
    body[5:7] = struct.pack("<H", 1)
    assert zstandard.get_frame_parameters(bytes(body)).content_size == 257
    assert refusal(sealed(bytes(body), 257)) == Reason.FRAME_CORRUPT


def test_random_bytes_are_never_a_frame():
    rng = np.random.default_rng(0)
    for _ in range(200):
        noise = rng.bytes(int(rng.integers(0, 200)))
        assert refusal(noise) in set(Reason)
        assert refusal(sealed(noise, int(rng.integers(0, 1000)))) == Reason.FRAME_CORRUPT
    assert HEADER_BYTES == 28
