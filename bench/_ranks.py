"""Runs a function on real Megatron ranks: one process each, gloo or NCCL by the device, gone afterwards."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from moerl.contract.parallel import ParallelDims
from moerl.machine.interfaces import LOOPBACK
from moerl.processes.parent import new_rendezvous

ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "OMP_NUM_THREADS": "1",
    # Ranks that wait must not burn the cores that others compute on.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Megatron warns in every process of what this machine lacks.
    "PYTHONWARNINGS": "ignore",
}


def on_ranks(
    dims: ParallelDims, function: Callable[..., Any], *args: Any, before: Callable[[], None] | None = None
) -> list[Any]:
    """Calls ``function(layout, *args)`` on each rank of the layout, a process each; returns the results in rank order.

    Args:
        before: is called in each process before it joins the groups.

    Raises:
        RuntimeError: a rank failed; with its traceback. The others are ended.
    """
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("spawn")
    connections: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{new_rendezvous(Path(folder))}"
        try:
            for rank in range(dims.world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(theirs, rank, rendezvous, dims, before, function, args))
                process.start()
                theirs.close()
                connections.append(ours)
                processes.append(process)
            return _answers(connections)
        finally:
            for process in processes:
                process.kill()
                process.join()


def as_only_rank(function: Callable[..., Any], *args: Any) -> Any:
    """Calls ``function(layout, *args)`` in this process, which is the only rank meanwhile; returns the result."""
    import torch

    from moerl.trainer import groups

    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    layout = groups.start(rank=0, rendezvous="", dims=ParallelDims(), seed=1)
    answer = function(layout, *args)
    groups.stop()
    return answer


def _answers(connections: list[Connection]) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(connections):
        for ready in wait([one for rank, one in enumerate(connections) if rank not in answers]):
            assert isinstance(ready, Connection)
            rank = connections.index(ready)
            try:
                answers[rank], error = ready.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if error:
                raise RuntimeError(f"rank {rank} failed:\n{error}")
    return [answers[rank] for rank in range(len(connections))]


def _rank(
    connection: Connection,
    rank: int,
    rendezvous: str,
    dims: ParallelDims,
    before: Callable[[], None] | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch

    from moerl.trainer import groups

    torch.set_num_threads(1)
    try:
        if before is not None:
            before()
        layout = groups.start(rank=rank, rendezvous=rendezvous, dims=dims, seed=1)
        answer = function(layout, *args)
        groups.stop()
    except BaseException:  # noqa: BLE001 - process boundary: the caller raises it again
        connection.send((None, traceback.format_exc()))
    else:
        connection.send((answer, ""))
