"""The rollout engine that a configuration asks for, or the dumps in place of one. Runs in the controller; callers see
the engine's port only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from moerl.config.placement import controller_address
from moerl.config.ranks import RankConfig, engine_threads
from moerl.config.rollouts import DumpsRolloutConfig, EmbeddedRolloutConfig, ServerRolloutConfig, SGLangRolloutConfig
from moerl.config.schema import RunConfig
from moerl.contract.ports import PolicyEngine
from moerl.contract.quarantine import Quarantine
from moerl.diagnostics.dumps.survey import batches, check_fits, survey
from moerl.errors import EngineError, ending
from moerl.machine.model_tensors import TIED, check_weights, checkpoint_shapes
from moerl.models.description import ModelDescription
from moerl.orchestration.dump_source import DumpSource, TrainableDump
from moerl.orchestration.rollouts import sampling_params
from moerl.orchestration.source import GroupPlan
from moerl.rollout.beside.local import EngineProcess, LocalProcess, dismiss
from moerl.rollout.beside.messages import StartEngine
from moerl.rollout.fleet.backend import ServerLauncher
from moerl.rollout.fleet.options import EngineOptions, Interrupt
from moerl.rollout.sglang.install import device_of
from moerl.rollout.sglang.launchers import NamedServer, OwnServer
from moerl.rollout.sglang.server import ServerOptions

SERVER_FOLDER = "sglang"
"""Folder in the run directory: it has a folder for each of the run's own servers, with its log and options."""


OwnLauncher = Callable[[ServerOptions, Path, float], ServerLauncher]
MakeProcess = Callable[[Path], EngineProcess]


@contextmanager
def begun_early(config: RunConfig, process: MakeProcess) -> Iterator[MakeProcess]:
    """Yields a `process` for `open_engine`. The process of an embedded engine with `placement` beside is started at
    once: it imports its libraries while the caller does something else. It is ended with the context if no engine used
    it."""
    rollout = config.rollout
    if not isinstance(rollout, EmbeddedRolloutConfig) or rollout.placement != "beside" or config.launch.on == "ray":
        yield process
        return
    waiting = [process(_log(config))]
    with ending(lambda: [dismiss(each) for each in waiting]):
        yield lambda log: waiting.pop()


def _log(config: RunConfig) -> Path:
    """Returns the file for the output of an engine's process."""
    return config.run_dir / "logs" / "engine.log"


def open_engine(
    config: RunConfig,
    model: ModelDescription,
    version: int,
    say: Callable[[str], None],
    launcher: OwnLauncher = OwnServer,
    process: MakeProcess = LocalProcess,
) -> PolicyEngine:
    """Opens the engine of `config.rollout` for the model of a directory; the caller closes it.

    Args:
        version: policy version of its weights; -1 if the engine must wait for a first update.
        say: called with lines for the user about a server, or about an engine on a GPU.
        launcher: makes the launcher of one of the run's own servers; on this machine by default.
        process: starts the process of an embedded engine with `placement` beside, by its log; on this machine by
            default.

    Raises:
        EngineError: the engine cannot serve.
        ConfigError: the directory does not have the weights of its model.
    """
    rollout = config.rollout
    assert model.folder is not None
    assert not isinstance(rollout, DumpsRolloutConfig), "a run from dumps opens no engine"
    check_weights(model.folder)
    if isinstance(rollout, EmbeddedRolloutConfig):
        return _embedded(config, rollout, model, version, say, process)
    options = EngineOptions(
        engine_id="sglang",
        dtype=rollout.dtype,
        max_running=rollout.max_running,
        response_seconds=rollout.response_seconds,
        probe_seconds=rollout.probe_seconds,
        # A step of an update, which may take `weights.step_seconds`, is a few calls of a server.
        update_seconds=config.weights.step_seconds / 2,
        bucket_bytes=config.weights.bucket_bytes,
        shapes=checkpoint_shapes(model.folder, model.hf_config),
        tied=TIED if model.tie_word_embeddings else {},
        say=say,
        interrupt=Interrupt(config.weights.interrupt),
        keeps_copy=rollout.keeps_weight_copy,
        shares_devices=isinstance(rollout, SGLangRolloutConfig) and rollout.is_colocated,
    )
    launchers = _launchers(config, model, version, launcher)
    say("waiting for the SGLang server" + (f"s, {len(launchers)} of them" if len(launchers) > 1 else ""))
    from moerl.rollout.factory import served_engine

    return served_engine(launchers, model, options, version, is_ours=isinstance(rollout, SGLangRolloutConfig))


def _embedded(
    config: RunConfig,
    rollout: EmbeddedRolloutConfig,
    model: ModelDescription,
    version: int,
    say: Callable[[str], None],
    process: MakeProcess,
) -> PolicyEngine:
    from moerl.rollout.factory import embedded_engine, engine_beside

    if rollout.placement == "inside":
        engine = embedded_engine(
            model,
            dtype=rollout.dtype,
            max_running=rollout.max_running,
            version=version,
            record_steps=rollout.record_steps,
        )
    else:
        start = StartEngine(
            folder=str(model.folder),
            dtype=rollout.dtype,
            spec=model.spec,
            max_running=rollout.max_running,
            num_threads=engine_threads(RankConfig.of(config)),
            version=version,
            record_steps=rollout.record_steps,
        )
        engine = engine_beside(start, process(_log(config)))
    if engine.is_on_device:
        say(engine.description)
    return engine


def _launchers(config: RunConfig, model: ModelDescription, version: int, launcher: OwnLauncher) -> list[ServerLauncher]:
    from moerl.rollout.host import num_gpus

    rollout, folder = config.rollout, config.run_dir / SERVER_FOLDER
    if isinstance(rollout, ServerRolloutConfig):
        return [NamedServer(file, rollout.start_seconds) for file in rollout.server]
    assert isinstance(rollout, SGLangRolloutConfig)
    assert model.folder is not None
    options = ServerOptions(
        model=model.folder,
        environment=rollout.environment,
        device=device_of(rollout.environment),
        tensor=rollout.tensor,
        expert=rollout.expert,
        dtype=rollout.dtype,
        max_running=rollout.max_running,
        max_pool_tokens=rollout.max_pool_tokens,
        memory_share=rollout.memory_share,
        sleeps=rollout.is_colocated,
        vocab_size=model.spec.vocab_size,
        passed_on=rollout.server_args,
        policy_version=version,
        # An address that the ranks can reach, which send the weights.
        host=controller_address(config.launch),
    )
    # On a cluster Ray gives each server its GPUs.
    gpus = num_gpus() if options.device == "cuda" and config.launch.on == "local" else None
    return [
        launcher(replace(options, first_device=first), folder / str(i), rollout.start_seconds)
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


def group_plan(config: RunConfig) -> GroupPlan:
    """Returns the plan of the groups of a run."""
    sampling = sampling_params(config.rollout, config.seed if config.rollout.has_engine else 0)
    return GroupPlan(config.rl, config.queue_limits(), sampling, config.seed, config.weights.step_seconds)


def dump_source(
    config: RunConfig, model: ModelDescription, quarantine: Quarantine, say: Callable[[str], None]
) -> DumpSource:
    """Looks over the dumps of `rollout.path`, and returns the source that reads them.

    Raises:
        ConfigError: the dump cannot be read, or does not fit model and settings.
    """
    from moerl.offline.torch_dumps import load_torch

    assert isinstance(config.rollout, DumpsRolloutConfig)
    path = config.rollout.path
    found = survey(path, model, load_torch, say)
    check_fits(found, model, config.rl, config.trainer, config.algorithm, config.quarantine)
    dump = TrainableDump(path, found, batches(found, config.rl.prompts_per_step), config.algorithm.needs, load_torch)
    return DumpSource(dump, group_plan(config), model, quarantine, say)
