"""Shares of a microbatch: together they are all of it, and each is exactly what its rank computes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import product

import numpy as np
import pytest
from factories import SPEC, make_trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.batching.packing import PackOptions, pack_trajectories
from moerl.batching.rows import Padding
from moerl.contract.batch import Microbatch, TrainSample
from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.contract.shares import context_rows, cut_share
from moerl.contract.trajectory import KeptSets
from moerl.errors import ReplayError

# Everything with one value per row that all ranks of a stage with the head hold.
PER_ROW = (
    "input_ids",
    "target_ids",
    "position_ids",
    "loss_mask",
    "is_pad",
    "routed",
    "sample_index",
    "advantages",
    "rollout_logprobs",
    "versions",
    "temperatures",
    "truncated",
)
LAYOUTS = st.tuples(st.integers(1, 3), st.integers(1, 3))


def packed(seed: int, lengths: Sequence[int], tensor: int, context: int) -> Microbatch:
    rng = np.random.default_rng(seed)
    samples = []
    for i, length in enumerate(lengths):
        trajectory = make_trajectory(rng, num_prompt=2, num_sampled=length - 2, rollout_id=f"rollout-{i}")
        samples.append(TrainSample(trajectory, trajectory.sampled * rng.normal(size=length).astype(np.float32)))
    options = PackOptions(4096, Padding.of(ParallelDims(tensor=tensor, context=context)))
    (batch,) = pack_trajectories(samples, options, replay=True)
    return batch


def by_the_definition(sequence: np.ndarray, size: int, rank: int) -> np.ndarray:
    """One sequence's rows of a rank: chunk c and chunk 2 x size - 1 - c of 2 x size equal ones."""
    chunks = np.split(sequence, 2 * size)
    return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]])


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 4))
def test_context_rows_are_the_zigzag_chunks_of_every_sequence(units: list[int], size: int, factor: int):
    lengths = np.array(units) * 2 * size * factor
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    sequences = np.split(np.arange(cu_seqlens[-1]), cu_seqlens[1:-1])
    ranks = [context_rows(cu_seqlens, size, rank) for rank in range(size)]
    if size > 1:
        for rank, rows in enumerate(ranks):
            expected = np.concatenate([by_the_definition(sequence, size, rank) for sequence in sequences])
            assert rows.tolist() == expected.tolist()
    assert sorted(np.concatenate(ranks).tolist()) == list(range(cu_seqlens[-1]))
    assert len({len(rows) for rows in ranks}) == 1


def test_zigzag_rows_of_a_worked_example():
    cu_seqlens = np.array([0, 8, 12], np.int32)
    assert context_rows(cu_seqlens, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert context_rows(cu_seqlens, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


def test_the_zigzag_is_megatrons(monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("megatron.core.utils")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 3)
    for rank in range(3):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        batch = {"tokens": torch.arange(24)[None]}
        theirs = utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=object())["tokens"][0]
        assert context_rows(np.array([0, 24]), 3, rank).tolist() == theirs.tolist()


def test_a_sequence_that_does_not_divide_is_refused():
    with pytest.raises(ReplayError, match=r"6 rows.*a multiple of 2 x context = 4"):
        context_rows(np.array([0, 8, 14]), 2, 0)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(3, 20), min_size=1, max_size=4), LAYOUTS)
def test_the_shares_of_all_ranks_are_the_whole_batch(seed: int, lengths: list[int], layout: tuple[int, int]):
    tensor, context = layout
    batch = packed(seed, lengths, tensor, context)
    assert batch.expert_ids is not None
    stages = [(0,), (1, 2)]
    rows = [context_rows(batch.cu_seqlens, context, rank) for rank in range(context)]
    routing = np.full(batch.expert_ids.shape, 255, np.uint8)
    for context_rank, tensor_rank, stage in product(range(context), range(tensor), stages):
        rank = tensor_rank + tensor * (context_rank + context * stages.index(stage))
        share = cut_share(batch, RankCoordinates(ParallelDims(tensor, 2, context=context), rank, stage))
        mine = rows[context_rank]
        for name in ("input_ids", "target_ids", "position_ids", "loss_mask", "is_pad", "routed", "sample_index"):
            assert np.array_equal(getattr(share, name), getattr(batch, name)[mine])
        assert share.expert_ids is not None
        num = len(mine) // tensor
        assert len(mine) % tensor == 0
        where = mine[tensor_rank * num : (tensor_rank + 1) * num]
        routing[np.ix_(where, stage)] = share.expert_ids
        assert share.num_rows == len(mine)
        assert share.num_rows_of_all == batch.num_rows
        assert np.array_equal(share.rollout_keys, batch.rollout_keys)
        assert share.prefix_of is batch.prefix_of
    assert np.array_equal(routing, batch.expert_ids)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(3, 20), min_size=1, max_size=4), LAYOUTS)
def test_ranks_that_score_hold_the_kept_sets_and_loss_inputs_of_their_rows(
    seed: int, lengths: list[int], layout: tuple[int, int]
):
    tensor, context = layout
    batch = packed(seed, lengths, tensor, context)
    num_ids = 0
    for context_rank in range(context):
        share = cut_share(batch, RankCoordinates(ParallelDims(tensor, context=context), tensor * context_rank, (2,)))
        rows = context_rows(batch.cu_seqlens, context, context_rank)
        for name in PER_ROW:
            assert np.array_equal(getattr(share, name), getattr(batch, name)[rows])
        for own, row in enumerate(rows):
            assert kept_of(share.kept, own) == kept_of(batch.kept, int(row))
        num_ids += len(share.kept.ids)
    assert num_ids == len(batch.kept.ids)


def kept_of(kept: KeptSets, row: int) -> list[int]:
    return kept.ids[kept.offsets[row] : kept.offsets[row + 1]].tolist()


def test_ranks_that_do_not_score_get_routing_without_kept_sets():
    batch = packed(0, (9, 12), 2, 2)
    share = cut_share(batch, RankCoordinates(ParallelDims(tensor=2, pipeline=2, context=2), 3, (0, 2)))
    assert len(share.kept.ids) == 0
    assert len(share.kept.offsets) == share.num_rows + 1
    assert not share.truncated.any()
    assert not share.advantages.any()
    assert (share.temperatures == 1).all()
    assert share.expert_ids is not None
    assert share.expert_ids.shape == (share.num_rows // 2, 2, SPEC.experts_per_token)
    assert share.loss_mask.any(), "every rank knows which rows are trained on"


def test_checksums_are_those_of_the_stages_layers():
    batch = packed(0, (9, 12), 1, 1)
    share = cut_share(batch, RankCoordinates(moe_layers=(2, 0)))
    assert batch.routing_checksums is not None
    assert share.routing_checksums is not None
    assert share.routing_checksums.tolist() == batch.routing_checksums[[2, 0]].tolist()


def test_the_whole_batch_is_its_own_share():
    batch = packed(0, (9, 12), 1, 1)
    assert cut_share(batch, RankCoordinates(ParallelDims(data=4), 3)) is batch


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 90), max_size=4), min_size=1, max_size=8), st.data())
def test_kept_sets_are_taken_row_by_row(rows: list[list[int]], data: st.DataObject):
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    kept = KeptSets(offsets, np.array([i for row in rows for i in row], np.int32))
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    taken = kept.take(np.array(chosen, np.int64))
    assert [kept_of(taken, i) for i in range(len(chosen))] == [rows[i] for i in chosen]
    assert taken.offsets.dtype == np.int64
    assert taken.ids.dtype == np.int32


def test_every_field_is_either_per_row_or_known_to_this_test():
    special = {"cu_seqlens", "rollout_keys", "prefix_of", "prefix_rows", "kept", "expert_ids", "scores"}
    checksums = {"routing_checksums", "context_checksum", "kept_checksum"}
    assert {field.name for field in fields(Microbatch)} == special | checksums | set(PER_ROW)
