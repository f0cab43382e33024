"""Engines, made for the controller, which knows their port alone. Runs in the controller."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from moerl.config.engine_memory import DeviceOptions
from moerl.config.rollouts import ServedRolloutConfig
from moerl.contract.ports import PolicyEngine
from moerl.contract.weight_update import UpdateKind, WeightUpdate
from moerl.errors import EngineError, undoing
from moerl.kernels.checksum import checksums
from moerl.machine.model_files import stored_tensors
from moerl.models.description import ModelDescription
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.engine_process.engine import ProcessEngine
from moerl.rollout.engine_process.local import EngineProcess
from moerl.rollout.engine_process.messages import StartEngine
from moerl.rollout.fleet.backend import ModelFacts, ServedRun
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.fleet.options import EngineOptions
from moerl.rollout.loading import load_sampler
from moerl.rollout.server_kinds import SERVER_KINDS

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def embedded_engine(
    model: ModelDescription, *, dtype: str, max_running: int, version: int = -1, on_device: DeviceOptions | None = None
) -> EmbeddedEngine:
    """Makes an embedded engine for the model of a Hugging Face directory, on the GPU of this process if there is one.

    Args:
        version: policy version of the weights in its folder; -1 if the engine must wait for a first update.
        on_device: as of `EmbeddedEngine`.
    """
    assert model.folder is not None
    return EmbeddedEngine(
        load_sampler(model.folder, dtype),
        model.spec,
        engine_id="embedded-0",
        max_running=max_running,
        policy_version=version,
        on_device=on_device,
    )


def engine_in_process(start: StartEngine, process: EngineProcess) -> ProcessEngine:
    """Makes an embedded engine in a process of its own, which `process` is."""
    return ProcessEngine(start, process)


def served_engine(rollout: ServedRolloutConfig, run: ServedRun, options: EngineOptions) -> FleetEngine:
    """Makes an engine on the servers of a run. Those that others started get the weights of the model's folder, unless
    a first update is to come (`run.version` -1)."""
    model, kind, is_ours = run.model, SERVER_KINDS[rollout.kind], rollout.starts_servers
    assert model.folder is not None
    launchers = kind.launchers(rollout, run)
    several = f"s, {len(launchers)} of them" if len(launchers) > 1 else ""
    options.notify(f"waiting for the {kind.title} server{several}")
    facts = ModelFacts(model.spec, model.moe_layers)
    connect = kind.connect(facts, options)
    engine = FleetEngine(launchers, connect, facts, options, run.version if is_ours else -1)
    if not is_ours and run.version >= 0:
        send_folder(engine, model.folder, run.version, options)
    return engine


def engine_memory(engine: PolicyEngine) -> int:
    """Returns the peak resident memory of an embedded engine's own process, in bytes; 0 for other engines, which run in
    the controller or are servers."""
    return engine.peak_rss_bytes() if isinstance(engine, ProcessEngine) else 0


def send_folder(engine: FleetEngine, folder: Path, version: int, options: EngineOptions) -> None:
    """Sends the weights of a folder to servers that others started, and has them checked: their version label alone
    does not prove that they have these weights."""
    with undoing(engine.close):  # leaves the servers
        dtypes, sent = engine.held_dtypes(), dict[str, int]()
        engine.begin_update(WeightUpdate(version, UpdateKind.FULL, options.shapes))
        for file in sorted({tensor.file for tensor in stored_tensors(folder).values()}):
            tensors = {name: tensor for name, tensor in load_file(file).items() if name in options.shapes}
            quantized = next((name for name, tensor in tensors.items() if tensor.dtype not in _DTYPES), None)
            if quantized is not None:
                raise EngineError(
                    f"{file}: {quantized!r} cannot be sent to a server",
                    seen=tensors[quantized].dtype,
                    expected="float32, bfloat16 or float16",
                    remedy="let the run start its own server: rollout=sglang",
                )
            engine.receive(tensors.items())
            sent |= checksums(tensors.items(), dtypes)
        engine.end_update()
        engine.verify(sent)
