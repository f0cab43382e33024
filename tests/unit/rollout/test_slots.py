from __future__ import annotations

import numpy as np
import pytest

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import FinishReason, Lineage, ModelSpec, SamplingParams, Trajectory
from moerl.rollout import slots
from moerl.rollout.sampler_kernel import Draws
from moerl.rollout.slots import KeptPool, SlotTable

SPEC = ModelSpec(num_moe_layers=2, experts_per_token=2, num_experts=300, vocab_size=1000)


def _request(name: str, prompt: tuple[int, ...], max_new: int = 50, stops: tuple[int, ...] = ()) -> RolloutRequest:
    return RolloutRequest(Lineage(name, "p", "g"), prompt, SamplingParams(top_k=400), max_new, stops)


class _Scripted:
    """Fills a table with values that say which rollout and position they belong to."""

    def __init__(self, requests: list[RolloutRequest]) -> None:
        self.table = SlotTable(SPEC, len(requests), max_tokens=64)
        self._number = {request.lineage.rollout_id: i for i, request in enumerate(requests)}
        rows = self.table.admit(requests, asked_at=[0.0] * len(requests))
        longest = int(self.table.lengths[rows].max())
        positions = np.arange(longest)
        self.table.write_prompt_routing(rows, np.stack([self._routing(i, positions) for i in self._rows()]))
        self._append()

    def step(self) -> None:
        last = self.table.lengths[: self.table.num_running] - 1
        routing = [self._routing(i, last[[slot]])[0] for slot, i in enumerate(self._rows())]
        self.table.write_decode_routing(np.stack(routing))
        self._append()

    def _rows(self) -> list[int]:
        return [self._number[request.lineage.rollout_id] for request in self.table.requests]

    def _append(self) -> None:
        rows, n = self._rows(), self.table.num_running
        positions = self.table.lengths[:n]
        kept = [self.kept(i, t) for i, t in zip(rows, positions.tolist(), strict=True)]
        logprobs = -np.array(rows, np.float32) - positions.astype(np.float32) / np.float32(100)
        step = Draws(
            token_ids=np.array([ids[-1] for ids in kept]),
            rollout_logprobs=logprobs.astype(np.float32),
            kept_logmass=-positions.astype(np.float32),
            log_z=np.zeros(n, np.float32),
            kept_sizes=np.array([len(ids) for ids in kept]),
            kept_ids=np.concatenate(kept).astype(np.int32),
        )
        self.table.append(slice(0, n), step, policy_version=3)

    @staticmethod
    def kept(i: int, t: int) -> np.ndarray:
        return np.arange(t + i, t + i + 3 + t % 4)

    @staticmethod
    def _routing(i: int, positions: np.ndarray) -> np.ndarray:
        base = 40 * i + positions[:, None, None]
        return (base + np.arange(4).reshape(1, 2, 2)) % 300

    def check(self, trajectory: Trajectory) -> None:
        i = self._number[trajectory.lineage.rollout_id]
        for t in np.flatnonzero(trajectory.sampled).tolist():
            start, end = trajectory.kept.offsets[t : t + 2]
            assert trajectory.kept.ids[start:end].tolist() == self.kept(i, t).tolist()
            assert trajectory.rollout_logprobs[t] == np.float32(-i) - np.float32(t) / np.float32(100)
        wanted = self._routing(i, np.arange(len(trajectory) - 1))
        assert np.array_equal(trajectory.expert_ids, wanted)
        assert trajectory.expert_ids.dtype == np.uint16


def test_rows_keep_their_history_while_others_leave(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slots, "_POOL_SLACK", 20)
    run = _Scripted([_request(f"r{i}", tuple(range(1, 3 + i))) for i in range(6)])
    leaving = {2: [0], 4: [1, 4], 7: [0, 2], 9: [0]}
    finished = []
    for number in range(10):
        run.step()
        done = np.zeros(run.table.num_running, np.bool_)
        done[leaving.get(number, [])] = True
        finished += [Trajectory(**run.table.values(i, FinishReason.STOP)) for i in np.flatnonzero(done).tolist()]
        sources, targets = run.table.release(done)
        assert len(sources) == len(targets) <= done.sum()
    assert run.table.num_running == 0
    assert len({t.lineage.rollout_id for t in finished}) == 6
    for trajectory in finished:
        run.check(trajectory)


def test_the_pool_of_kept_ids_is_cleaned_while_rows_still_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slots, "_POOL_SLACK", 20)
    requests = [_request("gone", (1, 2)), _request("gone too", (1, 2)), _request("stays", (1, 2, 3))]
    run = _Scripted(requests)
    for _ in range(20):
        run.step()
    before = run.table._pool.num_used
    run.table.release(np.array([True, True, False]))
    assert run.table._pool.num_used < before
    run.check(Trajectory(**run.table.values(0, FinishReason.ABORT)))


def test_freed_slots_are_closed_by_the_last_rows():
    run = _Scripted([_request(f"r{i}", (1, 2)) for i in range(5)])
    sources, targets = run.table.release(np.array([True, False, True, False, True]))
    assert (sources.tolist(), targets.tolist()) == ([3], [0])
    assert [r.lineage.rollout_id for r in run.table.requests] == ["r3", "r1"]
    assert run.table.num_free == 3


def test_only_a_requests_own_stop_ids_stop_it():
    # The scripted tokens at position 1 are the largest kept ids: 4, 5 and 6.
    run = _Scripted([_request("a", (1,), stops=(4,)), _request("b", (1,), stops=(9, 5)), _request("c", (1,))])
    assert run.table.stopped().tolist() == [True, True, False]
    run = _Scripted([_request("a", (1,), stops=(5,)), _request("b", (1,), stops=(9, 4)), _request("c", (1,))])
    assert run.table.stopped().tolist() == [False, False, False]


def test_a_reused_slot_forgets_the_stop_ids_of_its_last_row():
    run = _Scripted([_request("a", (1,), stops=(9, 4))])
    run.table.release(np.array([True]))
    run.table.admit([_request("a", (1,))], asked_at=[0.0])
    run._append()
    assert run.table.stopped().tolist() == [False]


def test_a_row_is_full_after_max_new_tokens():
    run = _Scripted([_request("a", (1, 2), max_new=1), _request("b", (1, 2), max_new=2)])
    assert run.table.full().tolist() == [True, False]


def _sets(rng: np.random.Generator, count: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    sizes = rng.integers(0, longest, count)
    return rng.integers(0, 1000, int(sizes.sum())).astype(np.int32), sizes


def test_sets_come_back_in_the_order_asked_for():
    pool = KeptPool()
    starts = pool.append(np.array([4, 9, 7, 1, 2], np.int32), np.array([2, 0, 3]))
    assert pool.take(starts, np.array([2, 0, 3])).tolist() == [4, 9, 7, 1, 2]
    assert pool.take(starts[[2, 1, 0]], np.array([3, 0, 2])).tolist() == [7, 1, 2, 4, 9]
    assert pool.take(starts[:0], np.zeros(0, np.int64)).tolist() == []


def test_the_pool_grows_and_forgets_without_mixing_sets_up():
    rng, pool = np.random.default_rng(0), KeptPool()
    ids, sizes = _sets(rng, 500, 400)
    starts = pool.append(ids, sizes)
    more_ids, more_sizes = _sets(rng, 500, 400)
    more_starts = pool.append(more_ids, more_sizes)
    before = pool.num_used
    expected = pool.take(more_starts[::3], more_sizes[::3])
    moved = pool.keep_only(more_starts[::3], more_sizes[::3])
    assert pool.num_used == more_sizes[::3].sum() < before
    assert np.array_equal(pool.take(moved, more_sizes[::3]), expected)
    assert np.array_equal(ids[: sizes[0]], ids[starts[0] : starts[0] + sizes[0]])
