"""`ModelSpec` from a Hugging Face config: what trainer and engines each compute on their own, and compare.

Torch-free; any process. Reads a plain mapping (`config.to_dict()` or a parsed config.json), so that neither
side needs the other's libraries, and both get the same fingerprint from the same architecture and vocabulary size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from moerl.contract.trajectory import ModelSpec
from moerl.errors import ConfigError

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
_SWITCHES = ("attention_bias", "tie_word_embeddings", "norm_topk_prob")
"""Switches that are off where a config leaves them out."""


def spec_from_hf_config(config: Mapping[str, Any]) -> ModelSpec:
    """The model facts of the contract, with a fingerprint over the architecture.

    Args:
        config: Content of a Hugging Face config. `vocab_size` becomes V as it stands; where the embedding is
            padded beyond the tokenizer, replace it in the returned spec (`dataclasses.replace`).

    Raises:
        ConfigError: The architecture is not known, has no MoE layers, or a field is missing or impossible.
    """
    model_type = config.get("model_type")
    describe = _ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if describe is None:
        raise ConfigError(
            "model config: unknown mixture-of-experts architecture",
            seen=f"model_type={model_type!r}",
            expected=f"one of {sorted(_ARCHITECTURES)}",
            remedy="use a supported model, or add its layer rule to moerl/contract/spec.py",
        )
    return describe(config)


def moe_layer_indices(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Indices of the decoder layers that are MoE layers, in order, by the rule of Qwen3-MoE.

    Layer i is MoE where i is not in `mlp_only_layers` and (i + 1) is a multiple of `decoder_sparse_step`.
    """
    step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    num_layers = _positive(config, "num_hidden_layers")
    return tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)


def _qwen3_moe(config: Mapping[str, Any]) -> ModelSpec:
    layers = moe_layer_indices(config)
    # transformers 5 writes `num_local_experts`, published checkpoints say `num_experts`.
    experts_key = "num_experts" if "num_experts" in config else "num_local_experts"
    num_experts = _positive(config, experts_key)
    experts_per_token = _positive(config, "num_experts_per_tok")
    if not layers:
        raise ConfigError(
            "model config: no MoE layer",
            seen=f"decoder_sparse_step={config.get('decoder_sparse_step')}, "
            f"mlp_only_layers={config.get('mlp_only_layers')}",
            expected="at least one layer with experts",
            remedy="use a mixture-of-experts model",
        )
    if experts_per_token > num_experts:
        raise ConfigError(
            "model config: num_experts_per_tok",
            seen=experts_per_token,
            expected=f"at most {experts_key}={num_experts}",
            remedy="correct the model config",
        )
    return ModelSpec(
        num_moe_layers=len(layers),
        experts_per_token=experts_per_token,
        num_experts=num_experts,
        vocab_size=_positive(config, "vocab_size"),
        fingerprint=_fingerprint(_facts(config) | {"num_experts": num_experts, "moe_layers": layers}),
    )


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What changes the function a Qwen3-MoE model computes. Not training-only fields, dtypes or versions."""
    sizes = {name: _positive(config, name) for name in _SIZES}
    switches = {name: bool(config.get(name)) for name in _SWITCHES}
    return {
        **sizes,
        **switches,
        "model_type": config["model_type"],
        "vocab_size": _positive(config, "vocab_size"),
        "num_hidden_layers": _positive(config, "num_hidden_layers"),
        "head_dim": config.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"],
        "hidden_act": config.get("hidden_act", "silu"),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "sliding_window": config.get("sliding_window") if config.get("use_sliding_window") else None,
        "rope": _rope(config),
    }


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters in one shape: transformers 5 nests them, 4 had `rope_theta` at the top."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    if not isinstance(theta, int | float):
        raise ConfigError(
            "model config: rope_theta",
            seen=theta,
            expected="a number, at the top level or in rope_parameters",
            remedy="correct the model config",
        )
    return {**rope, "rope_theta": float(theta)}


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"model config: {name}",
            seen=value,
            expected="an integer of at least 1",
            remedy="correct the model config",
        )
    return value


def _fingerprint(facts: Mapping[str, Any]) -> str:
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()


_ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], ModelSpec]] = {"qwen3_moe": _qwen3_moe}
