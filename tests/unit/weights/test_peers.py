"""Ranks that agree on the steps of an update: quoted problems, and ranks that do not come."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import weight_sync
from ranks import Ranks
from torch.distributed.distributed_c10d import _get_default_store

from moerl.errors import EngineError, MoerlError, WeightSyncError


def quote(layout: Any) -> list[str]:
    """Returns the errors of this rank if rank 1 has a problem, and if no rank has one."""
    peers = weight_sync.peers_of(layout.rank)
    told = []
    for problem in (EngineError("no room", seen=3), None, EngineError("no time")):
        try:
            peers.agree(problem if layout.rank == 1 else None, "begin")
            told.append("")
        except MoerlError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_a_problem_is_raised_where_it_is_and_quoted_elsewhere(two_processes: Ranks):
    other, own = two_processes.run(quote)
    assert own == ["EngineError: no room; seen: 3", "", "EngineError: no time"]
    assert other[0].startswith(
        "WeightSyncError: weight update: begin failed on other ranks; seen: ranks [1]; rank 1: no r"
    )
    assert other[1] == ""
    assert "rank 1: no time" in other[2]


def miss(layout: Any) -> list[str]:
    """Rank 1 comes to the agreement after rank 0 has given it up."""
    store, told = _get_default_store(), []
    peers = weight_sync.peers_of(layout.rank, step_seconds=0.5)
    if layout.rank == 0:
        for problem in (EngineError("a problem of its own"), None):
            with pytest.raises(WeightSyncError) as error:
                peers.agree(problem, "checksums")
            told.append("\n".join([str(error.value), *getattr(error.value, "__notes__", ())]))
        store.set("given up", "yes")
    else:
        while not store.check(["given up"]):
            time.sleep(0.05)
        # What rank 0 still waits for, so that the next collective of both is the same one.
        dist.all_reduce(torch.zeros(2, dtype=torch.int32))
    dist.barrier()
    return told


def test_a_rank_that_does_not_come_to_an_agreement_is_named_and_every_later_one_is_refused(two_processes: Ranks):
    (first, later), _ = two_processes.run(miss)
    assert "weight update: checksums; seen: not done in time, 0.5 s a step, no word from ranks [1]" in first
    assert first.endswith("and a problem of its own")
    assert "have lost one another in an earlier one; seen: checksums" in later


class LateWork:
    """Fault injection: a collective that ends the moment after the first wait for it was given up."""

    def __init__(self, problem: Exception | None) -> None:
        self.problem, self.num_waits = problem, 0

    def is_completed(self) -> bool:
        return self.num_waits > 0

    def wait(self, timeout: timedelta) -> None:
        self.num_waits += 1
        if self.num_waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.problem is not None:
            raise self.problem


def meet_late(layout: Any, problem: Exception | None) -> str:
    """Returns the error of late work on rank 0, empty if it counts. Peers are built on all ranks, as often."""
    peers = weight_sync.peers_of(layout.rank)
    if layout.rank > 0:
        return ""
    work: Any = LateWork(problem)
    try:
        peers.meet(lambda: work, peers.until(), "begin", [0])
    except WeightSyncError as error:
        return str(error)
    return ""


def test_an_agreement_that_is_reached_just_after_a_wait_for_it_ended_counts(two_processes: Ranks):
    assert two_processes.run(meet_late, None) == ["", ""]


def test_an_agreement_that_fails_just_after_a_wait_for_it_ended_has_failed(two_processes: Ranks):
    assert "Connection closed by peer" in two_processes.run(meet_late, RuntimeError("Connection closed by peer"))[0]
