"""Rollouts that are aborted: with what they have, or without a record where they have nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from conformance_cases import MAX_POSITIONS, Build, Engine, collect, make_requests, require_same

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import FinishReason, Trajectory


def _long(count: int) -> list[RolloutRequest]:
    """The first is done soon, the second takes far longer than it takes to abort it, the others go on for a while.

    After this prompt no kept set has a candidate within 1e-5 of its edge, so rounding, which depends on the other
    requests of a batch, decides nothing: an answer that is asked for again has the same sets.
    """
    requests = [replace(r, prompt_ids=(1, 3, 2), stop_ids=(), max_new_tokens=60) for r in make_requests(count)]
    first, second, *others = requests
    return [replace(first, max_new_tokens=4), replace(second, max_new_tokens=MAX_POSITIONS - 10), *others]


def _cut_short(
    engine: Engine, requests: list[RolloutRequest], rollout_ids: list[str] | None = None
) -> dict[str, Trajectory]:
    """Aborts the named rollouts of a call, or all, after its first record. Returns trajectories by rollout id."""
    iterator = engine.generate(requests)
    records = [next(iterator)]
    engine.abort(rollout_ids)
    records += iterator
    return {record.rollout_id: Trajectory(**record.values) for record in records}


def _require_beginning(trajectory: Trajectory, whole: Trajectory) -> None:
    """Tokens and routes of an aborted answer are the first ones of the whole answer."""
    assert trajectory.token_ids.tolist() == whole.token_ids[: len(trajectory)].tolist()
    rows = len(trajectory) - 1
    assert np.array_equal(np.sort(trajectory.expert_ids, -1), np.sort(whole.expert_ids[:rows], -1))


def test_aborted_rollouts_keep_what_they_have(build: Build):
    requests, engine = _long(8), build(3)
    whole = collect(engine, requests)
    trajectories = _cut_short(engine, requests)
    aborted = [t for t in trajectories.values() if t.finish_reason == FinishReason.ABORT]
    assert aborted
    for trajectory in aborted:
        _require_beginning(trajectory, whole[trajectory.lineage.rollout_id])


def test_rollouts_aborted_before_their_first_token_yield_nothing_and_are_named(build: Build):
    requests = _long(12)
    engine = build(4)
    whole = collect(engine, requests)
    assert engine.unfinished == []
    trajectories = _cut_short(engine, requests)
    assert all(trajectory.num_sampled > 0 for trajectory in trajectories.values())
    assert engine.unfinished
    assert sorted((*trajectories, *engine.unfinished)) == sorted(whole)
    again = [request for request in requests if request.lineage.rollout_id in engine.unfinished]
    require_same(collect(engine, again), {r.lineage.rollout_id: whole[r.lineage.rollout_id] for r in again})
    assert engine.unfinished == []


def test_only_the_named_rollout_is_aborted(build: Build):
    requests = _long(12)
    engine = build(6)
    whole = collect(engine, requests)
    # The ids of two others begin like its own.
    trajectories = _cut_short(engine, requests, ["r1", "nobody"])
    aborted = trajectories.pop("r1")
    assert aborted.finish_reason == FinishReason.ABORT
    _require_beginning(aborted, whole.pop("r1"))
    require_same(trajectories, whole)


def test_an_abort_while_nothing_runs_does_not_hit_the_next_call(build: Build):
    requests, engine = make_requests(4), build()
    whole = collect(engine, requests)
    engine.abort()
    engine.abort(["r0"])
    require_same(whole, collect(engine, requests))
