"""SGLang as a kind of servers: how a run starts them, or finds those that others started. Runs in the controller and in
trainer ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from moerl.config.placement import controller_address
from moerl.config.rollouts import ServerRolloutConfig, SGLangRolloutConfig
from moerl.errors import EngineError
from moerl.rollout.fleet.backend import ServedRun, ServerKind, ServerLauncher
from moerl.rollout.sglang.backend import SGLangConnect
from moerl.rollout.sglang.channel import open_channel
from moerl.rollout.sglang.install import device_of
from moerl.rollout.sglang.launchers import NamedServer
from moerl.rollout.sglang.server import ServerOptions

_FOLDER = "sglang"
"""Folder in the run directory: it has a folder for each of the run's own servers, with its log and options."""


def launchers(rollout: SGLangRolloutConfig | ServerRolloutConfig, run: ServedRun) -> Sequence[ServerLauncher]:
    """Returns the launchers of the servers of a run.

    Raises:
        EngineError: this machine has fewer GPUs than the servers need.
        ConfigError: this machine cannot reach the Ray cluster.
    """
    if isinstance(rollout, ServerRolloutConfig):
        return [NamedServer(file, rollout.start_seconds) for file in rollout.server]
    assert run.model.folder is not None
    options = ServerOptions(
        model=run.model.folder,
        environment=rollout.environment,
        device=device_of(rollout.environment),
        tensor=rollout.tensor,
        expert=rollout.expert,
        dtype=rollout.dtype,
        max_running=rollout.max_running,
        max_pool_tokens=rollout.max_pool_tokens,
        memory_share=rollout.memory_share,
        sleeps=rollout.is_colocated,
        vocab_size=run.model.spec.vocab_size,
        passed_on=rollout.server_args,
        policy_version=run.version,
        # An address that the ranks can reach, which send the weights.
        host=controller_address(run.launch),
    )
    gpus = torch.cuda.device_count() if options.device == "cuda" and run.launch.on == "local" else None
    return [
        run.launcher(replace(options, first_device=first), run.folder / _FOLDER / str(i), rollout.start_seconds)
        for i, first in enumerate(first_devices(rollout.servers, rollout.tensor, gpus, shared=rollout.is_colocated))
    ]


def first_devices(servers: int, tensor: int, gpus: int | None, *, shared: bool = False) -> list[int]:
    """Returns the first device of each server of a run. Servers get the last GPUs of this machine, since ranks of the
    trainer use the first ones.

    Args:
        tensor: devices of one server.
        gpus: GPUs of this machine; None on CPUs, whose cores a server counts from the last one, and if Ray chooses.
        shared: True if servers share the GPUs of the ranks, from the first one on.

    Raises:
        EngineError: this machine has fewer GPUs than the servers need.
    """
    free = 0 if gpus is None else gpus - servers * tensor
    if free < 0:
        raise EngineError(
            "rollout.servers: more devices than this machine has",
            seen=f"{servers} servers with {tensor} GPUs each, {gpus} GPUs",
            expected=f"at most {gpus} GPUs for servers",
            remedy="choose smaller rollout.servers or rollout.tensor",
        )
    first = 0 if shared else free
    return [first + number * tensor for number in range(servers)]


SGLANG = ServerKind("SGLang", launchers, SGLangConnect, open_channel)
