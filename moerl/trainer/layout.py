"""Process groups: starts torch.distributed and Megatron's parallel state for this rank, and describes the result.

Runs in every trainer rank. The backend follows the device: NCCL on GPUs, gloo on a CPU.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from moerl.config.schema import ParallelConfig
from moerl.errors import ConfigError
from moerl.trainer import fixes, platform

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where this rank stands. Sizes and ranks are Megatron's; groups come from `megatron.core.parallel_state`.

    virtual_pipeline: model chunks of this rank.
    """

    rank: int
    world_size: int
    tensor: int
    pipeline: int
    virtual_pipeline: int
    context: int
    expert: int
    expert_tensor: int
    data: int
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    data_rank: int

    @property
    def is_main(self) -> bool:
        """True on the rank that hosts the embedded engine and writes the run directory."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True where the language-model head is, and so the loss."""
        return self.pipeline_rank == self.pipeline - 1

    @property
    def microbatch_multiple(self) -> int:
        """The interleaved schedule runs microbatches in rounds of as many as there are stages."""
        return self.pipeline if self.virtual_pipeline > 1 else 1


def start(*, rank: int, world_size: int, rendezvous: str, parallel: ParallelConfig, seed: int) -> Layout:
    """Joins the process group and builds Megatron's groups.

    Args:
        rendezvous: a torch.distributed init method, for example ``file:///run/rendezvous``; not used by one process.
        parallel: parallel sizes; their product is `world_size`.
        seed: seeds Megatron's RNG tracker.

    Raises:
        ConfigError: the sizes are not of `world_size` processes, or there are more ranks than GPUs on a GPU machine.
    """
    _check_world(world_size, parallel)
    platform.prepare()
    fixes.apply()
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    # One process needs nobody to meet, and so no file or port.
    dist.init_process_group(
        platform.collective_backend(),
        init_method=rendezvous if world_size > 1 else None,
        store=dist.HashStore() if world_size == 1 else None,
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return Layout(
        rank=rank,
        world_size=world_size,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        data=mpu.get_data_parallel_world_size(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
        pipeline_rank=mpu.get_pipeline_model_parallel_rank(),
        context_rank=mpu.get_context_parallel_rank(),
        data_rank=mpu.get_data_parallel_rank(),
    )


def _check_world(world_size: int, parallel: ParallelConfig) -> None:
    if parallel.world_size != world_size:
        raise ConfigError(
            "parallel: the sizes are not those of the processes that were started",
            seen=f"{world_size} processes",
            expected=f"{parallel.world_size}: tensor x pipeline x context x data",
            remedy="start the run with `moerl train`, which starts the right number",
        )
    if torch.cuda.is_available() and world_size > torch.cuda.device_count():
        raise ConfigError(
            "parallel: more ranks than GPUs on this machine",
            seen=f"{world_size} ranks",
            expected=f"at most {torch.cuda.device_count()}",
            remedy="choose smaller parallel sizes",
        )


def tensor_group() -> dist.ProcessGroup:
    """This rank's tensor-parallel group."""
    from megatron.core import parallel_state as mpu

    return cast(dist.ProcessGroup, mpu.get_tensor_model_parallel_group())


def tensor_and_context_group() -> dist.ProcessGroup:
    """The ranks that share the rows of this rank's microbatches."""
    from megatron.core import parallel_state as mpu

    return cast(dist.ProcessGroup, mpu.get_tensor_and_context_parallel_group())


def context_group() -> dist.ProcessGroup:
    """This rank's context-parallel group."""
    from megatron.core import parallel_state as mpu

    return cast(dist.ProcessGroup, mpu.get_context_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    """The stages of this rank's pipeline, first to last."""
    from megatron.core import parallel_state as mpu

    return cast(dist.ProcessGroup, mpu.get_pipeline_model_parallel_group())


def data_group() -> dist.ProcessGroup:
    """This rank's data-parallel group."""
    from megatron.core import parallel_state as mpu

    return cast(dist.ProcessGroup, mpu.get_data_parallel_group())


def data_and_context_group() -> dist.ProcessGroup:
    """The ranks that hold the same parameters outside of the experts, and different rows."""
    from megatron.core import parallel_state as mpu

    return cast(dist.ProcessGroup, mpu.get_data_parallel_group(with_context_parallel=True))


def stop() -> None:
    """Leaves Megatron's groups and the process group."""
    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
    dist.destroy_process_group()
