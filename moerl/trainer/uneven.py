"""Gathering and reduce-scattering of uneven slices on gloo, which accepts even ones only.

Runs in every trainer rank without CUDA; called by `moerl.trainer.platform.prepare`. If experts are cut over some ranks
and spread over others (`parallel.expert_tensor` and `parallel.expert` above 1), the ranks that share an expert have
different numbers of rows. NCCL exchanges them as they are; here every slice is padded to the longest.

Goes when gloo's `all_gather` and `reduce_scatter` take tensors of different sizes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def replace_collectives() -> None:
    """Makes Megatron's two collectives along the first dimension use those of this module if it passes split sizes."""
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")

    def of_any(even: Callable[..., Tensor], uneven: Callable[[Tensor, Any, Sequence[int]], Tensor]) -> Any:
        def run(input_: Tensor, group: Any, split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
            if split_sizes is None or group.size() == 1:
                return even(input_, group, split_sizes, use_global_buffer)
            return uneven(input_, group, [int(size) for size in split_sizes])

        return run

    mappings._gather_along_first_dim = of_any(mappings._gather_along_first_dim, gather_uneven)
    mappings._reduce_scatter_along_first_dim = of_any(mappings._reduce_scatter_along_first_dim, reduce_scatter_uneven)


def gather_uneven(local: Tensor, group: Any, sizes: Sequence[int]) -> Tensor:
    """Returns the slices of all ranks, in rank order: [sum(sizes), ...]. local: [sizes of this rank, ...]."""
    padded = _padded(local, max(sizes))
    slices = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(slices, padded, group=group)
    return torch.cat([each[:size] for each, size in zip(slices, sizes, strict=True)])


def reduce_scatter_uneven(whole: Tensor, group: Any, sizes: Sequence[int]) -> Tensor:
    """Returns this rank's slice of the sum over ranks: [sizes of this rank, ...]. whole: [sum(sizes), ...] on every
    rank."""
    longest = max(sizes)
    padded = torch.cat([_padded(each, longest) for each in whole.split(list(sizes))])
    own = whole.new_empty(longest, *whole.shape[1:])
    dist.reduce_scatter_tensor(own, padded, group=group)
    return own[: sizes[group.rank()]].contiguous()


def _padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])
