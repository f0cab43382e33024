"""The rollout engine that a configuration asks for. Runs in the controller; callers see the engine's port only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from moerl.config.placement import controller_address
from moerl.config.ranks import RankConfig, engine_threads
from moerl.config.rollouts import DumpsRolloutConfig, EmbeddedRolloutConfig, ServerRolloutConfig, SGLangRolloutConfig
from moerl.config.schema import RunConfig
from moerl.contract.ports import PolicyEngine
from moerl.contract.weight_update import UpdateKind, WeightUpdate
from moerl.errors import EngineError, ending, undoing
from moerl.machine.model_files import stored_tensors
from moerl.machine.model_tensors import check_weights
from moerl.models.description import ModelDescription
from moerl.orchestration.models import make_engine
from moerl.rollout.beside.engine import BesideEngine
from moerl.rollout.beside.local import EngineProcess, LocalProcess, dismiss
from moerl.rollout.beside.messages import StartEngine
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.fleet.backend import ModelFacts, ServerLauncher
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.fleet.options import EngineOptions, Interrupt
from moerl.rollout.sglang.backend import sglang_engine
from moerl.rollout.sglang.install import device_of
from moerl.rollout.sglang.launchers import NamedServer, OwnServer
from moerl.rollout.sglang.server import ServerOptions
from moerl.trainer.hf_directory import checkpoint_shapes

SERVER_FOLDER = "sglang"
"""Folder in the run directory: it has a folder for each of the run's own servers, with its log and options."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Tensor that a checkpoint leaves out if its model ties its embeddings -> tensor that it is a copy of."""


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
        engine = _embedded(config, rollout, model, version, process)
        if engine.is_on_device:
            say(engine.description)
        return engine
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
    facts, is_ours = ModelFacts(model.spec, model.moe_layers), isinstance(rollout, SGLangRolloutConfig)
    engine = sglang_engine(launchers, facts, options, version if is_ours else -1)
    if not is_ours and version >= 0:
        _send_folder(engine, model.folder, version, options)
    return engine


def _embedded(
    config: RunConfig, rollout: EmbeddedRolloutConfig, model: ModelDescription, version: int, process: MakeProcess
) -> EmbeddedEngine | BesideEngine:
    if rollout.placement == "inside":
        return make_engine(
            model,
            dtype=rollout.dtype,
            max_running=rollout.max_running,
            version=version,
            record_steps=rollout.record_steps,
        )
    start = StartEngine(
        folder=str(model.folder),
        dtype=rollout.dtype,
        spec=model.spec,
        max_running=rollout.max_running,
        num_threads=engine_threads(RankConfig.of(config)),
        version=version,
        record_steps=rollout.record_steps,
    )
    return BesideEngine(start, process(_log(config)))


def engine_memory(engine: PolicyEngine) -> int:
    """Returns the peak resident memory of an embedded engine's own process, in bytes; 0 for other engines, which run in
    the controller or are servers."""
    return engine.peak_rss_bytes() if isinstance(engine, BesideEngine) else 0


def _send_folder(engine: FleetEngine, folder: Path, version: int, options: EngineOptions) -> None:
    """Sends the weights of a folder to servers that others started: their version label alone does not prove that they
    have these weights."""
    with undoing(engine.close):  # leaves the servers
        engine.begin_update(WeightUpdate(version, UpdateKind.FULL, options.shapes))
        for file in sorted({tensor.file for tensor in stored_tensors(folder).values()}):
            tensors = {name: tensor for name, tensor in load_file(file).items() if name in options.shapes}
            _refuse_quantized(file, tensors)
            engine.receive(tensors.items())
        engine.end_update()


def _refuse_quantized(file: Path, tensors: Mapping[str, Tensor]) -> None:
    quantized = next((name for name, tensor in tensors.items() if tensor.dtype not in _DTYPES), None)
    if quantized is not None:
        raise EngineError(
            f"{file}: {quantized!r} cannot be sent to a server",
            seen=tensors[quantized].dtype,
            expected="float32, bfloat16 or float16",
            remedy="let the run start its own server: rollout=sglang",
        )


def _launchers(config: RunConfig, model: ModelDescription, version: int, launcher: OwnLauncher) -> list[ServerLauncher]:
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
    gpus = torch.cuda.device_count() if options.device == "cuda" and config.launch.on == "local" else None
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
