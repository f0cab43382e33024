"""Models with random weights and trajectories of long-tailed lengths for the trainer benchmarks.

Trajectories carry the routes that the model itself takes (`with_routes`), so that replaying them moves no work between
experts, and kept sets of nucleus sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moerl.contract.batch import TrainSample
from moerl.contract.trajectory import (
    FinishReason,
    KeptSets,
    Lineage,
    ModelSpec,
    SamplingParams,
    Trajectory,
    Turn,
    TurnKind,
)
from moerl.models.description import ModelDescription, describe

SAMPLING = SamplingParams(temperature=1.0, top_p=0.95, top_k=64)
MEAN_KEPT = 12
"""Mean size of a kept set; sizes fall geometrically, as those of a sharp model's nuclei do."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A Qwen3-MoE without dense layers."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    expert_width: int
    vocab: int

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(self.layers, self.experts_per_token, self.experts, self.vocab, fingerprint="bench")

    @property
    def described(self) -> ModelDescription:
        return describe_qwen3_moe(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.head_dim,
            num_experts=self.experts,
            num_experts_per_tok=self.experts_per_token,
            moe_intermediate_size=self.expert_width,
            vocab_size=self.vocab,
        )


def describe_qwen3_moe(**sizes: int) -> ModelDescription:
    """A Qwen3-MoE without dense layers."""
    config = {"model_type": "qwen3_moe", "intermediate_size": 1, "max_position_embeddings": 4096, "rope_theta": 1e6}
    return describe(config | sizes, "bench")


def write_model(
    sizes: Sizes, folder: Path, *, dtype: torch.dtype, device: str, initializer_range: float = 0.02
) -> Path:
    """Saves a model with random weights in Hugging Face format. initializer_range: their standard deviation."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.expert_width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_value_heads,
        head_dim=sizes.head_dim,  # pyright: ignore[reportCallIssue] - accepted through kwargs
        moe_intermediate_size=sizes.expert_width,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.experts_per_token,
        norm_topk_prob=True,
        max_position_embeddings=32768,
        initializer_range=initializer_range,
    )
    torch.manual_seed(1)
    with torch.device(device):
        model: Any = Qwen3MoeForCausalLM(config)
    model.to(dtype).save_pretrained(folder)
    return folder


def long_tailed_lengths(num_rows: int, mean: float, longest: int, seed: int) -> list[int]:
    """Tokens of trajectories: log-normal (sigma 1) with about this mean, cut at `longest`, of `num_rows` in all."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    left = num_rows
    while left > 8:
        drawn = int(np.clip(rng.lognormal(np.log(mean) - 0.5, 1.0), 8, longest))
        lengths.append(min(drawn, left))
        left -= lengths[-1]
    return lengths


def make_samples(spec: ModelSpec, lengths: Sequence[int], seed: int) -> list[TrainSample]:
    """Trajectories of these many rows, a quarter of each prompt; routes are random until `with_routes`."""
    rng = np.random.default_rng(seed)
    samples = []
    for index, rows in enumerate(lengths):
        trajectory = _trajectory(rng, spec, rows + 1, f"rollout-{index}")
        advantages = rng.standard_normal(rows + 1).astype(np.float32) * trajectory.sampled
        samples.append(TrainSample(trajectory, advantages))
    return samples


def with_routes(samples: Sequence[TrainSample], routes: Sequence[NDArray[np.integer]]) -> list[TrainSample]:
    """The samples with these experts, [S - 1, L, K] each, as captured."""
    return [
        replace(
            sample, trajectory=replace(sample.trajectory, expert_ids=own.astype(sample.trajectory.spec.expert_dtype))
        )
        for sample, own in zip(samples, routes, strict=True)
    ]


def _trajectory(rng: np.random.Generator, spec: ModelSpec, num_tokens: int, rollout_id: str) -> Trajectory:
    num_prompt = max(1, num_tokens // 4)
    sampled = np.arange(num_tokens) >= num_prompt
    token_ids = rng.integers(0, spec.vocab_size, num_tokens, dtype=np.int32)
    kept = _kept_sets(rng, token_ids, sampled, spec.vocab_size)
    alone = kept.sizes == 1
    logprobs = np.where(sampled & ~alone, -rng.exponential(1.0, num_tokens), 0.0)
    ranked = rng.random((num_tokens - 1, spec.num_moe_layers, spec.num_experts), dtype=np.float32).argsort(axis=2)
    return Trajectory(
        spec=spec,
        lineage=Lineage(rollout_id, f"prompt-of-{rollout_id}", f"group-of-{rollout_id}"),
        turns=(Turn(0, num_prompt, TurnKind.PROMPT), Turn(num_prompt, num_tokens, TurnKind.SAMPLED, SAMPLING)),
        token_ids=token_ids,
        sampled=sampled,
        rollout_logprobs=logprobs.astype(np.float32),
        kept_logmass=np.where(sampled, -rng.exponential(0.02, num_tokens), 0.0).astype(np.float32),
        policy_versions=np.where(sampled, 0, -1).astype(np.int32),
        expert_ids=np.ascontiguousarray(ranked[:, :, : spec.experts_per_token].astype(spec.expert_dtype)),
        routed=np.ones(num_tokens - 1, np.bool_),
        kept=kept,
        truncated=sampled.copy(),
        finish_reason=FinishReason.STOP,
    )


def _kept_sets(
    rng: np.random.Generator, token_ids: NDArray[np.int32], sampled: NDArray[np.bool_], vocab_size: int
) -> KeptSets:
    rows = [np.zeros(0, np.int32)] * len(token_ids)
    limit = SAMPLING.effective_top_k
    assert limit is not None
    for t in sampled.nonzero()[0]:
        others = rng.integers(0, vocab_size, min(int(rng.geometric(1 / MEAN_KEPT)), limit) - 1)
        rows[t] = np.union1d(others, token_ids[t : t + 1]).astype(np.int32)
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    return KeptSets(offsets, np.concatenate(rows))
