"""The start of a rank in a process of its own. Imports torch and Megatron."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moerl.config.schema import RunConfig
from moerl.contract.commands import Start
from moerl.ranks.libraries import quiet_libraries
from moerl.ranks.worker import Worker
from moerl.trainer import groups


def start_worker(start: Start, watch: Callable[[int, int], None]) -> Worker:
    """Joins the other ranks. A collective."""
    config = RunConfig.model_validate_json(start.config)
    quiet_libraries()
    world_size = config.parallel.world_size
    torch.set_num_threads(max(1, config.num_threads // world_size))
    layout = groups.start(
        rank=start.rank,
        world_size=world_size,
        rendezvous=start.rendezvous,
        dims=config.parallel.dims,
        seed=config.seed,
    )
    return Worker(config, layout, watch)
