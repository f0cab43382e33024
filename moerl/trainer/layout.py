"""Process groups: starts torch.distributed and Megatron's parallel state for this rank, and describes the result.

Runs in every trainer rank. The backend follows the device: NCCL on GPUs, gloo on a CPU.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from moerl.trainer import fixes, platform

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where this rank stands. Sizes and ranks are Megatron's; groups come from `megatron.core.parallel_state`."""

    rank: int
    world_size: int
    tensor: int
    expert: int
    data: int
    tensor_rank: int
    data_rank: int

    @property
    def is_main(self) -> bool:
        """True on the rank that hosts the embedded engine and writes the run directory."""
        return self.rank == 0


def start(*, rank: int, world_size: int, rendezvous: str, tensor: int, expert: int, seed: int) -> Layout:
    """Joins the process group and builds Megatron's groups.

    Args:
        rendezvous: a torch.distributed init method, for example ``file:///run/rendezvous``; not used by one process.
        tensor, expert: parallel sizes; the data-parallel size is what is left of `world_size`.
        seed: seeds Megatron's RNG tracker.
    """
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
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return Layout(
        rank=rank,
        world_size=world_size,
        tensor=tensor,
        expert=expert,
        data=mpu.get_data_parallel_world_size(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
        data_rank=mpu.get_data_parallel_rank(),
    )


def tensor_group() -> dist.ProcessGroup:
    """This rank's tensor-parallel group."""
    from megatron.core import parallel_state as mpu

    return cast(dist.ProcessGroup, mpu.get_tensor_model_parallel_group())


def data_group() -> dist.ProcessGroup:
    """This rank's data-parallel group."""
    from megatron.core import parallel_state as mpu

    return cast(dist.ProcessGroup, mpu.get_data_parallel_group())


def stop() -> None:
    """Leaves Megatron's groups and the process group."""
    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
    dist.destroy_process_group()
