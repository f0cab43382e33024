"""Tiny models of every family, and transformers as the judge of what the trainer computes with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from factories import FULL, make_trajectory
from torch import Tensor, nn

from moerl.contract.batch import TrainSample
from moerl.contract.trajectory import ModelSpec
from moerl.models.spec import spec_from_hf_config

# The vocabulary is odd: tensor parallelism has to pad it. Four layers go onto two pipeline stages.
_COMMON: dict[str, Any] = {
    "vocab_size": 91,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 48,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_QWEN_YARN = {name: _YARN[name] for name in ("rope_type", "rope_theta", "factor", "original_max_position_embeddings")}


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """One tiny model: its transformers config class and the settings that differ from the common ones.

    scores: how a router turns logits into weights of chosen experts.
    """

    name: str
    config_class: str
    settings: Mapping[str, Any]
    scores: str = "softmax"

    def config(self, **changes: Any) -> Any:
        import transformers

        return getattr(transformers, self.config_class)(**{**_COMMON, **self.settings, **changes})

    def spec(self) -> ModelSpec:
        return spec_from_hf_config(self.config().to_dict())


_QWEN3 = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_GLM = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_OLMOE = {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2}
FAMILIES = {
    family.name: family
    for family in (
        TinyFamily("qwen3_moe", "Qwen3MoeConfig", _QWEN3),
        TinyFamily("qwen3_moe-unnormalised", "Qwen3MoeConfig", _QWEN3 | {"norm_topk_prob": False}),
        TinyFamily("qwen3_moe-dense", "Qwen3MoeConfig", _QWEN3 | {"mlp_only_layers": [1]}),
        TinyFamily("qwen3_moe-yarn", "Qwen3MoeConfig", _QWEN3 | {"rope_parameters": _QWEN_YARN}),
        TinyFamily("deepseek_v3", "DeepseekV3Config", _LATENT, "sigmoid"),
        TinyFamily("deepseek_v3-yarn", "DeepseekV3Config", _LATENT | {"rope_parameters": _YARN}, "sigmoid"),
        TinyFamily(
            "deepseek_v3-flat",
            "DeepseekV3Config",
            _LATENT | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
            "sigmoid",
        ),
        TinyFamily("glm4_moe", "Glm4MoeConfig", _GLM | {"use_qk_norm": True, "attention_bias": True}, "sigmoid"),
        TinyFamily("glm4_moe-air", "Glm4MoeConfig", _GLM | {"use_qk_norm": False, "attention_bias": True}, "sigmoid"),
        TinyFamily("olmoe", "OlmoeConfig", _OLMOE),
        TinyFamily("olmoe-normalised", "OlmoeConfig", _OLMOE | {"norm_topk_prob": True}),
    )
}


def write_model(path: Path, family: TinyFamily, *, seed: int, **changes: Any) -> Path:
    """Saves a model with random weights, norms, biases and expert biases included, in Hugging Face format."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(family.config(**changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    model.save_pretrained(path)
    return path


def make_samples(spec: ModelSpec, seed: int, lengths: Sequence[int]) -> list[TrainSample]:
    """Trajectories of these lengths with random routes, sampled from the full vocabulary."""
    rng = np.random.default_rng(seed)
    samples = []
    for i, length in enumerate(lengths):
        trajectory = make_trajectory(
            rng,
            spec,
            num_prompt=length // 3,
            num_sampled=length - length // 3,
            sampling=FULL,
            rollout_id=f"rollout-{seed}-{i}",
        )
        advantages = rng.standard_normal(length).astype(np.float32)
        samples.append(TrainSample(trajectory, advantages * trajectory.sampled))
    return samples


class Judge:
    """transformers on the same weights, one sequence at a time, optionally with enforced routes.

    The inputs of every layer's experts are looked at, and replaced where routes are enforced: weights are then
    computed here, from the router's own logits, by the definition of the family.
    """

    def __init__(self, path: Path, family: TinyFamily) -> None:
        from transformers import AutoModelForCausalLM

        self.family = family
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.model.set_experts_implementation("eager")
        self._routes: np.ndarray | None = None
        self._chosen: list[Tensor] = []
        self.router_logits: list[Tensor] = []
        blocks = [layer.mlp for layer in self.model.model.layers if hasattr(layer.mlp, "experts")]
        for index, block in enumerate(blocks):
            block.experts.register_forward_pre_hook(self._hook(block.gate, index))

    def _hook(self, gate: Any, layer: int) -> Any:
        def replace(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, chosen, weights = inputs
            logits = nn.functional.linear(hidden.float(), gate.weight.float())
            if self._routes is not None:
                chosen = torch.from_numpy(self._routes[:, layer].astype(np.int64))
                weights = self._weights(logits, chosen)
            self.router_logits.append(logits)
            self._chosen.append(chosen)
            return hidden, chosen, weights

        return replace

    def _weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        config = self.model.config
        scores = logits.sigmoid() if self.family.scores == "sigmoid" else logits.softmax(-1)
        weights = scores.gather(1, chosen)
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * getattr(config, "routed_scaling_factor", 1.0)

    def logits(self, input_ids: np.ndarray, routes: np.ndarray | None = None) -> Tensor:
        """[T, V] logits of one sequence; `routes` [T, L, K] are enforced where given."""
        self._routes, self._chosen, self.router_logits = routes, [], []
        ids = torch.from_numpy(input_ids.astype(np.int64))[None]
        return self.model(input_ids=ids, use_cache=False).logits[0]

    def routes(self, input_ids: np.ndarray) -> np.ndarray:
        """[T, L, K] what the routers of one sequence choose by themselves."""
        with torch.no_grad():
            self.logits(input_ids)
        return self.chosen().numpy()

    def chosen(self) -> Tensor:
        """[T, L, K] the experts of the latest pass, enforced or not."""
        return torch.stack(self._chosen, 1)

    def gradients(self) -> dict[str, np.ndarray]:
        return {name: p.grad.numpy() for name, p in self.model.named_parameters() if p.grad is not None}
