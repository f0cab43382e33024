"""The start of a rank in a process of its own. Imports torch and Megatron."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moerl.config.ranks import RankConfig, rank_threads
from moerl.config.rollouts import SGLangRolloutConfig
from moerl.contract.commands import Start
from moerl.errors import ConfigError
from moerl.ranks.libraries import quiet_libraries
from moerl.ranks.worker import Worker
from moerl.rollout.sglang.install import device_of
from moerl.trainer import groups


def start_worker(start: Start, watch: Callable[[int, int], None], listener: int | None = None) -> Worker:
    """Joins the other ranks and returns the worker of this one. A collective.

    Args:
        listener: as in `groups.start`.

    Raises:
        ConfigError: there are more ranks, and GPUs of the run's own servers, than GPUs on a GPU machine.
    """
    config = RankConfig.model_validate_json(start.config)
    quiet_libraries()
    torch.set_num_threads(rank_threads(config, "sft"))
    if torch.cuda.is_available():
        check_gpus(start.local_ranks, _gpus_of_servers(config), torch.cuda.device_count())
    layout = groups.start(
        rank=start.rank, rendezvous=start.rendezvous, dims=config.parallel.dims, seed=config.seed, listener=listener
    )
    return Worker(config, layout, watch)


def _gpus_of_servers(config: RankConfig) -> int:
    """Returns the number of GPUs of this machine, the last ones, that servers of the run use; 0 for a rank that sees
    its own GPU alone."""
    rollout = config.rollout
    if not isinstance(rollout, SGLangRolloutConfig) or config.launch.on == "ray":
        return 0
    return rollout.own_devices if device_of(rollout.environment) == "cuda" else 0


def check_gpus(local_ranks: int, servers: int, gpus: int) -> None:
    """Raises `ConfigError` if ranks, and GPUs of servers, are more than the GPUs of a machine."""
    if local_ranks + servers > gpus:
        raise ConfigError(
            "parallel, rollout.servers: more ranks and servers than GPUs on this machine",
            seen=f"{local_ranks} ranks, {servers} GPUs of servers",
            expected=f"at most {gpus} together",
            remedy="choose smaller parallel sizes, rollout.servers or rollout.tensor, or take servers of `moerl serve`",
        )
