"""Routing that cannot be replayed is found before any router runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import tiny_moe

from moerl.contract.batch import Microbatch
from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.trainer.replay_checks import find_unusable_routing

# Of two tensor-parallel ranks the second.
LAYOUT = RankCoordinates(ParallelDims(tensor=2), rank=1)
LAYERS = [0, 1, 2, 3]


def make_share(*, uncaptured: float = 0.0) -> Microbatch:
    """The second half of a microbatch of 21 rows and 3 of padding."""
    samples = tiny_moe.make_samples(1, (10, 13), uncaptured=uncaptured)
    ((batch,),) = tiny_moe.pack(samples, multiple=4, uncaptured="live")
    assert batch.num_rows == 24
    assert batch.expert_ids is not None
    return replace(batch, expert_ids=batch.expert_ids[12:])


def problem(batch: Microbatch, *, enforce: bool = True) -> str:
    return str(find_unusable_routing([batch], LAYERS, tiny_moe.SPEC, LAYOUT, enforce=enforce))


def changed(batch: Microbatch, row: int, layer: int, experts: list[int]) -> Microbatch:
    assert batch.expert_ids is not None
    expert_ids = batch.expert_ids.copy()
    expert_ids[row, layer] = experts
    return replace(batch, expert_ids=expert_ids)


def test_what_was_packed_can_be_replayed() -> None:
    assert problem(make_share()) == "None"
    assert problem(make_share(uncaptured=0.4)) == "None"


def test_a_repeated_expert_is_named_with_row_token_and_layer() -> None:
    batch = changed(make_share(), 2, 3, [5, 5])
    assert "microbatch 0 has a row that repeats an expert" in problem(batch)
    assert "seen: experts [5, 5] in row 14 (token 5), MoE layer 3" in problem(batch)


def test_a_pad_row_is_dispatched_too_and_may_not_repeat_an_expert_either() -> None:
    assert "experts [1, 1] in row 21 (padding), MoE layer 0" in problem(changed(make_share(), 9, 0, [1, 1]))


def test_rows_that_are_left_to_the_router_hold_zeros() -> None:
    batch = make_share(uncaptured=0.5)
    assert batch.expert_ids is not None
    live = np.flatnonzero(~batch.routed[12:])
    assert (batch.expert_ids[live] == 0).all()
    assert problem(batch) == "None"
    row = int(np.flatnonzero(batch.routed[12:])[0])
    assert f"in row {12 + row} (" in problem(changed(batch, row, 1, [2, 2]))


def test_an_expert_that_does_not_exist_is_named_whether_or_not_it_would_be_enforced() -> None:
    batch = changed(make_share(), 0, 1, [8, 2])
    for enforce in (True, False):
        assert "an expert that does not exist; seen: expert 8 in row 12 (token 3), MoE layer 1" in problem(
            batch, enforce=enforce
        )


def test_two_sequences_with_one_key_are_refused() -> None:
    batch = make_share()
    keys = np.array([7, 7, 0], np.uint64)
    assert "two sequences of one rollout; seen: key 0x0000000000000007 2 times" in problem(
        replace(batch, rollout_keys=keys)
    )


def test_without_routing_there_is_nothing_to_compare_with() -> None:
    batch = replace(make_share(), expert_ids=None, routing_checksums=None)
    assert problem(batch, enforce=False) == "None"
    assert "without recorded routing" in problem(batch)
