"""Consecutive sampled tokens of one rollout, and the rollout that several of them make. Pure functions; numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import FinishReason, KeptSets, ModelSpec, Turn, TurnKind


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive sampled tokens of one rollout, as one answer brought them; an interrupted rollout has several.

    T = its tokens, R = its rows of routing: those of inputs that no segment before it has rows of.
    """

    token_ids: NDArray[np.int32]
    """int32 [T]."""
    rollout_logprobs: NDArray[np.float32]
    """float32 [T], nats."""
    kept_logmass: NDArray[np.float32]
    """float32 [T], nats."""
    policy_versions: NDArray[np.int32]
    """int32 [T]."""
    kept_sizes: NDArray[np.int64]
    """int64 [T]; 0 if nothing was cut."""
    kept_ids: NDArray[np.int32]
    """int32 [sum of `kept_sizes`]."""
    expert_ids: NDArray[Any]
    """uint8 or uint16 [R, L, K]."""

    def __len__(self) -> int:
        return len(self.token_ids)


def first_row(request: RolloutRequest, num_before: int) -> int:
    """Returns the index of the first input whose row of routing an answer brings, with `num_before` tokens sampled
    before it: `R` begins there.

    The last of these tokens has no row yet: it was never an input.
    """
    return len(request.prompt_ids) + num_before - 1 if num_before else request.known_rows


def trajectory_values(
    request: RolloutRequest, segments: Sequence[Segment], reason: FinishReason, spec: ModelSpec
) -> dict[str, Any]:
    """Returns the `Trajectory` fields of a rollout; `engine_id`, `attempt` and `timings` are the caller's.

    Args:
        segments: at least one, in order.
    """
    num_prompt = len(request.prompt_ids)
    num_tokens = num_prompt + sum(len(segment) for segment in segments)

    def behind_prompt(parts: Sequence[NDArray[Any]], fill: Any) -> NDArray[Any]:
        return np.concatenate([np.full(num_prompt, fill, parts[0].dtype), *parts])

    offsets = np.zeros(num_tokens + 1, np.int64)
    np.cumsum(behind_prompt([segment.kept_sizes for segment in segments], 0), out=offsets[1:])
    sampled = np.arange(num_tokens) >= num_prompt
    rows = [segment.expert_ids for segment in segments]
    known = np.zeros((request.known_rows, *rows[0].shape[1:]), rows[0].dtype)
    return {
        "spec": spec,
        "lineage": request.lineage,
        "turns": (
            Turn(0, num_prompt, TurnKind.PROMPT),
            Turn(num_prompt, num_tokens, TurnKind.SAMPLED, request.sampling),
        ),
        "token_ids": np.concatenate([np.array(request.prompt_ids, np.int32), *(s.token_ids for s in segments)]),
        "sampled": sampled,
        "rollout_logprobs": behind_prompt([segment.rollout_logprobs for segment in segments], 0),
        "kept_logmass": behind_prompt([segment.kept_logmass for segment in segments], 0),
        "policy_versions": behind_prompt([segment.policy_versions for segment in segments], -1),
        "expert_ids": np.concatenate([known, *rows]),
        "routed": np.arange(num_tokens - 1) >= request.known_rows,
        "kept": KeptSets(offsets, np.concatenate([segment.kept_ids for segment in segments])),
        "truncated": sampled & request.sampling.cuts,
        "finish_reason": reason,
    }
