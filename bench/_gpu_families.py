"""Forced experts and kept sets of four families against transformers. A check of `gpu_check.py`.

Small models with random weights, random experts for every token and layer, and random kept sets: log-probs of the
policy, proved, against those of transformers in float64 on the same weights. In bfloat16 the limit is that of
`_gpu_models.py`; in float32 products on a GPU are TF32's unless `NVIDIA_TF32_OVERRIDE=0` is set.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _gpu_checks import Findings, keep
from _gpu_models import apart_results, replays, sampled_logprobs
from _gpu_parity import replayed_logprobs
from _ranks import as_only_rank
from _report import Result
from _samples import long_tailed_lengths, make_samples
from _steps import make_trainer
from numpy.typing import NDArray

from moerl.contract.batch import TrainSample
from moerl.contract.parallel import RankCoordinates
from moerl.contract.trajectory import ModelSpec
from moerl.models.description import read_model

FLOAT32_LIMITS = {"cuda": 2e-2, "cpu": 1e-4}
"""Nats at most; with TF32's products on a GPU (chosen: 2e-3 to 4e-3 were seen)."""
ROWS = {"cuda": 2048, "cpu": 96}
ROW_BUDGET = {"cuda": 512, "cpu": 64}

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "moe_intermediate_size": 128,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
    ),
    "OLMoE": ("OlmoeConfig", {"num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 4}),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 128,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
        },
    ),
    "GLM-4.5": (
        "Glm4MoeConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "moe_intermediate_size": 128,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
}
"""By name: transformers' class of the config, and its settings."""


def check(device: str) -> Findings:
    results: list[Result] = []
    for name, (config_class, settings) in FAMILIES.items():
        results += _family(name, config_class, settings, device)
        keep(Findings(list(results)))
    return Findings(results)


def _family(name: str, config_class: str, settings: Mapping[str, Any], device: str) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), config_class, settings)
        model = read_model(Path(folder))
        lengths = long_tailed_lengths(ROWS[device], ROWS[device] / 12, ROW_BUDGET[device] - 2, seed=7)
        samples = make_samples(model.spec, lengths, seed=8)
        trajectories = [sample.trajectory for sample in samples]
        ours = as_only_rank(_policy, Path(folder), model.spec, samples, ROW_BUDGET[device])
        exact, half = (
            sampled_logprobs(trajectories, [each.logprobs for each in replays(model, trajectories, dtype, device)])
            for dtype in (torch.float64, torch.bfloat16)
        )
    single, rounded = (sampled_logprobs(trajectories, ours[dtype]) for dtype in ("float32", "bfloat16"))
    largest, limit = float(np.abs(single - exact).max()), FLOAT32_LIMITS[device]
    return [
        Result(f"{name}, float32: largest distance to float64", largest, f"<= {limit:g}", largest <= limit, "nats"),
        Result(f"{name}, float32: mean distance to float64", float(np.abs(single - exact).mean()), unit="nats"),
        *(each for each in apart_results(name, rounded, half, exact, exact_in="float64") if each.name.startswith(name)),
    ]


def _policy(
    layout: RankCoordinates, folder: Path, spec: ModelSpec, samples: Sequence[TrainSample], budget: int
) -> dict[str, list[NDArray[np.float64]]]:
    """Log-probs by dtype of the policy; a model at a time."""
    return {
        dtype: replayed_logprobs(make_trainer(layout, folder, spec, dtype), samples, budget)
        for dtype in ("float32", "bfloat16")
    }


def _write(folder: Path, config_class: str, settings: Mapping[str, Any]) -> None:
    """A model with random weights in bfloat16, which float32 and float64 have, too; norms and biases are random."""
    import transformers

    torch.manual_seed(2)
    config = getattr(transformers, config_class)(**{**_COMMON, **settings})
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    model.to(torch.bfloat16).save_pretrained(folder)
