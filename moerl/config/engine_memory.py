"""Memory of an engine that samples: its weights, and the key-value cache of what it works on. Pure; any process.

An embedded engine keeps both on the GPU that the first trainer rank uses, too (`engine_bytes`): they have to fit from
the start. Prompts are not known yet; each slot is counted with room for `PROMPT_TOKENS` of them. All that follows is of
servers, and of an embedded engine on a CPU (`engine_needs`).

Shape legend: L = layers, t = tensor-parallel devices of a server, e = groups of them that share its experts, b = bytes
of an element.

**Weights** are split as SGLang splits them: attention, embedding and head over t, norms and routers whole; each of e
groups has an e-th of the experts, each cut over the t / e devices of the group.

**The cache of a token** on each device of a server:

    grouped heads      2 L ceil(key-value heads / t) head_dim b      keys and values; heads are repeated if t is more
    latent attention   L (kv_rank + rope_dim) b                      the compressed row, whole on every device

**The pool** is what a server's share of a device leaves next to its weights, or `rollout.max_pool_tokens`, if that is
less. A server with a smaller pool than all its responses need works on fewer of them at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moerl.config.rollouts import CPU_POOL_TOKENS, EmbeddedRolloutConfig, RolloutConfig, SGLangRolloutConfig
from moerl.config.training import TrainerConfig
from moerl.contract.parallel import ParallelDims
from moerl.errors import ConfigError
from moerl.machine.memory import USABLE_SHARE, rank_parameters, total_parameters
from moerl.models.description import ModelDescription
from moerl.tasks.registry import TaskConfig

OWN_SHARE = 0.8
"""Share of a GPU that SGLang takes for weights and pool if `rollout.memory_share` is null. Its own rule (0.5.21) keeps
some 13 GiB of 80 for activations and captured graphs, and depends on the GPU; this is a little less than it takes."""

EMBEDDED_ELEMENT_BYTES = 4
"""On a CPU the embedded engine emulates 16-bit formats in float32."""
PROMPT_TOKENS = 128
"""Room for a prompt in each slot; longer ones take more."""
PREFILL_TOKENS = 16384
"""Prompt tokens of one pass: as `moerl.rollout.schedule`."""
LOGIT_BYTES = 28
"""Bytes of a logit that is sampled from (`moerl.rollout.device_sampler`): itself in float32, scaled, and either its
order and two steps of its rank, or its exponential and two sums."""
SCORE_BYTES = 9
"""Bytes of a score of attention that is not fused: itself and its exponential in float32, and a mark."""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory that one engine needs."""

    weights_bytes: int
    """Weights on one device."""
    token_bytes: int
    """Cache of one token on one device."""
    longest: int
    """Tokens of the longest sequence that the run may sample, prompt included: the model, a microbatch and the longest
    prompt that the task lets through limit it."""
    side_by_side: int
    """Sequences that the engine is asked to work on together."""

    @property
    def asked_bytes(self) -> int:
        """Cache of one device for all sequences side by side, each as long as the longest."""
        return self.side_by_side * self.longest * self.token_bytes


def engine_needs(
    rollout: RolloutConfig, trainer: TrainerConfig, task: TaskConfig, sizes: ModelDescription
) -> EngineMemory:
    """Returns the needs of each server that a run starts, or of an embedded engine on a CPU."""
    tensor, expert = (rollout.tensor, rollout.expert) if isinstance(rollout, SGLangRolloutConfig) else (1, 1)
    is_embedded = isinstance(rollout, EmbeddedRolloutConfig)
    element = EMBEDDED_ELEMENT_BYTES if is_embedded or rollout.dtype == "float32" else 2
    dims = ParallelDims(tensor=tensor, expert=expert, expert_tensor=tensor // expert)
    parameters = rank_parameters(sizes, dims, 0)
    longest = [sizes.max_positions, trainer.microbatch_tokens]
    if task.longest_prompt is not None:
        longest.append(task.longest_prompt + rollout.max_new_tokens)
    return EngineMemory(
        weights_bytes=sum(parameters.values()) * element,
        token_bytes=cache_token_bytes(sizes, tensor, element),
        longest=min(longest),
        side_by_side=rollout.max_running,
    )


def cache_token_bytes(sizes: ModelDescription, tensor: int, element_bytes: int) -> int:
    """Returns the cache of one token on each of `tensor` devices of a server, in bytes."""
    if sizes.latent is not None:
        width = sizes.latent.kv_rank + sizes.latent.rope_dim
    else:
        width = 2 * -(-sizes.num_key_value_heads // tensor) * sizes.head_dim
    return sizes.num_layers * width * element_bytes


def server_share(rollout: SGLangRolloutConfig) -> float:
    """Returns the share of a GPU for a server's weights and pool."""
    return OWN_SHARE if rollout.memory_share is None else rollout.memory_share


def pool_tokens(rollout: SGLangRolloutConfig, engine: EngineMemory, gpu_bytes: float | None) -> int:
    """Returns the tokens that a server's pool holds; 0 if not even the weights fit.

    Args:
        gpu_bytes: memory of one GPU; None on CPUs: the pool then has a fixed size.
    """
    if gpu_bytes is None:
        return CPU_POOL_TOKENS if rollout.max_pool_tokens is None else rollout.max_pool_tokens
    room = int(server_share(rollout) * gpu_bytes) - engine.weights_bytes
    fits = max(0, room // engine.token_bytes)
    return fits if rollout.max_pool_tokens is None else min(fits, rollout.max_pool_tokens)


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options of an embedded engine on a device, without effect on a CPU."""

    record_steps: bool = True
    """True if decoding steps on a GPU are recorded as CUDA graphs, if the model's can be."""
    slot_tokens: int = 0
    """Tokens that each slot has room for from the start."""


def device_options(rollout: EmbeddedRolloutConfig) -> DeviceOptions:
    """Returns the options of the embedded engine; slots have room for a prompt and a response, in whole
    `PROMPT_TOKENS`."""
    return DeviceOptions(rollout.record_steps, PROMPT_TOKENS * (-(-rollout.max_new_tokens // PROMPT_TOKENS) + 1))


def engine_bytes(rollout: RolloutConfig, sizes: ModelDescription, *, on_ray: bool) -> dict[str, int]:
    """Returns the memory of the embedded engine on a device by purpose; nothing for other engines, for one on another
    node of a Ray cluster, and for 8 bits, which are emulated on the CPU.

    "prompts" is what the experts of a pass compute on the way, or the scores of attention if these are more: in float32
    no kernel fuses attention with grouped queries. Longer prompts than `PROMPT_TOKENS` have more scores.
    """
    if not isinstance(rollout, EmbeddedRolloutConfig) or on_ray or rollout.dtype == "float8":
        return {}
    element = 4 if rollout.dtype == "float32" else 2
    weights, rows = total_parameters(sizes) * element, -(-rollout.max_running // 8) * 8
    widths = 2 * sizes.hidden_size + 3 * sizes.moe_intermediate_size
    if sizes.latent is not None:
        head = sizes.latent.nope_dim + sizes.latent.rope_dim + sizes.latent.value_dim
        cached = sizes.num_attention_heads * head
    else:
        cached = 2 * sizes.num_key_value_heads * sizes.head_dim
    is_grouped = sizes.latent is None and sizes.num_key_value_heads != sizes.num_attention_heads
    scores = PROMPT_TOKENS * sizes.num_attention_heads * SCORE_BYTES * (is_grouped and element == 4)
    return {
        "weights": weights,
        "weights of an update": weights,
        "key-value cache": rows * device_options(rollout).slot_tokens * sizes.num_layers * cached * element,
        "logits": rows * sizes.vocab_size * LOGIT_BYTES,
        "prompts": PREFILL_TOKENS * max(sizes.experts_per_token * widths * element, scores),
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
