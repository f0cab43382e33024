from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from factories import same_trajectory
from memory import traced
from sglang_fake import SPEC, compact, compact_fields

from moerl.contract.array_codec import pack_kept_ids
from moerl.contract.ports import RolloutRequest
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import FinishReason, Lineage, SamplingParams, Trajectory
from moerl.errors import ContractError
from moerl.rollout.segments import trajectory_values
from moerl.rollout.sglang.answers import (
    VersionSpan,
    decode_compact,
    finish_reason,
    first_row,
    read_segment,
    version_spans,
)

CUT = SamplingParams(top_p=0.9, top_k=5)
SPANS = [VersionSpan("3", 0, 4)]
MAX_BYTES = 10_000


def request(sampling: SamplingParams = CUT) -> RolloutRequest:
    return RolloutRequest(Lineage("r0", "p0", "g0"), (7, 8, 9), sampling, 4)


def trajectory(sampling: SamplingParams = CUT, spans: list[VersionSpan] = SPANS, **changes: Any) -> Trajectory:
    answer = decode_compact(compact(compact_fields(3, 4, cuts=sampling.cuts) | changes), MAX_BYTES)
    segment = read_segment(request(sampling), answer, spans, 0, SPEC)
    return Trajectory(**trajectory_values(request(sampling), [segment], FinishReason.LENGTH, SPEC))


def test_an_answer_becomes_a_trajectory():
    made = trajectory(spans=[VersionSpan("3", 0, 1), VersionSpan("4", 1, 4)])
    assert made.token_ids.tolist() == [7, 8, 9, 1, 2, 3, 4]
    assert made.policy_versions.tolist() == [-1, -1, -1, 3, 4, 4, 4]
    assert made.rollout_logprobs.tolist() == [0, 0, 0, -0.5, -0.5, -0.5, -0.5]
    assert made.kept_logmass.tolist() == [0, 0, 0, -1, -1, -1, -1]
    assert made.kept.sizes.tolist() == [0, 0, 0, 2, 2, 2, 2]
    assert made.kept.ids.tolist() == [1, 2, 2, 3, 3, 4, 4, 5]
    assert made.expert_ids.shape == (6, 2, 2)
    assert made.truncated.tolist() == made.sampled.tolist()


@pytest.mark.parametrize("sampling", [CUT, SamplingParams()])
@pytest.mark.parametrize("cuts", [(1, 3), (3, 1), (1, 1, 2), (2, 1, 1)])
def test_segments_of_an_interrupted_rollout_are_what_one_answer_would_have_been(
    sampling: SamplingParams, cuts: tuple[int, ...]
):
    fields = compact_fields(3, 4, cuts=sampling.cuts)
    whole = trajectory(sampling, [VersionSpan("3", 0, cuts[0]), VersionSpan("4", cuts[0], 4)])
    segments, before = [], 0
    for count in cuts:
        part = slice(before, before + count)
        row = first_row(request(sampling), before)
        rows = slice(row, 3 + before + count - 1)
        kept = slice(2 * before, 2 * (before + count))
        experts = np.frombuffer(fields["expert_ids"], np.uint8).reshape(2, 6, 2)[:, rows]
        changes = {
            name: np.frombuffer(fields[name], "<u4")[part].tobytes()
            for name in ("output_ids", "logprobs", "kept_logprobs", "kept_sizes")
        }
        if sampling.cuts:
            offsets = np.arange(0, 2 * count + 1, 2)
            changes["kept_ids"] = bytes(pack_kept_ids(offsets, np.ascontiguousarray(whole.kept.ids[kept])))
        answer = decode_compact(
            compact(fields | changes | {"num_rows": rows.stop - rows.start, "expert_ids": experts.tobytes()}), MAX_BYTES
        )
        spans = [VersionSpan("3" if before == 0 else "4", 0, count)]
        segments.append(read_segment(request(sampling), answer, spans, before, SPEC))
        before += count
    joined = Trajectory(**trajectory_values(request(sampling), segments, FinishReason.LENGTH, SPEC))
    assert same_trajectory(joined, whole)


def test_where_nothing_is_cut_the_full_logprobs_count():
    made = trajectory(SamplingParams())
    assert made.rollout_logprobs[3:].tolist() == [-1.5] * 4
    assert not made.kept_logmass.any()
    assert not made.truncated.any()
    assert len(made.kept.ids) == 0


def test_rounding_above_zero_is_clamped_and_more_is_left_for_the_contract():
    tiny = trajectory(SamplingParams(), logprobs=np.array([5e-7, -1, -1, -1], "<f4").tobytes())
    assert tiny.rollout_logprobs[3] == 0
    rounded = np.array([-20.0, -1, -1, -1], "<f4")
    above = np.nextafter(rounded, -np.inf, dtype="<f4")
    nearly_all = trajectory(SamplingParams(top_k=2), logprobs=rounded.tobytes(), kept_logprobs=above.tobytes())
    assert not nearly_all.kept_logmass.any()
    with pytest.raises(ContractError) as caught:
        trajectory(SamplingParams(), logprobs=np.array([0.5, -1, -1, -1], "<f4").tobytes())
    assert caught.value.reason == Reason.LOGPROB_POSITIVE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": b"\0" * 12}, Reason.ARRAY_LENGTH_WRONG),
        ({"kept_logprobs": b""}, Reason.ARRAY_LENGTH_WRONG),
        ({"kept_sizes": b"\0" * 12}, Reason.ARRAY_LENGTH_WRONG),
        ({"kept_ids": b""}, Reason.ARRAY_LENGTH_WRONG),
        ({"kept_sizes": np.full(4, 2**31, "<u4").tobytes()}, Reason.ARRAY_LENGTH_WRONG),
        ({"num_rows": 5}, Reason.WRONG_SHAPE),
        ({"expert_ids": b"\1" * 23}, Reason.ARRAY_LENGTH_WRONG),
        ({"expert_ids": b"\1" * 24}, Reason.REPEATED_EXPERT),
        ({"schema": 2}, Reason.SCHEMA_VERSION_UNKNOWN),
        ({"more": 1}, Reason.MESSAGE_MALFORMED),
        ({"num_rows": "6"}, Reason.MESSAGE_MALFORMED),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], reason: Reason):
    with pytest.raises(ContractError) as caught:
        trajectory(**changes)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "spans",
    [[], [("3", 0, 3)], [("3", 0, 2), ("4", 3, 4)], [("3", 0, 5)], [("default", 0, 4)], [("3", 0, 0), ("3", 0, 4)]],
)
def test_versions_must_cover_the_sampled_tokens(spans: list[tuple[str, int, int]]):
    with pytest.raises(ContractError, match="weight_versions"):
        trajectory(spans=[VersionSpan(*span) for span in spans])


def damaged() -> list[bytes]:
    frame = compact(compact_fields(3, 4, cuts=True))
    flipped = bytearray(frame)
    flipped[len(frame) // 2] ^= 1
    unchecked = zstandard.ZstdCompressor(write_checksum=False).compress(b"x")
    return [b"", b"None", frame[:-3], bytes(flipped), frame + b"x", unchecked]


@pytest.mark.parametrize("field", damaged())
def test_a_damaged_field_is_refused(field: bytes):
    with pytest.raises(ContractError) as caught:
        decode_compact(field, MAX_BYTES)
    assert caught.value.reason == Reason.FRAME_CORRUPT


@pytest.mark.parametrize("field", [None, "text", 3])
def test_a_field_of_another_type_is_refused(field: object):
    with pytest.raises(ContractError) as caught:
        decode_compact(field, MAX_BYTES)
    assert caught.value.reason == Reason.WRONG_TYPE


def test_a_decompression_bomb_is_refused_before_it_is_opened():
    bomb = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(64 << 20))
    assert len(bomb) < 10_000
    with traced() as peak, pytest.raises(ContractError) as caught:
        decode_compact(bomb, MAX_BYTES)
    assert caught.value.reason == Reason.FRAME_TOO_LARGE
    assert peak() < 1 << 20


def test_a_field_that_stands_twice_is_refused():
    (name, value), *rest = compact_fields(3, 4, cuts=True).items()
    encoded = b"".join(msgspec.msgpack.encode(part) for pair in ((name, value), (name, value), *rest) for part in pair)
    field = zstandard.ZstdCompressor(write_checksum=True).compress(bytes([0x80 + len(rest) + 2]) + encoded)
    with pytest.raises(ContractError) as caught:
        decode_compact(field, MAX_BYTES)
    assert caught.value.reason == Reason.DUPLICATE_FIELD


def test_a_field_of_millions_of_values_is_refused_before_one_is_built():
    field = compact(compact_fields(3, 4, cuts=True) | {"more": [[]] * (4 << 20)})
    with traced() as peak, pytest.raises(ContractError) as caught:
        decode_compact(field, 16 << 20)
    assert caught.value.reason == Reason.FRAME_TOO_LARGE
    assert peak() < 16 << 20


@pytest.mark.parametrize("reason", [None, "stop", {"type": "error"}, {}])
def test_an_unknown_finish_reason_is_refused(reason: object):
    with pytest.raises(ContractError, match="finish_reason"):
        finish_reason({"finish_reason": reason})


@pytest.mark.parametrize("spans", [None, [{"version": 1, "start": 0, "end": 1}], [{"version": "1"}]])
def test_spans_of_another_shape_are_refused(spans: object):
    with pytest.raises(ContractError, match="weight_versions"):
        version_spans({"weight_versions": spans})
