"""Process groups: starts torch.distributed and Megatron's parallel state for this rank, and returns its groups.

Runs in every trainer rank. The backend follows the device: NCCL on GPUs, gloo on a CPU.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.errors import ConfigError, MoerlError
from moerl.machine.torch_start import uncollected
from moerl.trainer import megatron_patches, platform

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


def start(*, rank: int, rendezvous: str, dims: ParallelDims, seed: int, listener: int | None = None) -> RankCoordinates:
    """Joins the process group and builds Megatron's groups.

    Args:
        rendezvous: ``file://PATH`` or ``tcp://HOST:PORT`` at which the ranks meet; not used by one process.
        dims: parallel sizes, of as many processes as were started.
        seed: of torch and of Megatron's RNG tracker.
        listener: on rank 0 with ``tcp``, the descriptor of a socket that listens at that address. This function takes
            it over.

    Raises:
        ConfigError: Megatron numbers ranks in another way than `moerl.contract.parallel`.
    """
    with uncollected():
        platform.prepare()
        megatron_patches.apply()
        from megatron.core import parallel_state as mpu
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    with _shared_device():
        dist.init_process_group(
            platform.collective_backend(),
            store=_store(rendezvous, rank, dims.world_size, listener),
            rank=rank,
            world_size=dims.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=dims.tensor,
            pipeline_model_parallel_size=dims.pipeline,
            virtual_pipeline_model_parallel_size=dims.virtual_pipeline if dims.virtual_pipeline > 1 else None,
            context_parallel_size=dims.context,
            expert_model_parallel_size=dims.expert,
            expert_tensor_parallel_size=dims.expert_tensor,
        )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    layout = RankCoordinates(dims, rank)
    _check_numbering(layout)
    return layout


def _store(rendezvous: str, rank: int, world_size: int, listener: int | None) -> dist.Store:
    """Returns the store through which the ranks find one another."""
    if world_size == 1:
        return dist.HashStore()
    url = urlsplit(rendezvous)
    if url.scheme == "file":
        store = dist.FileStore(url.path, world_size)
        store.set_timeout(COLLECTIVE_TIMEOUT)
        return store
    assert url.hostname is not None
    assert url.port is not None
    # Rank 0's socket is open already: no other process can take its port. It listens at one address only.
    return dist.TCPStore(
        url.hostname, url.port, world_size, is_master=rank == 0, timeout=COLLECTIVE_TIMEOUT, master_listen_fd=listener
    )


def _check_numbering(layout: RankCoordinates) -> None:
    """Raises `ConfigError` unless Megatron agrees with `RankCoordinates`, which say in every process who has which
    shares and shards and who sends."""
    mpu = _parallel_state()
    numbers = [
        (layout.dims.data, mpu.get_data_parallel_world_size()),
        (layout.tensor_rank, mpu.get_tensor_model_parallel_rank()),
        (layout.pipeline_rank, mpu.get_pipeline_model_parallel_rank()),
        (layout.context_rank, mpu.get_context_parallel_rank()),
        (layout.data_rank, mpu.get_data_parallel_rank()),
        (layout.expert_rank, mpu.get_expert_model_parallel_rank()),
        (layout.expert_tensor_rank, mpu.get_expert_tensor_parallel_rank()),
    ]
    ours, theirs = zip(*numbers, strict=True)
    if ours != theirs:
        raise ConfigError(
            f"Megatron numbers rank {layout.rank} in another way than moerl.contract.parallel",
            seen=f"(data size, tensor, pipeline, context, data, expert, expert_tensor rank) {theirs}",
            expected=ours,
            remedy="install the megatron-core version that `make setup` pins",
        )


def _parallel_state() -> Any:
    """Imports and returns Megatron's groups, once `start` has prepared the platform."""
    return importlib.import_module("megatron.core.parallel_state")


def tensor_group() -> dist.ProcessGroup:
    """Returns this rank's tensor-parallel group."""
    return _parallel_state().get_tensor_model_parallel_group()


def tensor_and_context_group() -> dist.ProcessGroup:
    """Returns the group of the ranks that share the rows of this rank's microbatches."""
    return _parallel_state().get_tensor_and_context_parallel_group()


def context_group() -> dist.ProcessGroup:
    """Returns this rank's context-parallel group."""
    return _parallel_state().get_context_parallel_group()


def pipeline_group() -> dist.ProcessGroup:
    """Returns the group of the stages of this rank's pipeline, first to last."""
    return _parallel_state().get_pipeline_model_parallel_group()


def data_and_context_group() -> dist.ProcessGroup:
    """Returns the group of the ranks that have the same parameters outside of the experts, and different rows."""
    return _parallel_state().get_data_parallel_group(with_context_parallel=True)


def raise_together(problem: MoerlError | None, elsewhere: MoerlError) -> None:
    """Raises on every rank if any rank has a problem, so that no rank waits in a later collective for ever.

    Args:
        elsewhere: raised by ranks that have no problem.
    """
    failed = torch.full((1,), int(problem is not None), device=platform.device())
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if problem is not None:
        raise problem
    if int(failed):
        raise elsewhere


def stop() -> None:
    """Leaves Megatron's groups and the process group."""
    _parallel_state().destroy_model_parallel()
    dist.destroy_process_group()


# --- gloo ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _shared_device() -> Iterator[None]:
    """Has the gloo groups that are made in its body share the device of the first of them.

    torch gives each gloo group a device of its own, with a thread that wakes up 100 times a second even if nothing is
    sent. Megatron makes some 25 groups of a rank, so that an idle rank used 3% of a core.
    """
    original = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = _OneDevice(original)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = original  # type: ignore[misc]


class _OneDevice:
    """Stands in for the class `ProcessGroupGloo`, as a function and as an argument of `isinstance`."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self._options: Any = None

    def __call__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        if self._options is None:
            first = self._original(store, rank, size, timeout=timeout)
            self._options = first.options
            return first
        options = self._original._Options()
        options._devices, options._threads, options._timeout = self._options._devices, self._options._threads, timeout
        return self._original(store, rank, size, options)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._original)
