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


def _count_local_tokens(original: Any) -> Any:
    """The load-balancing loss with a padding mask counts local tokens after summing them, in place, over the group.

    With tensor parallelism of size n its gradient came out n times too large. Goes when
    `get_tokens_per_expert_and_token_count` counts before it reduces.
    """

    @functools.wraps(original)
    def count(routing_map: Tensor, reduce_group: Any, topk: int, with_padding_mask: bool = False) -> Any:
        per_expert, local, total = original(routing_map, reduce_group, topk, with_padding_mask)
        return per_expert, routing_map.sum() / topk if with_padding_mask else local, total

    return count
