"""Shares of microbatches between trainer ranks: bit for bit, nothing beyond the share, nothing unchecked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from factories import FULL, NUCLEUS, SPEC, make_trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.batching.packing import PackOptions, pack_for_ranks, pack_text_for_ranks, pack_trajectories
from moerl.batching.rows import Padding
from moerl.contract import batch_wire
from moerl.contract.batch import Microbatch, TextSample, TrainSample
from moerl.contract.batch_wire import decode_batches, encode_batches, share_frames
from moerl.contract.frame import FrameKind, WireLimits, pack_frame
from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.contract.shares import cut_share, own_routing_bytes, routing_bytes
from moerl.contract.trajectory import KeptSets, ModelSpec
from moerl.contract.wire import decode_trajectories
from moerl.errors import ContractError

WIDE = ModelSpec(num_moe_layers=4, experts_per_token=3, num_experts=300, vocab_size=70000)
LONG = ModelSpec(num_moe_layers=4, experts_per_token=3, num_experts=16, vocab_size=100)
PAIRS = [
    (SPEC, RankCoordinates()),
    (WIDE, RankCoordinates(ParallelDims(tensor=2, context=2), 3, (1, 3))),
    (SPEC, RankCoordinates(ParallelDims(tensor=2, pipeline=2), 0, (0,))),
]


def make_samples(lengths: Sequence[int], spec: ModelSpec = SPEC, first: int = 0, **changes: Any) -> list[TrainSample]:
    """Samples of these lengths; their rollouts are numbered from `first` on."""
    rng = np.random.default_rng(0)
    samples = []
    for i, length in enumerate(lengths, first):
        values: dict[str, Any] = {"sampling": FULL if i % 3 == 2 else NUCLEUS, "rollout_id": f"rollout-{i}"}
        trajectory = make_trajectory(rng, spec, num_prompt=2, num_sampled=length - 2, **(values | changes))
        samples.append(TrainSample(trajectory, trajectory.sampled * rng.normal(size=length).astype(np.float32)))
    return samples


def packed(spec: ModelSpec, layout: RankCoordinates) -> list[Microbatch]:
    options = PackOptions(64, Padding.of(layout.dims), scores=("teacher", "again"))
    samples = make_samples([9, 20, 31, 5, 40, 33], spec, unrouted=(1,))
    rng = np.random.default_rng(2)
    for i, sample in enumerate(samples):
        own = sample.trajectory
        scores = {"teacher": rng.normal(size=len(own)).astype(np.float32), "again": own.rollout_logprobs}
        samples[i] = replace(sample, trajectory=replace(own, scores=scores))
    return pack_trajectories(samples, options, replay=True, uncaptured="live")


def share(**changes: Any) -> Microbatch:
    return replace(packed(SPEC, RankCoordinates())[0], **changes)


def assert_same(left: Microbatch, right: Microbatch) -> None:
    for field in fields(Microbatch):
        a, b = getattr(left, field.name), getattr(right, field.name)
        pairs = [(a, b)]
        if isinstance(a, KeptSets):
            pairs = [(a.offsets, b.offsets), (a.ids, b.ids)]
        elif isinstance(a, dict):
            assert list(a) == list(b), field.name
            pairs = [*zip(a.values(), b.values(), strict=True)]
        for one, other in pairs:
            assert type(one) is type(other), field.name
            if isinstance(one, int):
                assert one == other, field.name
            elif one is not None:
                assert (one.dtype, one.shape) == (other.dtype, other.shape), field.name
                assert one.tobytes() == other.tobytes(), field.name


@pytest.mark.parametrize(("spec", "layout"), PAIRS)
def test_shares_come_back_bit_for_bit_with_their_facts(spec: ModelSpec, layout: RankCoordinates):
    sent = [cut_share(batch, layout) for batch in packed(spec, layout)]
    assert len(sent) > 1
    back, facts = decode_batches(encode_batches(sent, {"tokens": 7, "rows": 2.5}), spec=spec)
    assert facts == {"tokens": 7.0, "rows": 2.5}
    for one, other in zip(sent, back, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(("spec", "layout"), PAIRS)
def test_scores_lie_on_the_rows_that_log_probs_lie_on_and_ranks_without_the_head_get_none(
    spec: ModelSpec, layout: RankCoordinates
):
    for batch in packed(spec, layout):
        mine = cut_share(batch, layout)
        if not layout.is_last_stage:
            assert mine.scores == {}
            continue
        assert mine.scores["again"].tobytes() == mine.rollout_logprobs.tobytes()
        assert mine.scores["teacher"].any()
        assert not mine.scores["teacher"][~mine.loss_mask].any()


def test_a_microbatch_of_pad_rows_alone_has_the_scores_of_all() -> None:
    samples = [
        replace(s, trajectory=replace(s.trajectory, scores={"teacher": s.advantages})) for s in make_samples([9])
    ]
    ranks = pack_for_ranks(samples, 2, PackOptions(64, scores=("teacher",)), replay=True)
    assert [[list(batch.scores) for batch in rank] for rank in ranks] == [[["teacher"]], [["teacher"]]]
    assert not ranks[1][0].scores["teacher"].any()


def test_supervised_batches_travel_without_routing():
    sent = pack_text_for_ranks(
        [TextSample(np.arange(9, dtype=np.int32), np.arange(9) > 3)], 1, PackOptions(64, Padding(total=4))
    )[0]
    (back,), _ = decode_batches(encode_batches(sent, {}), spec=SPEC)
    assert_same(sent[0], back)


def test_a_stage_without_moe_layers_receives_no_expert_ids():
    layout = RankCoordinates(ParallelDims(pipeline=2), moe_layers=())
    sent = cut_share(packed(SPEC, layout)[0], layout)
    (back,), _ = decode_batches(encode_batches([sent], {}), spec=SPEC)
    assert_same(sent, back)
    assert back.expert_ids is not None
    assert back.expert_ids.nbytes == 0


def test_no_batches_are_a_frame_too():
    assert decode_batches(encode_batches([], {"tokens": 0.0}), spec=SPEC) == ([], {"tokens": 0.0})


def test_batches_are_not_taken_for_trajectories():
    with pytest.raises(ContractError, match="frame_kind_wrong"):
        decode_trajectories(encode_batches([share()], {}), spec=SPEC)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_flipped_bit_is_caught(data: st.DataObject):
    frame = bytearray(encode_batches([share()], {"tokens": 1.0}))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ContractError):
        decode_batches(bytes(frame), spec=SPEC)


def test_a_frame_above_the_limits_is_refused():
    with pytest.raises(ContractError, match="frame_too_large"):
        decode_batches(encode_batches([share()], {}), spec=SPEC, limits=WireLimits(max_payload_bytes=100))


def last(values: np.ndarray, value: Any, index: int = -1) -> np.ndarray:
    """A copy with one entry changed."""
    copy = values.copy()
    copy[index] = value
    return copy


def repeated(expert_ids: np.ndarray) -> np.ndarray:
    """A copy in which one row of one layer names an expert twice."""
    copy = expert_ids.copy()
    copy[3, 1, 1] = copy[3, 1, 0]
    return copy


BATCH = share()
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "expert beyond the model": ("expert_id_out_of_range", {"expert_ids": last(BATCH.expert_ids, 8)}),  # pyright: ignore
    "expert twice in a row": ("repeated_expert", {"expert_ids": repeated(BATCH.expert_ids)}),  # pyright: ignore
    "token beyond the vocabulary": ("token_id_out_of_range", {"input_ids": last(BATCH.input_ids, 100)}),
    "negative target": ("token_id_out_of_range", {"target_ids": last(BATCH.target_ids, -1)}),
    "kept id beyond the vocabulary": (
        "token_id_out_of_range",
        {"kept": KeptSets(BATCH.kept.offsets, last(BATCH.kept.ids, 100))},
    ),
    "advantage": ("value_not_finite", {"advantages": last(BATCH.advantages, np.nan)}),
    "score": ("value_not_finite", {"scores": {"teacher": last(BATCH.advantages, np.inf)}}),
    "a score too few": ("array_length_wrong", {"scores": {"teacher": BATCH.advantages[:-1]}}),
    "too many scores": ("too_many_names", {"scores": {str(i): BATCH.advantages for i in range(65)}}),
    "temperature": ("temperature_not_positive", {"temperatures": last(BATCH.temperatures, 0)}),
    "truncated without ids": ("truncated_disagrees", {"truncated": ~BATCH.truncated}),
    "pad with a sample": ("rows_differ", {"is_pad": ~BATCH.is_pad}),
    "trained pad": ("rows_differ", {"is_pad": BATCH.is_pad | True, "sample_index": BATCH.sample_index * 0 - 1}),
    "late start": ("offsets_not_from_zero", {"cu_seqlens": last(BATCH.cu_seqlens, 1, 0)}),
    "empty sequence": ("offsets_fall", {"cu_seqlens": last(BATCH.cu_seqlens, 0, 1)}),
    "wrong end": ("offsets_end_wrong", {"cu_seqlens": last(BATCH.cu_seqlens, BATCH.cu_seqlens[-1] + 1)}),
    "position beyond its sequence": ("value_out_of_range", {"position_ids": last(BATCH.position_ids, 1000)}),
    "routing rows of another share": ("wrong_shape", {"expert_ids": BATCH.expert_ids[:-1]}),  # pyright: ignore
    "more layers than the model": (
        "wrong_shape",
        {"expert_ids": np.concatenate([BATCH.expert_ids] * 2, 1)},  # pyright: ignore
    ),
    "a checksum too few": ("array_length_wrong", {"routing_checksums": BATCH.routing_checksums[:-1]}),  # pyright: ignore
    "a row too few": ("array_length_wrong", {"loss_mask": BATCH.loss_mask[:-8]}),
    "a sequence key too few": ("array_length_wrong", {"rollout_keys": BATCH.rollout_keys[:-1]}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_packer_makes_is_refused(name: str):
    reason, changes = WRONG[name]
    frame = encode_batches([replace(BATCH, **changes)], {})
    with pytest.raises(ContractError, match=reason):
        decode_batches(frame, spec=SPEC)


def test_rows_without_captured_routing_hold_zeros_and_no_others_may() -> None:
    assert BATCH.expert_ids is not None
    rows = np.array([2, 5])
    zeros, routed = BATCH.expert_ids.copy(), BATCH.routed.copy()
    zeros[rows], routed[rows] = 0, False
    (back,), _ = decode_batches(encode_batches([replace(BATCH, expert_ids=zeros, routed=routed)], {}), spec=SPEC)
    assert not back.routed[rows].any()
    assert back.expert_ids is not None
    assert np.array_equal(back.expert_ids, zeros)
    with pytest.raises(ContractError, match="repeated_expert"):
        decode_batches(encode_batches([replace(BATCH, expert_ids=zeros)], {}), spec=SPEC)
    with pytest.raises(ContractError, match="repeated_expert"):
        decode_batches(encode_batches([replace(BATCH, expert_ids=repeated(zeros), routed=routed)], {}), spec=SPEC)


def test_a_fact_that_is_no_number_is_refused():
    with pytest.raises(ContractError, match="value_not_finite"):
        decode_batches(encode_batches([], {"tokens": float("nan")}), spec=SPEC)


def sealed(document: Mapping[str, Any], rest: bytes = b"") -> bytes:
    """A well-formed frame around any document."""
    data = msgspec.msgpack.encode(document)
    payload = len(data).to_bytes(8, "little") + data + rest
    return pack_frame([payload], len(payload), FrameKind.BATCHES)


def message() -> dict[str, Any]:
    return msgspec.to_builtins(batch_wire._message(replace(BATCH, expert_ids=None)), builtin_types=(memoryview, bytes))


@pytest.mark.parametrize(
    ("reason", "changes", "rest"),
    [
        ("message_malformed", {"extra": 1}, b""),
        ("message_malformed", {"ints": {}}, b""),
        ("message_malformed", {"num_rows": "many"}, b""),
        ("too_short", {"num_rows": 0}, b""),
        ("array_length_wrong", {"num_rows": 1 << 62}, b""),
        ("array_length_wrong", {}, b"\0"),
        ("wrong_shape", {"routing": {"num_rows": -1, "num_layers": 1, "checksums": b""}}, b""),
        ("wrong_shape", {"routing": {"num_rows": 1 << 62, "num_layers": 1, "checksums": b""}}, b""),
        ("array_length_wrong", {"routing": {"num_rows": 1, "num_layers": 1, "checksums": b"\0" * 8}}, b"\0"),
    ],
)
def test_a_document_that_lies_is_refused(reason: str, changes: dict[str, Any], rest: bytes):
    with pytest.raises(ContractError, match=reason):
        decode_batches(sealed({"facts": {}, "batches": [message() | changes]}, rest), spec=SPEC)


def layouts() -> list[tuple[int, int, int, int]]:
    """(data, pipeline, context, tensor)"""
    return [(2, 1, 1, 1), (1, 1, 1, 2), (2, 2, 1, 2), (1, 1, 2, 1), (2, 2, 2, 2), (1, 4, 2, 4), (4, 1, 4, 2)]


def ranks_of(data: int, pipeline: int, context: int, tensor: int) -> list[RankCoordinates]:
    dims = ParallelDims(tensor, pipeline, context=context, data=data)
    per_stage = LONG.num_moe_layers // pipeline
    if pipeline == 1:
        return dims.ranks()
    starts = [rank.pipeline_rank * per_stage for rank in dims.ranks()]
    layers = [tuple(range(start, start + per_stage)) for start in starts]
    return [replace(rank, moe_layers=each) for rank, each in zip(dims.ranks(), layers, strict=True)]


@pytest.fixture(scope="module")
def long_samples() -> list[TrainSample]:
    """Lengths as of short rollouts, since padding per sequence counts for more there; a tenth has kept sets."""
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(7.0, 0.8, 48), 200, 6000).astype(int).tolist()
    return make_samples(lengths[:5], LONG) + make_samples(lengths[5:], LONG, first=5, sampling=FULL)


@pytest.mark.parametrize("layout", layouts())
def test_a_rank_receives_the_routing_of_its_own_share_alone(
    layout: tuple[int, int, int, int], long_samples: list[TrainSample]
):
    data, _, context, tensor = layout
    everyone = ranks_of(*layout)
    options = PackOptions(16384, Padding.of(ParallelDims(tensor=tensor, context=context)))
    ranks = pack_for_ranks(long_samples, data, options, replay=True)
    frames, metrics = share_frames(ranks, everyone, {})
    received, own = [], []
    for frame, rank in zip(frames, everyone, strict=True):
        batches, _ = decode_batches(frame, spec=LONG)
        received.append(routing_bytes(batches))
        own.append(own_routing_bytes(batches, rank))
        assert received[-1] <= 1.1 * own[-1]
    row_bytes = LONG.num_moe_layers * LONG.experts_per_token * LONG.expert_dtype.itemsize
    num_rows = sum(len(sample.trajectory) - 1 for sample in long_samples)
    # Every routing row goes to exactly one rank; the bit per row to every stage and tensor rank of its slice.
    assert sum(own) == pytest.approx(num_rows * (row_bytes + len(everyone) / data / context / 8))
    assert metrics["data/routing_bytes"] == max(received)
    assert metrics["data/routing_bytes_over_share"] == max(a / b for a, b in zip(received, own, strict=True))


def test_kept_sets_go_to_the_last_stage_alone(long_samples: list[TrainSample]):
    everyone = ranks_of(1, 2, 2, 1)
    ranks = pack_for_ranks(long_samples, 1, PackOptions(16384, Padding.of(ParallelDims(context=2))), replay=True)
    frames, _ = share_frames(ranks, everyone, {})
    ids = [sum(len(batch.kept.ids) for batch in decode_batches(frame, spec=LONG)[0]) for frame in frames]
    assert [bool(count) for count in ids] == [rank.is_last_stage for rank in everyone]
    assert sum(ids) == sum(len(batch.kept.ids) for batch in ranks[0])


def test_ranks_with_pad_rows_alone_have_no_ratio():
    _, metrics = share_frames(
        pack_for_ranks(make_samples([9]), 2, PackOptions(64), replay=True), ranks_of(2, 1, 1, 1), {}
    )
    assert metrics["data/routing_bytes_over_share"] == pytest.approx(1, abs=0.2)
    assert share_frames([[], []], ranks_of(2, 1, 1, 1), {})[1] == {}
