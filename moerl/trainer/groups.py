"""Process groups: starts torch.distributed and Megatron's parallel state for this rank, and returns its groups.

Runs in every trainer rank. The backend follows the device: NCCL on GPUs, gloo on a CPU.
"""

from __future__ import annotations

import datetime
from typing import cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.errors import ConfigError, MoerlError
from moerl.machine.torch_start import uncollected
from moerl.trainer import gloo, megatron_patches, platform

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


def start(
    *, rank: int, world_size: int, rendezvous: str, dims: ParallelDims, seed: int, listener: int | None = None
) -> RankCoordinates:
    """Joins the process group and builds Megatron's groups.

    Args:
        rendezvous: ``file://PATH`` or ``tcp://HOST:PORT`` at which the ranks meet; not used by one process.
        world_size: processes that were started. dims: parallel sizes of as many.
        seed: of torch and of Megatron's RNG tracker.
        listener: on rank 0 with ``tcp``, the descriptor of a socket that listens at that address. This function takes
            it over.

    Raises:
        ConfigError: the sizes are not of `world_size` processes, or Megatron numbers ranks in another way than
            `moerl.contract.parallel`.
    """
    _check_world(world_size, dims)
    with uncollected():
        platform.prepare()
        megatron_patches.apply()
        from megatron.core import parallel_state as mpu
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    with gloo.shared_device():
        dist.init_process_group(
            platform.collective_backend(),
            store=_store(rendezvous, rank, world_size, listener),
            rank=rank,
            world_size=world_size,
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
        url.hostname,
        url.port,
        world_size,
        is_master=rank == 0,
        timeout=COLLECTIVE_TIMEOUT,
        master_listen_fd=listener,
    )


def _check_numbering(layout: RankCoordinates) -> None:
    """Raises `ConfigError` unless Megatron agrees with `RankCoordinates`, which say in every process who has which
    shares and shards and who sends."""
    from megatron.core import parallel_state as mpu

    ours = (
        layout.dims.data,
        layout.tensor_rank,
        layout.pipeline_rank,
        layout.context_rank,
        layout.data_rank,
        layout.expert_rank,
        layout.expert_tensor_rank,
    )
    theirs = (
        mpu.get_data_parallel_world_size(),
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_context_parallel_rank(),
        mpu.get_data_parallel_rank(),
        mpu.get_expert_model_parallel_rank(),
        mpu.get_expert_tensor_parallel_rank(),
    )
    if ours != theirs:
        raise ConfigError(
            f"Megatron numbers rank {layout.rank} in another way than moerl.contract.parallel",
            seen=f"(data size, tensor, pipeline, context, data, expert, expert_tensor rank) {theirs}",
            expected=ours,
            remedy="install the megatron-core version that `make setup` pins",
        )


def _check_world(world_size: int, dims: ParallelDims) -> None:
    if dims.world_size != world_size:
        raise ConfigError(
            "parallel: the sizes are not those of the processes that were started",
            seen=f"{world_size} processes",
            expected=f"{dims.world_size}: tensor x pipeline x context x data",
            remedy="start the run with `moerl train`, which starts the right number",
        )


def tensor_group() -> dist.ProcessGroup:
    """Returns this rank's tensor-parallel group."""
    from megatron.core import parallel_state as mpu

    return cast(dist.ProcessGroup, mpu.get_tensor_model_parallel_group())


def tensor_and_context_group() -> dist.ProcessGroup:
    """Returns the group of the ranks that share the rows of this rank's microbatches."""
    from megatron.core import parallel_state as mpu

    return cast(dist.ProcessGroup, mpu.get_tensor_and_context_parallel_group())


def context_group() -> dist.ProcessGroup:
    """Returns this rank's context-parallel group."""
    from megatron.core import parallel_state as mpu

    return cast(dist.ProcessGroup, mpu.get_context_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    """Returns the group of the stages of this rank's pipeline, first to last."""
    from megatron.core import parallel_state as mpu

    return cast(dist.ProcessGroup, mpu.get_pipeline_model_parallel_group())


def data_and_context_group() -> dist.ProcessGroup:
    """Returns the group of the ranks that have the same parameters outside of the experts, and different rows."""
    from megatron.core import parallel_state as mpu

    return cast(dist.ProcessGroup, mpu.get_data_parallel_group(with_context_parallel=True))


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
    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
    dist.destroy_process_group()
