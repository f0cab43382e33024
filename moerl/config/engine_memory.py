"""Memory of an embedded engine on the GPU that the first trainer rank uses, too. Pure, torch-free; the controller.

On one device both have to fit from the start: the engine keeps its weights and its key-value cache while the trainer
works. Prompts are not known yet; each slot is counted with room for `PROMPT_TOKENS` of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from moerl.config.rollouts import EmbeddedRolloutConfig, RolloutConfig
from moerl.errors import ConfigError
from moerl.machine.memory import USABLE_SHARE, total_parameters
from moerl.models.description import ModelDescription

PROMPT_TOKENS = 128
"""Room for a prompt in each slot; longer ones take more."""
PREFILL_TOKENS = 16384
"""Prompt tokens of one pass: as `moerl.rollout.schedule`."""
LOGIT_BYTES = 24
"""Bytes of a logit that is sampled from: itself in float32, its rank, its exponential and their sums."""
_GIB = 2**30


def engine_bytes(rollout: RolloutConfig, sizes: ModelDescription, *, on_ray: bool) -> dict[str, int]:
    """Returns the memory of the embedded engine on a device by purpose; nothing for other engines, for one on another
    node of a Ray cluster, and for 8 bits, which are emulated on the CPU."""
    if not isinstance(rollout, EmbeddedRolloutConfig) or on_ray or rollout.dtype == "float8":
        return {}
    element = 4 if rollout.dtype == "float32" else 2
    weights, rows = total_parameters(sizes) * element, -(-rollout.max_running // 8) * 8
    widths = 2 * sizes.hidden_size + 3 * sizes.moe_intermediate_size
    return {
        "weights": weights,
        "weights of an update": weights,
        "key-value cache": rows * (rollout.max_new_tokens + PROMPT_TOKENS) * _cached_numbers(sizes) * element,
        "logits": rows * sizes.vocab_size * LOGIT_BYTES,
        "prompts": PREFILL_TOKENS * sizes.experts_per_token * widths * element,
    }


def shared_device_error(engine: Mapping[str, int], rank_bytes: int, device_bytes: float) -> ConfigError:
    """Returns the error of an embedded engine that does not fit on its device.

    Args:
        engine: memory by purpose, from `engine_bytes`.
        rank_bytes: memory of the trainer rank on the same device; 0 = none.
        device_bytes: memory of the device.
    """
    parts = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in engine.items())
    trainer = f"a trainer rank with {rank_bytes / _GIB:.1f} GiB and " if rank_bytes else ""
    ways = ["rollout.max_running", "rollout.max_new_tokens"] + ["trainer.microbatch_tokens"] * bool(rank_bytes)
    more = ", trainer.recompute=full, more devices (`moerl plan memory` shows layouts)" if rank_bytes else ""
    usable = USABLE_SHARE * device_bytes
    return ConfigError(
        "rollout: the embedded engine does not fit on its GPU" + (", together with the trainer" if rank_bytes else ""),
        seen=f"{trainer}an engine with {sum(engine.values()) / _GIB:.1f} GiB ({parts})",
        expected=f"at most {usable / _GIB:.1f} GiB together, {USABLE_SHARE:.0%} of {device_bytes / _GIB:.1f} GiB",
        remedy=f"lower {', '.join(ways)}{more}, or take servers on GPUs of their own: rollout=sglang",
    )


def _cached_numbers(sizes: ModelDescription) -> int:
    """Counts the numbers of a token in the cache, of all layers."""
    if sizes.latent is not None:
        width = sizes.latent.nope_dim + sizes.latent.rope_dim + sizes.latent.value_dim
        return sizes.num_layers * sizes.num_attention_heads * width
    return sizes.num_layers * 2 * sizes.num_key_value_heads * sizes.head_dim
