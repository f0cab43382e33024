"""The engines that must keep the promises of the rollout port, their tiny model, and plain transformers as the judge.

An engine joins by a function in `ENGINES` that builds one, holding the weights of `subject.model(0)` as version 0. The
model ties its embeddings, pads them beyond the vocabulary, and names tokens for the beginning and the end of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pytest
import sglang_live
import torch
from full_updates import send
from sglang_reference import PARAMS
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moerl.contract.ports import PolicyEngine, RolloutRequest
from moerl.contract.trajectory import Lineage, ModelSpec, Trajectory
from moerl.models.spec import moe_layer_indices, spec_from_hf_config
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.engine_process.engine import ProcessEngine
from moerl.rollout.engine_process.local import LocalProcess
from moerl.rollout.engine_process.messages import StartEngine
from moerl.rollout.fleet.backend import ModelFacts

V = 61
BOS, EOS = 1, 2
ADDED = (57, 58, 59, 60)
"""Ids of tokens that were added to the vocabulary; the last ones."""
MAX_POSITIONS = 256
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


class Engine(PolicyEngine, Protocol):
    """unfinished: rollout ids of the latest call that yielded no record."""

    unfinished: list[str]


Build = Callable[..., Engine]
"""Builds an engine by its number of slots, 16 by default."""


@dataclass(frozen=True)
class Subject:
    """An engine under test. dense_layers: of its model; SGLang builds experts there, whatever the config says."""

    make: Callable[[Subject, pytest.FixtureRequest, int], Engine]
    dense_layers: tuple[int, ...]

    @property
    def config(self) -> Qwen3MoeConfig:
        return Qwen3MoeConfig(**_SIZES, mlp_only_layers=list(self.dense_layers))

    @property
    def spec(self) -> ModelSpec:
        return replace(spec_from_hf_config(self.config.to_dict()), vocab_size=V)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return moe_layer_indices(self.config.to_dict())

    def model(self, seed: int) -> Qwen3MoeForCausalLM:
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(self.config).eval()


def _embedded(subject: Subject, request: pytest.FixtureRequest, max_running: int) -> Engine:
    model = subject.model(0)
    return EmbeddedEngine(model, subject.spec, engine_id="embedded-0", max_running=max_running, policy_version=0)


def _process(subject: Subject, request: pytest.FixtureRequest, max_running: int) -> Engine:
    folder = request.getfixturevalue("tmp_path")
    subject.model(0).save_pretrained(folder / "model")
    start = StartEngine(str(folder / "model"), "float32", subject.spec, max_running, num_threads=1, version=0)
    return ProcessEngine(start, LocalProcess(folder / "engine.log"))


def _sglang(subject: Subject, request: pytest.FixtureRequest, max_running: int) -> Engine:
    tensors = {name: tensor for name, tensor in checkpoint(subject.model(0)) if name not in TIED}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    endpoint = request.getfixturevalue("sglang_server").endpoint
    model = ModelFacts(subject.spec, subject.moe_layers)
    engine = sglang_live.connect(endpoint, model=model, version=-1, max_running=max_running, shapes=shapes, tied=TIED)
    send(engine, 0, tensors)
    return engine


ENGINES = {"embedded": Subject(_embedded, (1,)), "process": Subject(_process, (1,)), "sglang": Subject(_sglang, ())}


def make_requests(count: int, max_new_tokens: int = 12, stop_ids: tuple[int, ...] = (3,)) -> list[RolloutRequest]:
    """Prompts of 1 to 13 tokens, every kind of sampling in turn, seeds from 100 on."""
    rng = np.random.default_rng(11)
    return [
        RolloutRequest(
            Lineage(f"r{i}", f"p{i // 2}", f"g{i // 2}"),
            tuple(int(t) for t in rng.integers(0, V, rng.integers(1, 14))),
            replace(PARAMS[i % len(PARAMS)], seed=100 + i),
            max_new_tokens + i % 5,
            stop_ids,
        )
        for i in range(count)
    ]


def collect(engine: PolicyEngine, requests: list[RolloutRequest]) -> dict[str, Trajectory]:
    records = list(engine.generate(requests))
    assert len(records) == len({record.rollout_id for record in records})
    return {record.rollout_id: Trajectory(**record.values) for record in records}


@torch.no_grad()
def forward(model: Qwen3MoeForCausalLM, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits float64 [S, V] and sorted expert ids [S, L, K] of one full forward pass of plain transformers."""
    output: Any = model(torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True)
    experts = torch.stack([layer.topk(2, -1).indices.sort(-1).values for layer in output.router_logits], 1)
    return output.logits[0, :, :V].double().numpy(), experts.numpy()


def require_routes(trajectory: Trajectory, model: Qwen3MoeForCausalLM) -> None:
    """The recorded routes are those of one full forward pass over exactly these tokens."""
    _, experts = forward(model, trajectory.token_ids)
    assert np.array_equal(np.sort(trajectory.expert_ids, -1), experts[:-1])


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def require_scores(trajectory: Trajectory, model: Qwen3MoeForCausalLM) -> None:
    """The recorded log-probs and kept masses of all turns are those of one full forward pass over these tokens."""
    logits, _ = forward(model, trajectory.token_ids)
    for turn in trajectory.turns:
        if turn.sampling is None or turn.sampling.is_greedy:
            continue
        full = log_softmax(logits / turn.sampling.temperature)
        for t in range(turn.start, turn.end):
            both = trajectory.rollout_logprobs[t] + trajectory.kept_logmass[t]
            assert both == pytest.approx(full[t - 1, trajectory.token_ids[t]], abs=1e-5)
            kept = trajectory.kept.ids[trajectory.kept.offsets[t] : trajectory.kept.offsets[t + 1]]
            if trajectory.truncated[t]:
                mass = np.log(np.exp(full[t - 1, kept]).sum())
                assert trajectory.kept_logmass[t] == pytest.approx(mass, abs=1e-5)


def require_same(first: dict[str, Trajectory], second: dict[str, Trajectory]) -> None:
    """Tokens, routes, kept sets and log-probs agree."""
    assert first.keys() == second.keys()
    for rollout_id, one in first.items():
        other = second[rollout_id]
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.array_equal(np.sort(one.expert_ids, -1), np.sort(other.expert_ids, -1))
        assert np.array_equal(one.kept.ids, other.kept.ids)
        np.testing.assert_allclose(one.rollout_logprobs, other.rollout_logprobs, atol=1e-5)


def checkpoint(model: Qwen3MoeForCausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors under checkpoint names: one per expert and projection."""
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, (gate, up) in enumerate(part.chunk(2) for part in tensor):
                yield f"{prefix}{expert}.gate_proj.weight", gate
                yield f"{prefix}{expert}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            for expert, part in enumerate(tensor):
                yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", part
        else:
            yield name, tensor
