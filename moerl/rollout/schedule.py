"""Schedule of the embedded engine: requests that wait, requests that run, and how many are prefilled next.

Runs inside the embedded rollout engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moerl.config.engine_memory import PREFILL_TOKENS
from moerl.contract.ports import RolloutRequest
from moerl.rollout.cache import SlotCache
from moerl.rollout.requests import room_for
from moerl.rollout.sampler import RowParams
from moerl.rollout.slots import SlotTable

_ROOM_TOKENS = 64
"""Room of slots grows by whole numbers of this."""

_ADMIT_SHARE = 8
"""Waiting prompts enter once 1/8 of the slots are free, or one for each: a prefill per row costs a pass each."""


@dataclass(slots=True)
class Schedule:
    """State of one `generate` call, or of a stream of requests."""

    waiting: deque[RolloutRequest]
    """Requests without a slot, oldest first."""
    table: SlotTable
    """Running rows."""
    cache: SlotCache
    """Keys and values of the running rows."""
    asked_at: dict[str, float]
    """Time at which each waiting request was asked for, by rollout id; seconds, perf_counter."""
    params: RowParams | None = None
    """Sampling parameters of the running rows; None if the rows have changed."""
    aborted_ids: set[str] = field(default_factory=set)
    """Rollouts to finish before the next step."""

    def admit(self, requests: Sequence[RolloutRequest]) -> None:
        """Lets requests wait for slots, which get room for them."""
        if not requests:
            return
        self.asked_at |= asked_now(requests)
        self.waiting.extend(requests)
        # In steps: each time it grows, everything is copied.
        max_tokens = -(-room_for(requests) // _ROOM_TOKENS) * _ROOM_TOKENS
        self.table.reserve(max_tokens)
        self.cache.max_tokens = max(self.cache.max_tokens, max_tokens)

    @property
    def unfinished_ids(self) -> list[str]:
        return [request.lineage.rollout_id for request in (*self.table.requests, *self.waiting)]

    def num_to_admit(self) -> int:
        """Returns how many of the waiting requests are prefilled together now."""
        free, waiting = self.table.num_free, len(self.waiting)
        if self.table.num_running and free < min(waiting, -(-self.table.num_slots // _ADMIT_SHARE)):
            return 0
        longest = count = 0
        for request in list(self.waiting)[:free]:
            longest = max(longest, len(request.prompt_ids))
            # Bounds the memory of a prefill. A longer prompt is prefilled alone.
            if count and (count + 1) * longest > PREFILL_TOKENS:
                break
            count += 1
        return count


def asked_now(requests: Iterable[RolloutRequest]) -> dict[str, float]:
    """Returns the time now for each request, by rollout id; seconds, perf_counter."""
    return dict.fromkeys((each.lineage.rollout_id for each in requests), time.perf_counter())
