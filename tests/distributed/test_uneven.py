"""Collectives of slices of different lengths on gloo."""

from __future__ import annotations

from typing import Any

import numpy as np
from ranks import Ranks

SIZES = (3, 0, 5, 1)


def exchange(layout: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )

    sizes, rank = list(SIZES), layout.rank
    local = torch.full((sizes[rank], 2), float(rank), requires_grad=True)
    gathered = gather_from_sequence_parallel_region(local, group=dist.group.WORLD, output_split_sizes=sizes)
    (gathered * torch.arange(float(len(gathered)))[:, None]).sum().backward()
    whole = torch.arange(float(sum(sizes)))[:, None].expand(-1, 2) * (rank + 1)
    summed = reduce_scatter_to_sequence_parallel_region(whole, group=dist.group.WORLD, input_split_sizes=sizes)
    assert local.grad is not None
    return gathered.detach().numpy(), local.grad.numpy(), summed.numpy()


def test_slices_of_any_length_are_gathered_and_their_gradients_come_back(four_processes: Ranks) -> None:
    ends = np.cumsum(SIZES)
    rows = np.arange(ends[-1])
    for rank, (gathered, grad, summed) in enumerate(four_processes.run(exchange)):
        own = rows[ends[rank] - SIZES[rank] : ends[rank]]
        np.testing.assert_array_equal(gathered[:, 0], np.repeat(np.arange(4), SIZES))
        # Every rank used every row once, weighed by its place.
        np.testing.assert_array_equal(grad[:, 1], 4 * own)
        np.testing.assert_array_equal(summed[:, 1], (1 + 2 + 3 + 4) * own)
