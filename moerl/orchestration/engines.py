"""The rollout engine that a configuration asks for. Runs on the rank that hosts it; what follows sees ports only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoConfig

from moerl.config.schema import (
    EmbeddedRolloutConfig,
    RolloutConfig,
    RunConfig,
    ServerRolloutConfig,
    SGLangRolloutConfig,
)
from moerl.contract.ports import PolicyEngine
from moerl.contract.spec import moe_layer_indices
from moerl.contract.trajectory import ModelSpec
from moerl.orchestration.models import checkpoint_shapes, make_engine
from moerl.rollout.sglang.client import ModelFacts
from moerl.rollout.sglang.engine import SGLangEngine
from moerl.rollout.sglang.install import device_of
from moerl.rollout.sglang.options import EngineOptions
from moerl.rollout.sglang.server import ServerOptions
from moerl.rollout.sglang.sources import NamedServer, OwnServer, ServerSource

SERVER_FOLDER = "sglang"
"""In the run directory: a folder for each of the run's own servers, with its log and options."""

_TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@dataclass(frozen=True, slots=True)
class Model:
    """A Hugging Face directory to sample from. version: policy version of its weights; -1 where the engine must wait
    for a first update."""

    folder: Path
    spec: ModelSpec
    version: int


def open_engine(config: RunConfig, model: Model, say: Callable[[str], None]) -> PolicyEngine:
    """The engine of `config.rollout` for a model; whoever opens it closes it.

    Args:
        say: told what a user should know about a server.

    Raises:
        EngineError: it cannot serve.
    """
    rollout = config.rollout
    if isinstance(rollout, EmbeddedRolloutConfig):
        return make_engine(
            model.folder, model.spec, dtype=rollout.dtype, max_running=rollout.max_running, version=model.version
        )
    hf_config = AutoConfig.from_pretrained(model.folder).to_dict()
    options = EngineOptions(
        engine_id="sglang",
        dtype=rollout.dtype,
        max_running=rollout.max_running,
        response_seconds=rollout.response_seconds,
        probe_seconds=rollout.probe_seconds,
        # A step of ours is a few calls of a server.
        update_seconds=config.weights.step_seconds / 2,
        shapes=checkpoint_shapes(model.folder, hf_config),
        tied=_TIED if hf_config.get("tie_word_embeddings") else {},
        say=say,
    )
    sources = _sources(rollout, model, config.run_dir / SERVER_FOLDER)
    say("waiting for the SGLang server" + (f"s, {len(sources)} of them" if len(sources) > 1 else ""))
    return SGLangEngine(sources, ModelFacts(model.spec, moe_layer_indices(hf_config)), options, model.version)


def _sources(rollout: RolloutConfig, model: Model, folder: Path) -> list[ServerSource]:
    if isinstance(rollout, ServerRolloutConfig):
        return [NamedServer(file, rollout.start_seconds) for file in rollout.server]
    assert isinstance(rollout, SGLangRolloutConfig)
    options = ServerOptions(
        model=model.folder,
        environment=rollout.environment,
        device=device_of(rollout.environment),
        tensor=rollout.tensor,
        dtype=rollout.dtype,
        max_running=rollout.max_running,
        max_pool_tokens=rollout.max_pool_tokens,
        vocab_size=model.spec.vocab_size,
        policy_version=model.version,
    )
    return [
        OwnServer(replace(options, first_device=i * rollout.tensor), folder / str(i), rollout.start_seconds)
        for i in range(rollout.servers)
    ]
