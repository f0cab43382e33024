"""The start of a rank in a process of its own. Imports torch and Megatron."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moerl.config.schema import RunConfig
from moerl.contract.commands import Start
from moerl.errors import ConfigError
from moerl.ranks.libraries import quiet_libraries
from moerl.ranks.worker import Worker
from moerl.trainer import groups


def start_worker(start: Start, watch: Callable[[int, int], None], listener: int | None = None) -> Worker:
    """Joins the other ranks. A collective.

    Args:
        listener: as in `groups.start`.

    Raises:
        ConfigError: there are more ranks than GPUs on a GPU machine.
    """
    config = RunConfig.model_validate_json(start.config)
    quiet_libraries()
    world_size = config.parallel.world_size
    torch.set_num_threads(max(1, config.num_threads // world_size))
    _check_gpus(start.local_ranks)
    layout = groups.start(
        rank=start.rank,
        world_size=world_size,
        rendezvous=start.rendezvous,
        dims=config.parallel.dims,
        seed=config.seed,
        listener=listener,
    )
    return Worker(config, layout, watch)


def _check_gpus(local_ranks: int) -> None:
    if torch.cuda.is_available() and local_ranks > torch.cuda.device_count():
        raise ConfigError(
            "parallel: more ranks than GPUs on this machine",
            seen=f"{local_ranks} ranks",
            expected=f"at most {torch.cuda.device_count()}",
            remedy="choose smaller parallel sizes",
        )
