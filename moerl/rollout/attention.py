"""Attention of the embedded engine: grouped-query attention that never repeats the key-value cache.

Runs inside the embedded rollout engine, registered with transformers under `ATTENTION`. The stock sdpa function
repeats keys and values for every query head when there is a mask, which copies the whole cache at every step.
Shape legend: N = rows, H = query heads, G = key-value heads, Q = query tokens, T = tokens of the mask, C = tokens that
the cache has room for, at least T; D = head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import AttentionInterface

from moerl.errors import EngineError
from moerl.rollout.independent_rows import attention, is_for_kernels

ATTENTION = "moerl_grouped_query"


def grouped_query_attention(
    module: nn.Module,
    query_NHQD: Tensor,
    key_NGCD: Tensor,
    value_NGCD: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes softmax(q k^T * scaling + mask) v, by the attention interface of transformers.

    Args:
        module: the attention layer; not read.
        attention_mask: bool, broadcastable to [N, H, Q, T]; True where a query sees a key. Each sees the first ones
            (`decode_mask`); several queries are a whole prompt, whose mask is causal (`prefill_mask`).
        options: `scaling` is read; dropout is for training, and models with sliding windows are refused.

    Returns:
        [N, Q, H, D], and None in place of attention weights.

    Raises:
        EngineError: There is no mask: transformers builds none for this function, and without one tokens would see
            their future.
    """
    if attention_mask is None:
        raise EngineError(
            "embedded engine: attention without a mask",
            expected="the explicit mask of the engine's own passes",
            remedy="this model, or one that shares its config object, was called directly; load a model of its own",
        )
    num_rows, num_heads, num_queries, head_size = query_NHQD.shape
    scaling = options.get("scaling")
    if is_for_kernels(query_NHQD):
        seen_NQ = attention_mask.sum(-1)[:, 0].expand(num_rows, num_queries)
        scale = head_size**-0.5 if scaling is None else scaling
        return attention(query_NHQD, key_NGCD, value_NGCD, seen_NQ, scale), None
    num_tokens = attention_mask.shape[-1]
    keys, values = key_NGCD[:, :, :num_tokens], value_NGCD[:, :, :num_tokens]
    if num_queries == 1:
        # The query heads of a group become the queries of one head: the mask is the same for all of them.
        grouped = query_NHQD.reshape(num_rows, key_NGCD.shape[1], -1, head_size)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=attention_mask, scale=scaling)
        # With latent attention values are not as wide as queries and keys.
        return out.reshape(num_rows, 1, num_heads, values.shape[-1]), None
    # A device's fast kernels refuse a mask; with one, all scores of grouped queries would lie in memory.
    assert num_queries == num_tokens == key_NGCD.shape[2]
    out = scaled_dot_product_attention(query_NHQD, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def attend_without_cudnn() -> None:
    """Keeps cuDNN out of torch's `scaled_dot_product_attention`, in the whole process.

    torch prefers cuDNN on GPUs of compute capability 9 and 10. It makes a plan for every new shape, and nearly every
    prefill has one; with version 9.20 it decodes wrongly on a B200, without an error (pytorch issue 193893). A trainer
    in the same process does not miss it: on a GPU it attends by Transformer Engine.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def prefill_mask(length: int, device: torch.device) -> Tensor:
    """Returns bool [1, 1, P, P], causal. Prompts are padded on the right, so no real token ever sees a pad."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_()[None, None]


def decode_mask(positions_N: Tensor, length: int) -> Tensor:
    """Returns bool [N, 1, 1, T]: row n sees its own cached tokens 0..positions_N[n]."""
    keys_T = torch.arange(length, device=positions_N.device)
    return (keys_T[None, :] <= positions_N[:, None])[:, None, None, :]


AttentionInterface.register(ATTENTION, grouped_query_attention)
