"""The rollout engine that a configuration asks for, or the dumps in place of one. Runs in the controller; callers see
the engine's port only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moerl.config.engine_memory import device_options
from moerl.config.ranks import RankConfig, engine_threads
from moerl.config.rollouts import DumpsRolloutConfig, EmbeddedRolloutConfig
from moerl.config.schema import RunConfig
from moerl.contract.ports import PolicyEngine
from moerl.contract.quarantine import Quarantine
from moerl.diagnostics.dumps.survey import batches, check_fits, survey
from moerl.errors import ending
from moerl.machine.model_tensors import TIED, check_weights, checkpoint_shapes
from moerl.models.description import ModelDescription
from moerl.orchestration.dump_source import DumpSource, TrainableDump
from moerl.orchestration.rollouts import sampling_params
from moerl.orchestration.source import GroupPlan
from moerl.rollout.engine_process.local import EngineProcess, LocalProcess, dismiss
from moerl.rollout.engine_process.messages import StartEngine
from moerl.rollout.fleet.backend import ServedRun, ServerLauncher
from moerl.rollout.fleet.options import EngineOptions, Interrupt
from moerl.rollout.sglang.launchers import OwnServer

OwnLauncher = Callable[[Any, Path, float], ServerLauncher]
MakeProcess = Callable[[Path], EngineProcess]


@contextmanager
def begun_early(config: RunConfig, process: MakeProcess) -> Iterator[MakeProcess]:
    """Yields a `process` for `open_engine`. The process of an embedded engine with `placement` process is started at
    once, but not on Ray: it imports its libraries while the caller does something else. It is ended with the context if
    no engine used it."""
    rollout = config.rollout
    if not isinstance(rollout, EmbeddedRolloutConfig) or rollout.placement != "process" or config.launch.on == "ray":
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
    notify: Callable[[str], None],
    launcher: OwnLauncher = OwnServer,
    process: MakeProcess = LocalProcess,
) -> PolicyEngine:
    """Opens the engine of `config.rollout` for the model of a directory; the caller closes it.

    Args:
        version: policy version of its weights; -1 if the engine must wait for a first update.
        notify: called with lines for the user about a server, or about an engine on a GPU.
        launcher: makes the launcher of one of the run's own servers; on this machine by default.
        process: starts the process of an embedded engine with `placement` process, by its log; on this machine by
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
        return _embedded(config, rollout, model, version, notify, process)
    options = EngineOptions(
        engine_id=rollout.kind,
        dtype=rollout.dtype,
        max_running=rollout.max_running,
        response_seconds=rollout.response_seconds,
        probe_seconds=rollout.probe_seconds,
        # A step of an update, which may take `weights.step_seconds`, is a few calls of a server.
        update_seconds=config.weights.step_seconds / 2,
        bucket_bytes=config.weights.bucket_bytes,
        shapes=checkpoint_shapes(model.folder, model.hf_config),
        tied=TIED if model.tie_word_embeddings else {},
        notify=notify,
        interrupt=Interrupt(config.weights.interrupt),
        keeps_copy=rollout.keeps_weight_copy,
        shares_devices=rollout.is_colocated,
    )
    run = ServedRun(model, version, config.launch, config.run_dir, launcher)
    from moerl.rollout.factory import served_engine

    return served_engine(rollout, run, options)


def _embedded(
    config: RunConfig,
    rollout: EmbeddedRolloutConfig,
    model: ModelDescription,
    version: int,
    notify: Callable[[str], None],
    process: MakeProcess,
) -> PolicyEngine:
    from moerl.rollout.factory import embedded_engine, engine_in_process

    if rollout.placement == "controller":
        engine = embedded_engine(
            model,
            dtype=rollout.dtype,
            max_running=rollout.max_running,
            version=version,
            on_device=device_options(rollout),
        )
    else:
        start = StartEngine(
            folder=str(model.folder),
            dtype=rollout.dtype,
            spec=model.spec,
            max_running=rollout.max_running,
            num_threads=engine_threads(RankConfig.of(config)),
            version=version,
            on_device=device_options(rollout),
        )
        engine = engine_in_process(start, process(_log(config)))
    if engine.is_on_device:
        notify(engine.description)
    return engine


def group_plan(config: RunConfig) -> GroupPlan:
    """Returns the plan of the groups of a run."""
    sampling = sampling_params(config.rollout, config.seed if config.rollout.has_engine else 0)
    return GroupPlan(config.rl, config.queue_limits(), sampling, config.seed, config.weights.step_seconds)


def dump_source(
    config: RunConfig, model: ModelDescription, quarantine: Quarantine, notify: Callable[[str], None]
) -> DumpSource:
    """Looks over the dumps of `rollout.path`, and returns the source that reads them.

    Raises:
        ConfigError: the dump cannot be read, or does not fit model and settings.
    """
    from moerl.offline.torch_dumps import load_torch

    assert isinstance(config.rollout, DumpsRolloutConfig)
    path = config.rollout.path
    found = survey(path, model, load_torch, notify)
    check_fits(found, model, config.rl, config.trainer, config.algorithm, config.quarantine)
    dump = TrainableDump(path, found, batches(found, config.rl.prompts_per_step), config.algorithm.needs, load_torch)
    return DumpSource(dump, group_plan(config), model, quarantine, notify)
