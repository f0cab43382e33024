"""Collectives that are staged through the host give what gloo gives, and what NCCL has and gloo has not."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_moe
import torch
import torch.distributed as dist
from ranks import Ranks

ROOT = Path(__file__).parents[2]
NUM_POLLS = 6000
"""Polls of 10 ms each: a loaded machine is no fault of a transfer."""
LENGTHS = (5, 30, 17, 41, 9, 24)
LAYOUTS = {
    "TP2": {"tensor": 2},
    "EP2": {"expert": 2},
    "TP2-EP2": {"tensor": 2, "expert": 2},
    "PP2": {"pipeline": 2},
    "CP2": {"context": 2},
}


@pytest.fixture(scope="module")
def staged_processes() -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        # Behind the tests' own modules, which may have the names of benchmarks.
        patch.setattr(sys, "path", [*sys.path, str(ROOT / "bench")])
        ranks = Ranks(2, first="_staged_groups")
        yield ranks
        ranks.close()


def collectives(layout: Any) -> dict[str, list[list[float]]]:
    """Makes every kind of call and returns what this rank receives; rank r gives 0, 1, 2, 3, each plus 10 r."""
    rank, other = layout.rank, 1 - layout.rank
    mine = torch.arange(4.0) + 10 * rank
    total, mean, shown = mine.clone(), mine.clone().double(), mine.clone()
    both, part, swapped, got = torch.zeros(8), torch.zeros(2), torch.zeros(4), torch.zeros(4)
    uneven, own = [torch.zeros(1), torch.zeros(3)], torch.zeros(1 + 2 * rank)
    dist.all_reduce(total)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    dist.broadcast(shown, src=1)
    dist.all_gather_into_tensor(both, mine)
    dist.reduce_scatter_tensor(part, mine)
    received, sent = ([3, 0], [2, 0]) if rank else ([1, 2], [1, 3])
    dist.all_to_all_single(swapped[:3], mine[: sum(sent)], received, sent)
    dist.all_gather(uneven, mine[: 1 + 2 * rank])
    dist.reduce_scatter(own, [mine[:1], mine[1:]])
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, got, other)]):
        work.wait()
    named: list[Any] = [None, None]
    dist.all_gather_object(named, {"rank": rank})
    assert named == [{"rank": 0}, {"rank": 1}]
    late = mine.clone()
    work = dist.all_reduce(late, async_op=True)
    assert work is not None
    assert late.tolist() == mine.tolist()
    work.wait()
    dist.barrier()
    found = {"total": [total, late], "mean": [mean], "broadcast": [shown], "gathered": [both], "scattered": [part]}
    found |= {"swapped": [swapped], "uneven": [*uneven, own], "sent": [got]}
    return {name: [each.tolist() for each in tensors] for name, tensors in found.items()}


@pytest.mark.slow
def test_every_collective_brings_what_it_should_also_those_that_gloo_has_not(staged_processes: Ranks) -> None:
    first, second = staged_processes.run(collectives, tensor=2)
    assert first["total"] == second["total"] == [[10.0, 12.0, 14.0, 16.0]] * 2
    assert first["mean"] == second["mean"] == [[5.0, 6.0, 7.0, 8.0]]
    assert first["broadcast"] == second["broadcast"] == [[10.0, 11.0, 12.0, 13.0]]
    assert first["gathered"] == second["gathered"] == [[0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]]
    assert (first["scattered"], second["scattered"]) == ([[10.0, 12.0]], [[14.0, 16.0]])
    assert (first["swapped"], second["swapped"]) == ([[0.0, 10.0, 11.0, 0.0]], [[1.0, 2.0, 3.0, 0.0]])
    assert first["uneven"] == [[0.0], [10.0, 11.0, 12.0], [10.0]]
    assert second["uneven"] == [[0.0], [10.0, 11.0, 12.0], [12.0, 14.0, 16.0]]
    assert (first["sent"], second["sent"]) == ([[10.0, 11.0, 12.0, 13.0]], [[0.0, 1.0, 2.0, 3.0]])


def transfer(layout: Any, finish: Callable[[Any], None]) -> list[float]:
    """Sends 0, 1, 2, 3 from rank 0 to rank 1; returns what this rank has once `finish` has seen to the work."""
    numbers = torch.arange(4.0) if layout.rank == 0 else torch.zeros(4)
    work = dist.isend(numbers, 1) if layout.rank == 0 else dist.irecv(numbers, 0)
    finish(work)
    return numbers.tolist()


def poll_then_wait(layout: Any) -> list[float]:
    def finish(work: Any) -> None:
        for _ in range(NUM_POLLS):
            if work.is_completed():
                break
            time.sleep(0.01)
        else:
            raise AssertionError("not completed without wait")
        work.wait()
        work.wait()
        assert work.is_completed()

    return transfer(layout, finish)


@pytest.mark.slow
def test_a_transfer_completes_without_a_wait(staged_processes: Ranks) -> None:
    assert staged_processes.run(poll_then_wait, tensor=2) == [[0.0, 1.0, 2.0, 3.0]] * 2


def poll_before_it_is_sent(layout: Any) -> bool:
    """Tells whether rank 1's receive is completed before rank 0 sends."""
    is_early = False
    numbers = torch.zeros(4)
    work = dist.irecv(numbers, 0) if layout.rank else None
    if work is not None:
        is_early = work.is_completed() or work.is_completed()
    dist.barrier()
    if work is None:
        dist.send(numbers, 1)
    else:
        work.wait()
    return is_early


@pytest.mark.slow
def test_a_transfer_is_not_completed_before_its_peer_comes(staged_processes: Ranks) -> None:
    assert staged_processes.run(poll_before_it_is_sent, tensor=2) == [False, False]


def finish_as_peers_on_gpus(layout: Any) -> list[float]:
    """Sees to a transfer as a weight update does whose weights are on a GPU."""
    from moerl.weights.peers import Peers

    peers = Peers(layout.rank, torch.device("cuda"), 0.01 * NUM_POLLS)
    return transfer(layout, lambda work: peers.finish(work, peers.until()))


@pytest.mark.slow
def test_a_weight_update_of_a_gpu_sees_its_transfers_end(staged_processes: Ranks) -> None:
    assert staged_processes.run(finish_as_peers_on_gpus, tensor=2) == [[0.0, 1.0, 2.0, 3.0]] * 2


def stuck_transfer(monkeypatch: pytest.MonkeyPatch, wait: Callable[[timedelta], object]) -> Any:
    """Makes a transfer whose group waits so."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "bench")])
    return importlib.import_module("_staged_groups")._Transfer(SimpleNamespace(wait=wait), [], None, 1)


def test_a_transfer_that_failed_is_over_and_says_so_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(timeout: timedelta) -> None:
        raise RuntimeError("connection closed by peer")

    work = stuck_transfer(monkeypatch, fail)
    while not work.is_completed():
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        work.wait()


def test_a_polled_transfer_that_is_late_ends_a_wait_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    comes = threading.Event()
    work = stuck_transfer(monkeypatch, lambda timeout: comes.wait())
    assert not work.is_completed()
    with pytest.raises(TimeoutError):
        work.wait(timedelta(milliseconds=1))
    comes.set()
    assert work.wait()


def use_another_device(layout: Any) -> None:
    with pytest.raises(RuntimeError, match="a tensor on meta in a group of devices of type cpu"):
        dist.all_reduce(torch.zeros(1, device="meta"))


@pytest.mark.slow
def test_a_tensor_of_another_kind_of_device_is_refused(staged_processes: Ranks) -> None:
    staged_processes.run(use_another_device, tensor=2)


def train(layout: Any, path: Path, steps: list[Any], dtype: str, sharding: str) -> dict[str, Any]:
    trainer = tiny_moe.build(layout, path, dtype=dtype, sharding=sharding)
    losses, verified = [], 0
    for ranks in steps:
        local = tiny_moe.mine(trainer, ranks)
        report = trainer.step(local, tiny_moe.policy_loss(trainer, local, 100.0), enforce=True)
        losses += [row.losses_T.tolist() for row in report.rows]
        verified += report.rows_verified
    return {
        "backend": dist.get_backend(),
        "losses": losses,
        "verified": verified,
        "weights": tiny_moe.exported(trainer),
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_through_the_host_are_those_of_gloo_bit_for_bit(
    layout: str, untied: Path, staged_processes: Ranks, two_processes: Ranks
) -> None:
    packed = [tiny_moe.pack(tiny_moe.make_samples(seed, LENGTHS), num_ranks=2, sequence=4) for seed in (71, 72)]
    steps = packed if layout == "EP2" else [[[batch for part in ranks for batch in part]] for ranks in packed]
    options = ("bfloat16", "overlap" if layout == "CP2" else "off")
    staged, plain = (
        each.run(train, untied, steps, *options, **LAYOUTS[layout]) for each in (staged_processes, two_processes)
    )
    for ours, theirs in zip(staged, plain, strict=True):
        assert (ours["backend"], theirs["backend"]) == ("staged", "gloo")
        assert ours["losses"] == theirs["losses"]
        assert ours["verified"] == theirs["verified"] > 0
        assert tiny_moe.largest_difference(ours["weights"], theirs["weights"]) == 0.0
