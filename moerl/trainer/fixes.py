"""Corrections of megatron-core 0.19.2 that hold on every device; each says what it corrects and when it can go.

Runs in every trainer rank, once, before a model is built.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor


def apply() -> None:
    """Installs the corrections; idempotent."""
    router: Any = importlib.import_module("megatron.core.transformer.moe.router")
    if not hasattr(router.get_tokens_per_expert_and_token_count, "__wrapped__"):
        router.get_tokens_per_expert_and_token_count = _count_local_tokens(router.get_tokens_per_expert_and_token_count)
    attention: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention").MLASelfAttention
    if not hasattr(attention._qkv_down_projection, "__wrapped__"):
        attention._qkv_down_projection = _slice_latents(attention._qkv_down_projection)


def _count_local_tokens(original: Any) -> Any:
    """The load-balancing loss with a padding mask counts local tokens after summing them, in place, over the group,
    and divides by a count that is 0 where every row is padding.

    With tensor parallelism of size n its gradient came out n times too large, and a microbatch of pad rows alone made
    every router's gradient NaN. Goes when `get_tokens_per_expert_and_token_count` counts before it reduces and the
    loss of no token is 0.
    """

    @functools.wraps(original)
    def count(routing_map: Tensor, reduce_group: Any, topk: int, with_padding_mask: bool = False) -> Any:
        per_expert, local, total = original(routing_map, reduce_group, topk, with_padding_mask)
        if not with_padding_mask:
            return per_expert, local, total
        return per_expert, routing_map.sum() / topk, total.clamp(min=1)

    return count


def _slice_latents(original: Any) -> Any:
    """Latent attention with column-parallel down projections loses gradient of the rotary key under tensor parallelism.

    Every head uses that key, so the gradients of all ranks' heads have to be added up; the gather over columns that
    comes before it only cuts its own rank's. With latents sliced along the sequence, as Transformer Engine's layers
    make them, Megatron gathers the key in a way that adds. Goes when the key passes a reducing gather in both layouts.
    """

    @functools.wraps(original)
    def project(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        from megatron.core.tensor_parallel.mappings import (
            gather_from_tensor_model_parallel_region,
            scatter_to_sequence_parallel_region,
        )

        query, key_value = original(self, hidden_states)
        is_sharded = key_value.size(-1) != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        if is_sharded and self.config.sequence_parallel:
            key_value = scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(key_value))
        return query, key_value

    return project
