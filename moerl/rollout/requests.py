"""Checks of requests before anything is sampled, on any engine; distinct prompts and room for the embedded engine.

Runs in the controller and in the embedded engine. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import MAX_KEPT_IDS, ModelSpec
from moerl.errors import RequestRefusedError


def check_requests(requests: Sequence[RolloutRequest], spec: ModelSpec, max_positions: int) -> None:
    """Refuses a batch that holds a request the engine or the contract cannot carry.

    Args:
        max_positions: inputs that model or servers have room for; a rollout's must fit.

    Raises:
        RequestRefusedError: Naming the first offending rollout.
    """
    seen: set[str] = set()
    for request in requests:
        rollout_id = request.lineage.rollout_id
        fault = next(_faults(request, spec.vocab_size, max_positions), None)
        if rollout_id in seen:
            fault = "rollout_id", rollout_id, "unique ids within one call"
        if fault is not None:
            field, value, expected = fault
            what = f"request {rollout_id!r}: {field}"
            raise RequestRefusedError(what, seen=value, expected=expected, remedy="correct the request")
        seen.add(rollout_id)


def _faults(request: RolloutRequest, vocab_size: int, max_positions: int) -> Iterator[tuple[str, object, str]]:
    """Yields field, value seen and values expected of what is wrong; what comes behind the first may follow from it."""
    num_prompt, num_new, sampling = len(request.prompt_ids), request.max_new_tokens, request.sampling
    if num_prompt == 0:
        yield "prompt_ids", "no token", "at least one token"
    if num_new < 1:
        yield "max_new_tokens", num_new, "at least 1"
    # The last sampled token is never fed to the model.
    if num_prompt + num_new - 1 > max_positions:
        expected = f"at most {max_positions} inputs, which model or servers have room for"
        yield "prompt_ids and max_new_tokens", f"{num_prompt} + {num_new} tokens", expected
    for field, ids in (("prompt_ids", request.prompt_ids), ("stop_ids", request.stop_ids)):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            yield field, f"token id {wrong}", f"ids in [0, {vocab_size})"
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        yield "temperature", sampling.temperature, "finite, at least 0"
    if not 0 < sampling.top_p <= 1:
        yield "top_p", sampling.top_p, "in (0, 1]"
    if not 0 <= sampling.min_p < 1:
        yield "min_p", sampling.min_p, "in [0, 1)"
    if sampling.top_k is not None and not 1 <= sampling.top_k <= MAX_KEPT_IDS:
        yield "top_k", sampling.top_k, f"None, or in [1, {MAX_KEPT_IDS}]"
    if not -(2**63) <= sampling.seed < 2**63:
        yield "seed", sampling.seed, "a signed 64-bit integer"
    if not 0 <= request.known_rows < num_prompt:
        yield "known_rows", request.known_rows, f"in [0, {num_prompt})"


def room_for(requests: Iterable[RolloutRequest]) -> int:
    """Returns the tokens that a slot needs room for."""
    return max((len(request.prompt_ids) + request.max_new_tokens for request in requests), default=0)


def distinct_prompts(
    prompts_mP: NDArray[np.int64], lengths_m: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Finds the prompts that differ, and which of them each row is.

    Args:
        prompts_mP: int64, padded on the right, with one number. lengths_m: int, tokens of each.

    Returns:
        The row of the first of each, int64 [u], and for every row its number among those, int64 [m].
    """
    padded = np.concatenate([lengths_m[:, None], prompts_mP], axis=1)
    _, first_u, which_m = np.unique(padded, axis=0, return_index=True, return_inverse=True)
    return first_u, which_m
