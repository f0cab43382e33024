"""Routing that is not the recorded one is refused before the update, and leaves the weights alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe
import torch
from ranks import Ranks
from replay_steps import make_batches, refusal_of

from moerl.contract.batch import Microbatch
from moerl.errors import ReplayError


def swap_two_rollouts(batch: Microbatch) -> Microbatch:
    assert batch.expert_ids is not None
    return replace(batch, expert_ids=np.roll(batch.expert_ids, 20, axis=0))


def change_one_expert(batch: Microbatch) -> Microbatch:
    assert batch.expert_ids is not None
    expert_ids = batch.expert_ids.copy()
    unused = np.setdiff1d(np.arange(tiny_moe.SPEC.num_experts), expert_ids[7, 2])
    expert_ids[7, 2, 0] = unused[0]
    return replace(batch, expert_ids=expert_ids)


def drop_prompt_rows(batch: Microbatch) -> Microbatch:
    assert batch.expert_ids is not None
    return replace(batch, expert_ids=batch.expert_ids[7:])


def drop_a_layer(batch: Microbatch) -> Microbatch:
    assert batch.expert_ids is not None
    return replace(batch, expert_ids=batch.expert_ids[:, :-1])


def drop_routing(batch: Microbatch) -> Microbatch:
    return replace(batch, expert_ids=None, routing_checksums=None)


def drop_checksums(batch: Microbatch) -> Microbatch:
    return replace(batch, routing_checksums=None)


def repeat_an_expert(batch: Microbatch) -> Microbatch:
    assert batch.expert_ids is not None
    expert_ids = batch.expert_ids.copy()
    expert_ids[7, 2, :] = 3
    return replace(batch, expert_ids=expert_ids)


def name_an_expert_that_is_not_there(batch: Microbatch) -> Microbatch:
    assert batch.expert_ids is not None
    expert_ids = batch.expert_ids.copy()
    expert_ids[7, 2, 1] = 8
    return replace(batch, expert_ids=expert_ids)


def give_two_rollouts_one_key(batch: Microbatch) -> Microbatch:
    keys = batch.rollout_keys.copy()
    keys[1] = keys[0]
    return replace(batch, rollout_keys=keys)


def drop_a_checksum(batch: Microbatch) -> Microbatch:
    assert batch.routing_checksums is not None
    return replace(batch, routing_checksums=batch.routing_checksums[1:])


def leave_rows_to_the_router(batch: Microbatch) -> Microbatch:
    routed = batch.routed.copy()
    routed[[5, 9]] = False
    return replace(batch, routed=routed)


def check_tampered(
    layout: Any, path: Path, tamper: Callable[[Microbatch], Microbatch], recompute: str
) -> tuple[str, int]:
    batches = make_batches(11)
    (index,) = [i for i, batch in enumerate(batches) if np.diff(batch.cu_seqlens).tolist() == [20, 20]]
    batches[index] = tamper(batches[index])
    return refusal_of(layout, path, batches, recompute), index


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (tiny_moe.shift_rows, "checksum"),
        (tiny_moe.shift_layers, "checksum"),
        (swap_two_rollouts, "checksum"),
        (change_one_expert, "checksum"),
        (drop_prompt_rows, "do not match its input rows"),
        (drop_a_layer, "do not match its input rows"),
        (drop_routing, "without recorded routing"),
        (drop_checksums, "without recorded routing"),
        (repeat_an_expert, "repeats an expert; seen: experts [3, 3] in row 7 (token 7), MoE layer 2"),
        (name_an_expert_that_is_not_there, "does not exist; seen: expert 8 in row 7 (token 7), MoE layer 2"),
        (give_two_rollouts_one_key, "two sequences of one rollout"),
        (drop_a_checksum, "checksums of microbatch"),
        (leave_rows_to_the_router, "with 2 rows left to the router"),
    ],
)
def test_routing_that_is_not_the_recorded_one_is_refused(
    tamper: Callable[[Microbatch], Microbatch], message: str, untied: Path, one_process: Ranks
) -> None:
    recompute = "full" if tamper is tiny_moe.shift_rows else "none"
    ((refusal, microbatch),) = one_process.run(check_tampered, untied, tamper, recompute)
    assert message in refusal
    assert f"microbatch {microbatch}" in refusal


def misalign(layout: Any, path: Path) -> str:
    from moerl.trainer.replay import Replay

    trainer = tiny_moe.build(layout, path, optimizer=None)
    batches = make_batches(11)
    with trainer.keep_routing.schedule(batches, Replay(enforce=True), training=False) as schedule:
        schedule.begin(0)
        scores = torch.zeros(batches[0].num_rows - 1, tiny_moe.SPEC.num_experts)
        with pytest.raises(ReplayError) as caught:
            trainer.keep_routing.hooks[1].get_replay_topk(scores, 2, default_compute_topk=torch.topk)
    return str(caught.value)


def test_a_slice_of_other_rows_than_the_routers_is_refused(untied: Path, one_process: Ranks) -> None:
    (refusal,) = one_process.run(misalign, untied)
    assert "do not match the router's input in layer 2" in refusal
