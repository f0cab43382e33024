"""Corrections of megatron-core 0.19.2 on every device; each docstring says what is corrected and when it can go.

Runs in every trainer rank, once, before a model is built.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor


def apply() -> None:
    """Installs the corrections; idempotent."""
    router: Any = importlib.import_module("megatron.core.transformer.moe.router")
    if not hasattr(router.get_tokens_per_expert_and_token_count, "__wrapped__"):
        router.get_tokens_per_expert_and_token_count = _count_local_tokens(router.get_tokens_per_expert_and_token_count)
    attention: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention").MLASelfAttention
    if not hasattr(attention._qkv_down_projection, "__wrapped__"):
        attention._qkv_down_projection = _slice_latents(attention._qkv_down_projection)
    p2p: Any = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    p2p.P2PCommunicator._communicate_shapes = _exchange_shapes


def _exchange_shapes(
    self: Any, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
) -> tuple[list[int], list[int]]:
    """Exchanges shapes in the same way as the tensors that they announce, without waiting until they are read.

    The original posts both directions between the same two ranks of a two-stage pipeline on one communicator, in the
    same order on both sides, so that an interleaved schedule reads each shape in the other's place (with equal shapes
    nobody notices). It also waits for its own announcements: with gloo a rank that sends and receives in one call then
    waits for one that does so in two. Goes when `P2PCommunicator._communicate_shapes` tells the directions apart as
    `_p2p_ops` does, and waits only for shapes that it receives.
    """
    p2p: Any = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    to = torch.cuda.current_device()

    def announced(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.tensor(tensor.size(), device=to, dtype=torch.int64)

    def awaited(receives: bool) -> Tensor | None:
        return torch.empty(3, device=to, dtype=torch.int64) if receives else None

    shape_prev, shape_next = awaited(recv_prev), awaited(recv_next)
    requests = p2p._p2p_ops(
        tensor_send_prev=announced(tensor_send_prev),
        tensor_recv_prev=shape_prev,
        tensor_send_next=announced(tensor_send_next),
        tensor_recv_next=shape_next,
        group=self.pp_group,
        prev_pipeline_rank=self.prev_rank,
        next_pipeline_rank=self.next_rank,
    )
    for name, request in requests.items():
        if name.startswith("recv"):
            request.wait()
    sent = [request for name, request in requests.items() if name.startswith("send")]
    # A request that is dropped before it is done could take its buffer with it.
    self._announcements = [r for r in getattr(self, "_announcements", []) if not r.is_completed()] + sent
    nothing = [0, 0, 0]
    return (
        nothing if shape_prev is None else shape_prev.tolist(),
        nothing if shape_next is None else shape_next.tolist(),
    )


def _count_local_tokens(original: Any) -> Any:
    """Corrects the load-balancing loss with a padding mask. The original counts local tokens after summing them, in
    place, over the group, weighs every rank's part of the loss by them, and divides by a count that is 0 if every row
    is padding.

    With tensor parallelism of size n its gradient came out n times too large, and a microbatch of pad rows alone made
    every router's gradient NaN. Local tokens themselves would do if all ranks had equally many: with pad rows at the
    end of a sequence or of a microbatch they have not, and the parts of one loss need one weight. So every rank counts
    the mean. Goes when `attach_and_log_load_balancing_loss` weighs by the tokens of all ranks of the group, and the
    loss of no token is 0.
    """

    @functools.wraps(original)
    def count(routing_map: Tensor, reduce_group: Any, topk: int, with_padding_mask: bool = False) -> Any:
        per_expert, local, total = original(routing_map, reduce_group, topk, with_padding_mask)
        if not with_padding_mask:
            return per_expert, local, total
        return per_expert, total / reduce_group.size(), total.clamp(min=1)

    return count


def _slice_latents(original: Any) -> Any:
    """Corrects latent attention with column-parallel down projections, which loses gradient of the rotary key under
    tensor parallelism.

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
