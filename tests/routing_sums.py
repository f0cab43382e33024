"""Checksums over the routing of one trajectory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.routing import summed_checksums


def routing_checksums(
    key: int, expert_ids: NDArray[Any], routed: NDArray[np.bool_] | None = None, *, first: int = 0
) -> NDArray[np.uint64]:
    """Returns uint64 [L]: the checksum per MoE layer of rows [rows, L, K] that count, all of them if `routed` is None;
    row t is at token position `first` + t."""
    everywhere = np.ones(len(expert_ids), np.bool_)
    return summed_checksums([key], [first], [expert_ids], [everywhere if routed is None else routed])
