"""Packing: nothing lost, nothing shifted against its token, nothing unproved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from factories import FULL, NUCLEUS, SPEC, Layout, make_from_layout, make_trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_samples import sample, text
from routing_sums import routing_checksums

from moerl.batching.cost import SequenceCost
from moerl.batching.packing import PackOptions, pack_for_ranks, pack_text_for_ranks, pack_trajectories, packing_metrics
from moerl.batching.rows import Padding
from moerl.contract.batch import Microbatch, TrainSample
from moerl.contract.parallel import ParallelDims
from moerl.contract.routing import rollout_key
from moerl.contract.trajectory import KeptSets, ModelSpec, SamplingParams, TurnKind

HOT = SamplingParams(temperature=1.3, top_p=0.7, top_k=5)
WIDE_SPEC = ModelSpec(num_moe_layers=2, experts_per_token=3, num_experts=300, vocab_size=100)


@st.composite
def train_samples(draw: st.DrawFn, min_size: int = 1) -> list[TrainSample]:
    """Samples of one model, of one or two turns, with and without truncation, some with all-zero advantages."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spec = draw(st.sampled_from([SPEC, WIDE_SPEC]))
    samples = []
    for index in range(draw(st.integers(min_size, 8))):
        spans = [
            (TurnKind.PROMPT, draw(st.integers(1, 6)), None),
            (TurnKind.SAMPLED, draw(st.integers(1, 8)), draw(st.sampled_from([NUCLEUS, FULL, HOT]))),
        ]
        if draw(st.booleans()):
            spans.append((TurnKind.OBSERVATION, draw(st.integers(1, 4)), None))
            spans.append((TurnKind.SAMPLED, draw(st.integers(1, 4)), draw(st.sampled_from([NUCLEUS, HOT]))))
        trajectory = make_from_layout(rng, Layout(tuple(spans)), spec, rollout_id=f"rollout-{index}")
        scale = draw(st.sampled_from([0.0, 1.0]))
        advantages = (rng.normal(size=len(trajectory)) * scale * trajectory.sampled).astype(np.float32)
        samples.append(TrainSample(trajectory, advantages))
    return samples


def real_rows(microbatches: Sequence[Microbatch]) -> int:
    return sum(int((~batch.is_pad).sum()) for batch in microbatches)


def same(left: Microbatch, right: Microbatch) -> bool:
    def equal(a: object, b: object) -> bool:
        if isinstance(a, KeptSets) and isinstance(b, KeptSets):
            return np.array_equal(a.offsets, b.offsets) and np.array_equal(a.ids, b.ids)
        return np.array_equal(np.asarray(a), np.asarray(b))

    return all(equal(getattr(left, f.name), getattr(right, f.name)) for f in fields(Microbatch))


def check_row(batch: Microbatch, row: int, sample: TrainSample) -> None:
    """One row against its trajectory, token by token: the slow and obvious reference."""
    trajectory, t = sample.trajectory, int(batch.position_ids[row])
    assert batch.input_ids[row] == trajectory.token_ids[t]
    assert batch.target_ids[row] == trajectory.token_ids[t + 1]
    assert batch.loss_mask[row] == trajectory.sampled[t + 1]
    assert batch.advantages[row] == sample.advantages[t + 1]
    assert batch.rollout_logprobs[row] == trajectory.rollout_logprobs[t + 1]
    assert batch.versions[row] == trajectory.policy_versions[t + 1]
    assert batch.truncated[row] == trajectory.truncated[t + 1]
    assert batch.temperatures[row] == trajectory.temperatures[t + 1]
    kept = batch.kept.ids[batch.kept.offsets[row] : batch.kept.offsets[row + 1]]
    assert (
        kept.tolist() == trajectory.kept.ids[trajectory.kept.offsets[t + 1] : trajectory.kept.offsets[t + 2]].tolist()
    )
    if batch.truncated[row]:
        assert batch.target_ids[row] in kept
    assert batch.expert_ids is not None
    assert np.array_equal(batch.expert_ids[row], trajectory.expert_ids[t])


@settings(max_examples=60, deadline=None)
@given(train_samples(), st.integers(8, 60), st.sampled_from([1, 2, 8]), st.integers(1, 4))
def test_every_token_appears_once_with_everything_that_belongs_to_it(
    samples: list[TrainSample], budget: int, multiple: int, num_ranks: int
):
    ranks = pack_for_ranks(samples, num_ranks, PackOptions(budget, Padding(total=multiple)), replay=True)
    seen: Counter[tuple[int, int]] = Counter()
    for batch in (batch for rank in ranks for batch in rank):
        for row in np.flatnonzero(~batch.is_pad):
            index = int(batch.sample_index[row])
            check_row(batch, int(row), samples[index])
            seen[index, int(batch.position_ids[row])] += 1
    expected = {(i, t) for i, one in enumerate(samples) for t in range(len(one.trajectory) - 1)}
    assert set(seen) == expected
    assert set(seen.values()) == {1}


@settings(max_examples=60, deadline=None)
@given(train_samples(), st.integers(8, 60), st.sampled_from([1, 2, 8]))
def test_a_microbatch_is_laid_out_as_its_contract_says(samples: list[TrainSample], budget: int, multiple: int):
    for batch in pack_trajectories(samples, PackOptions(budget, Padding(total=multiple)), replay=True):
        assert batch.num_rows % multiple == 0
        lengths = np.diff(batch.cu_seqlens)
        assert batch.cu_seqlens[0] == 0
        assert batch.cu_seqlens[-1] == batch.num_rows
        assert len(batch.rollout_keys) == len(lengths)
        for start, end, key in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.rollout_keys, strict=False):
            index = int(batch.sample_index[start])
            assert set(batch.sample_index[start:end]) == {index}
            assert batch.position_ids[start:end].tolist() == list(range(end - start))
            if index >= 0:
                assert end - start == len(samples[index].trajectory) - 1
                assert key == rollout_key(samples[index].trajectory.lineage.rollout_id)
        assert_dtypes(batch)


def assert_dtypes(batch: Microbatch) -> None:
    for name in ("input_ids", "target_ids", "position_ids", "versions"):
        assert getattr(batch, name).dtype == np.int64
    for name in ("advantages", "rollout_logprobs", "temperatures"):
        assert getattr(batch, name).dtype == np.float32
    for name in ("loss_mask", "is_pad", "truncated"):
        assert getattr(batch, name).dtype == np.bool_
    assert (batch.cu_seqlens.dtype, batch.sample_index.dtype) == (np.int32, np.int32)
    assert (batch.kept.offsets.dtype, batch.kept.ids.dtype) == (np.int64, np.int32)
    assert len(batch.kept.offsets) == batch.num_rows + 1
    assert batch.kept.offsets[-1] == len(batch.kept.ids)
    assert batch.rollout_keys.dtype == np.uint64


@settings(max_examples=40, deadline=None)
@given(train_samples(), st.integers(8, 60), st.sampled_from([1, 2, 8]))
def test_microbatches_keep_to_the_budget_save_for_a_longer_sequence_alone(
    samples: list[TrainSample], budget: int, multiple: int
):
    for batch in pack_trajectories(samples, PackOptions(budget, Padding(total=multiple)), replay=False):
        num_sequences = len(set(batch.sample_index[~batch.is_pad]))
        assert batch.num_rows <= budget or num_sequences == 1


@settings(max_examples=40, deadline=None)
@given(train_samples(), st.integers(8, 60), st.sampled_from([1, 8]))
def test_checksums_are_the_sums_over_the_trajectories_of_the_microbatch(
    samples: list[TrainSample], budget: int, multiple: int
):
    for batch in pack_trajectories(samples, PackOptions(budget, Padding(total=multiple)), replay=True):
        expected = [0] * samples[0].trajectory.spec.num_moe_layers
        for index in set(batch.sample_index[~batch.is_pad]):
            trajectory = samples[index].trajectory
            sums = routing_checksums(rollout_key(trajectory.lineage.rollout_id), trajectory.expert_ids)
            expected = [(a + int(b)) % 2**64 for a, b in zip(expected, sums, strict=True)]
        assert batch.routing_checksums is not None
        assert batch.routing_checksums.dtype == np.uint64
        assert batch.routing_checksums.tolist() == expected


def assert_pads_are_empty(batch: Microbatch) -> None:
    pad = batch.is_pad
    assert np.array_equal(pad, batch.sample_index == -1)
    assert not batch.loss_mask[pad].any()
    assert not batch.truncated[pad].any()
    assert not batch.kept.sizes[pad].any()
    for name in ("input_ids", "target_ids", "advantages", "rollout_logprobs"):
        assert not getattr(batch, name)[pad].any()
    assert (batch.temperatures[pad] == 1.0).all()
    assert batch.routed[pad].all()


@settings(max_examples=40, deadline=None)
@given(train_samples(), st.sampled_from([2, 8, 64]))
def test_pad_rows_carry_no_loss_and_nothing_of_any_trajectory(samples: list[TrainSample], multiple: int):
    for batch in pack_trajectories(samples, PackOptions(64, Padding(total=multiple)), replay=True):
        assert_pads_are_empty(batch)
        pad = batch.is_pad
        if pad.any():
            assert pad[-int(pad.sum()) :].all(), "without padding per sequence, pad rows are the last one"
            assert batch.rollout_keys[-1] == 0
            assert np.diff(batch.cu_seqlens)[-1] == pad.sum()


@pytest.mark.parametrize("spec", [SPEC, WIDE_SPEC, ModelSpec(2, 4, 4, 100), ModelSpec(1, 3, 7, 100)])
def test_pad_rows_hold_distinct_experts_spread_evenly_in_every_layer(spec: ModelSpec):
    trajectory = make_trajectory(np.random.default_rng(0), spec, num_prompt=1, num_sampled=3)
    one = TrainSample(trajectory, np.zeros(4, np.float32))
    batch = pack_trajectories([one], PackOptions(128, Padding(total=128)), replay=True)[0]
    assert batch.expert_ids is not None
    assert batch.expert_ids.dtype == spec.expert_dtype
    pad_experts = batch.expert_ids[batch.is_pad]
    assert pad_experts.shape == (125, spec.num_moe_layers, spec.experts_per_token)
    in_order = np.sort(pad_experts, axis=2)
    assert (np.diff(in_order.astype(int), axis=2) > 0).all()
    for layer in range(spec.num_moe_layers):
        used = np.bincount(pad_experts[:, layer].ravel(), minlength=spec.num_experts)
        assert used.max() - used.min() <= 1


@settings(max_examples=60, deadline=None)
@given(train_samples(), st.sampled_from([4, 8, 12]), st.sampled_from([1, 4, 16]), st.integers(1, 3))
def test_every_sequence_is_padded_at_its_own_end(samples: list[TrainSample], sequence: int, total: int, num_ranks: int):
    options = PackOptions(64, Padding(sequence, total))
    batches = [batch for rank in pack_for_ranks(samples, num_ranks, options, replay=True) for batch in rank]
    seen: Counter[int] = Counter()
    for batch in batches:
        assert batch.num_rows % sequence == batch.num_rows % total == 0
        for number, (start, end) in enumerate(pairwise(batch.cu_seqlens)):
            assert (end - start) % sequence == 0
            index = int(batch.sample_index[start])
            num_real = len(samples[index].trajectory) - 1 if index >= 0 else 0
            seen[index] += 1
            assert batch.is_pad[start:end].tolist() == [False] * num_real + [True] * (end - start - num_real)
            assert end - start < num_real + sequence or index < 0
            assert batch.position_ids[start:end].tolist() == list(range(end - start))
            for row in range(start, start + num_real):
                check_row(batch, row, samples[index])
            if index >= 0:
                assert batch.rollout_keys[number] == rollout_key(samples[index].trajectory.lineage.rollout_id)
        assert_pads_are_empty(batch)
    assert {index: seen[index] for index in range(len(samples))} == dict.fromkeys(range(len(samples)), 1)


@settings(max_examples=30, deadline=None)
@given(train_samples(), st.sampled_from([1, 8]), st.sampled_from([1, 32]))
def test_pad_rows_inside_and_behind_sequences_spread_over_all_experts(
    samples: list[TrainSample], sequence: int, total: int
):
    for batch in pack_trajectories(samples, PackOptions(64, Padding(sequence, total)), replay=True):
        assert batch.expert_ids is not None
        spec = samples[0].trajectory.spec
        for layer in range(spec.num_moe_layers):
            used = np.bincount(batch.expert_ids[batch.is_pad, layer].ravel(), minlength=spec.num_experts)
            assert used.max() - used.min() <= 1


def test_pad_rows_inside_a_sequence_count_in_no_checksum():
    one = sample(8)
    plain = pack_trajectories([one], PackOptions(64), replay=True)[0]
    padded = pack_trajectories([one], PackOptions(64, Padding(sequence=16)), replay=True)[0]
    assert (plain.num_rows, padded.num_rows) == (7, 16)
    assert plain.routing_checksums is not None
    assert padded.routing_checksums is not None
    assert plain.routing_checksums.tolist() == padded.routing_checksums.tolist()


@pytest.mark.parametrize(("tensor", "context", "sequence", "total"), [(1, 1, 1, 1), (4, 1, 1, 4), (2, 3, 12, 2)])
def test_the_padding_of_a_layout(tensor: int, context: int, sequence: int, total: int):
    assert Padding.of(ParallelDims(tensor=tensor, context=context)) == Padding(sequence, total)


def test_no_pad_sequence_is_added_where_the_rows_fit_exactly():
    batch = pack_trajectories([sample(9)], PackOptions(8, Padding(total=8)), replay=True)[0]
    assert batch.num_rows == 8
    assert len(batch.cu_seqlens) == 2
    assert not batch.is_pad.any()


def test_padding_counts_towards_the_budget():
    samples = [sample(6, "a"), sample(6, "b")]
    batches = pack_trajectories(samples, PackOptions(10, Padding(total=8)), replay=False)
    assert [batch.num_rows for batch in batches] == [8, 8]


def test_rows_of_a_trajectory_without_advantage_still_count_as_loss_rows():
    quiet = sample(8)
    quiet = TrainSample(quiet.trajectory, np.zeros(8, np.float32))
    batch = pack_trajectories([quiet], PackOptions(64, Padding(total=1)), replay=False)[0]
    assert batch.loss_mask.sum() == quiet.trajectory.num_sampled


def test_without_replay_no_routing_travels():
    batch = pack_trajectories([sample(8)], PackOptions(64, Padding(total=8)), replay=False)[0]
    assert batch.expert_ids is None
    assert batch.routing_checksums is None


@settings(max_examples=25, deadline=None)
@given(train_samples(), st.integers(1, 3))
def test_packing_the_same_samples_gives_the_same_microbatches(samples: list[TrainSample], num_ranks: int):
    first = pack_for_ranks(samples, num_ranks, PackOptions(20, Padding(total=4)), replay=True)
    second = pack_for_ranks(samples, num_ranks, PackOptions(20, Padding(total=4)), replay=True)
    assert all(same(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


@settings(max_examples=40, deadline=None)
@given(train_samples(), st.integers(1, 12), st.integers(8, 60))
def test_every_rank_runs_the_same_number_of_microbatches(samples: list[TrainSample], num_ranks: int, budget: int):
    ranks = pack_for_ranks(samples, num_ranks, PackOptions(budget, Padding(total=4)), replay=True)
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    assert all(batch.num_rows for rank in ranks for batch in rank)


def test_ranks_are_balanced_by_the_cost_given():
    lengths = [33, 33, *[17] * 4]
    samples = [text(length) for length in lengths]
    by_rows = pack_text_for_ranks(samples, 2, PackOptions(64))
    by_cost = pack_text_for_ranks(samples, 2, PackOptions(64, cost=SequenceCost(0.0, 1.0)))
    options = PackOptions(64, cost=SequenceCost(0.0, 1.0))
    assert packing_metrics(by_rows, options)["packing/cost_max_over_mean"] >= 1.0
    assert packing_metrics(by_cost, options)["packing/cost_max_over_mean"] == 1.0


@pytest.mark.parametrize("count_multiple", [2, 3])
def test_ranks_get_a_multiple_of_microbatches_where_the_schedule_needs_one(count_multiple: int):
    samples = [text(length) for length in (9, 5, 7, 16, 16)]
    ranks = pack_text_for_ranks(samples, 2, PackOptions(16, count_multiple=count_multiple))
    assert [len(rank) for rank in ranks] == [count_multiple] * 2
    assert real_rows([batch for rank in ranks for batch in rank]) == 48


def test_packing_is_measured_in_fill_and_balance():
    samples = [text(9), text(5)]
    options = PackOptions(16, Padding(total=4), cost=SequenceCost(1.0, 1.0))
    ranks = pack_text_for_ranks(samples, 2, options)
    assert packing_metrics(ranks, options) == {
        "packing/fill": 12 / 32,
        "packing/real_rows": 1.0,
        "packing/cost_max_over_mean": 72 / 46,
        "packing/lockstep_over_mean": 72 / 46,
        "packing/microbatches": 1.0,
        "packing/shared_rows": 0.0,
    }
    assert packing_metrics(pack_text_for_ranks([], 2, options), options) == {}
    padded = pack_text_for_ranks([text(8)], 1, PackOptions(16, Padding(total=8)))
    assert packing_metrics(padded, options)["packing/real_rows"] == 7 / 8


def test_a_rank_without_sequences_gets_microbatches_of_pad_rows_alone():
    ranks = pack_for_ranks([sample(8)], 3, PackOptions(64, Padding(total=4)), replay=True)
    for rank in ranks[1:]:
        (batch,) = rank
        assert batch.num_rows == 4
        assert batch.is_pad.all()
        assert not batch.loss_mask.any()
        assert batch.cu_seqlens.tolist() == [0, 4]
        assert batch.expert_ids is not None
        assert batch.expert_ids.shape == (4, SPEC.num_moe_layers, SPEC.experts_per_token)
        assert batch.routing_checksums is not None
        assert batch.routing_checksums.tolist() == [0] * SPEC.num_moe_layers


def test_no_samples_make_no_microbatches():
    assert pack_for_ranks([], 2, PackOptions(64, Padding(total=4)), replay=True) == [[], []]


def test_a_row_without_captured_routing_does_not_matter_without_replay():
    lost = sample(8, unrouted=(1, 2))
    assert real_rows(pack_trajectories([lost], PackOptions(64, Padding(total=1)), replay=False)) == 7


def test_rows_without_captured_routing_may_be_left_to_the_live_router():
    lost = sample(8, "rollout-x", unrouted=(1, 2))
    (batch,) = pack_trajectories([lost], PackOptions(64), replay=True, uncaptured="live")
    assert np.flatnonzero(~batch.routed).tolist() == [1, 2]
    assert batch.expert_ids is not None
    assert not batch.expert_ids[1:3].any()
    assert batch.routing_checksums is not None
    captured = routing_checksums(rollout_key("rollout-x"), lost.trajectory.expert_ids, lost.trajectory.routed)
    assert batch.routing_checksums.tolist() == captured.tolist()


@settings(deadline=None)
@given(st.lists(st.integers(2, 30), max_size=10), st.integers(8, 40), st.sampled_from([1, 8]), st.integers(1, 4))
def test_supervised_rows_are_shifted_and_appear_once(lengths: list[int], budget: int, multiple: int, num_ranks: int):
    samples = [text(length) for length in lengths]
    ranks = pack_text_for_ranks(samples, num_ranks, PackOptions(budget, Padding(total=multiple)))
    assert len({len(rank) for rank in ranks}) == 1
    batches = [batch for rank in ranks for batch in rank]
    assert real_rows(batches) == sum(lengths) - len(lengths)
    for batch in batches:
        assert_dtypes(batch)
        assert batch.expert_ids is None
        assert batch.routing_checksums is None
        assert (batch.temperatures == 1.0).all()
        assert not batch.loss_mask[batch.is_pad].any()
        for row in np.flatnonzero(~batch.is_pad):
            one, t = samples[batch.sample_index[row]], int(batch.position_ids[row])
            assert batch.input_ids[row] == one.token_ids[t]
            assert batch.target_ids[row] == one.token_ids[t + 1]
            assert batch.loss_mask[row] == one.loss_mask[t + 1]
