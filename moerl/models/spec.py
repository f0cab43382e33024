"""`ModelSpec` from a Hugging Face config: facts that trainer and engines each compute on their own, and compare.

Torch-free; any process. Reads a plain mapping (`config.to_dict()` or a parsed config.json), so that neither
side needs the other's libraries, and both get the same fingerprint from the same architecture and vocabulary size.
The keys of each model family's config stand in `moerl.models.families`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from moerl.contract.trajectory import ModelSpec
from moerl.errors import ConfigError
from moerl.models.families import FAMILIES
from moerl.models.family import Family, rope_parameters


def spec_from_hf_config(config: Mapping[str, Any]) -> ModelSpec:
    """Returns the model facts of the contract, with a fingerprint over the architecture.

    Args:
        config: Content of a Hugging Face config. `vocab_size` becomes V as it stands; if the embedding is
            padded beyond the tokenizer, replace it in the returned spec (`dataclasses.replace`).

    Raises:
        ConfigError: The architecture is not known, has no MoE layers, or a field is missing or impossible.
    """
    family = family_of(config)
    layers = moe_layer_indices(config)
    # transformers 5 writes some names that published checkpoints do not, for example `num_local_experts`.
    experts_key = next((name for name in family.num_experts if name in config), family.num_experts[0])
    num_experts = read_size(config, experts_key)
    experts_per_token = read_size(config, "num_experts_per_tok")
    if not layers:
        raise ConfigError(
            "model config: no MoE layer",
            seen={name: config.get(name) for name in _LAYER_RULES if name in config},
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
    facts = _facts(config, family) | {"num_experts": num_experts, "moe_layers": layers}
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return ModelSpec(
        num_moe_layers=len(layers),
        experts_per_token=experts_per_token,
        num_experts=num_experts,
        vocab_size=read_size(config, "vocab_size"),
        fingerprint=hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest(),
    )


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family of a config, by its `model_type`.

    Raises:
        ConfigError: moerl does not know the family.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(
            "model config: unknown mixture-of-experts architecture",
            seen=f"model_type={model_type!r}",
            expected=f"one of {sorted(FAMILIES)}",
            remedy="use a supported model, or add its family to moerl/models/families",
        )
    return family


def moe_layer_indices(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the indices of the decoder layers that are MoE layers, in order, by the rule of the config's family."""
    read_size(config, "num_hidden_layers")
    return family_of(config).moe_layers(config)


_MAX_SIZE = {"": 2**31 - 1, "num_hidden_layers": 2**16, "num_experts_per_tok": 2**16}
"""Largest value by key, "" for all sizes without one of their own; far above any model."""

_LAYER_RULES = ("num_hidden_layers", "decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace")


def _facts(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the facts that change the function a model computes; no training-only fields, dtypes or versions."""
    sizes = {name: read_size(config, name) for name in family.sizes}
    optional = {name: config.get(name) for name in family.optional_sizes}
    switches = {name: bool(config.get(name, default)) for name, default in family.switches.items()}
    numbers = {name: float(config.get(name, default)) for name, default in family.numbers.items()}
    if "kv_lora_rank" in sizes:
        # With latent attention `head_dim` means one thing or another, and the sizes of its parts count.
        head_size = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    else:
        head_size = config.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    return {
        **sizes,
        **optional,
        **switches,
        **numbers,
        "model_type": config["model_type"],
        "vocab_size": read_size(config, "vocab_size"),
        "num_hidden_layers": read_size(config, "num_hidden_layers"),
        "head_dim": head_size,
        "hidden_act": config.get("hidden_act", "silu"),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "sliding_window": config.get("sliding_window") if config.get("use_sliding_window") else None,
        "rope": rope_parameters(config),
    }


def read_size(
    config: Mapping[str, Any],
    name: str,
    least: int = 1,
    *,
    origin: str = "model config",
    remedy: str = "correct the model config",
) -> int:
    """Returns an integer of a config. Raises `ConfigError`, whose text begins with `origin`, if it is not from `least`
    to the largest value of its key."""
    value, most = config.get(name), _MAX_SIZE.get(name, _MAX_SIZE[""])
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        seen, expected = f"{value!r:.200}", f"an integer from {least} to {most}"
        raise ConfigError(f"{origin}: {name}", seen=seen, expected=expected, remedy=remedy)
    return value
