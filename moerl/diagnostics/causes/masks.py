"""Kept sets of a dump: does each hold the token that was drawn from it? Needs no model. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moerl.contract.fields import KeptSets
from moerl.diagnostics.dumps.rollout import DumpedRollout

SHIFTS = (0, -1, 1, -2, 2)


@dataclass(frozen=True, slots=True)
class Containment:
    """Counts of tokens and their kept sets."""

    num_listed: int
    """Sampled tokens with a listed set."""
    num_outside: int
    """Tokens of `num_listed` that are not in their sets."""
    best_shift: int
    """Token t is most often in the set of token t + best_shift; 0: in its own."""
    shares: Mapping[int, float]
    """By shift: share of the tokens t that are in the set of token t + shift."""


def containment(rollouts: Sequence[DumpedRollout]) -> Containment:
    """Counts over all rollouts that have kept sets."""
    inside, listed = dict.fromkeys(SHIFTS, 0), dict.fromkeys(SHIFTS, 0)
    for rollout in rollouts:
        if rollout.kept is None:
            continue
        offsets, ids = rollout.kept.offsets, rollout.kept.ids
        owner = np.repeat(np.arange(len(rollout)), np.diff(offsets))
        for shift in SHIFTS:
            token_of = owner - shift
            known = (token_of >= 0) & (token_of < len(rollout))
            known[known] = rollout.sampled[token_of[known]]
            listed[shift] += len(np.unique(token_of[known]))
            hits = known.copy()
            hits[known] = ids[known] == rollout.token_ids[token_of[known]]
            inside[shift] += len(np.unique(token_of[hits]))
    shares = {shift: inside[shift] / max(1, listed[shift]) for shift in SHIFTS}
    best = max(SHIFTS, key=lambda shift: (shares[shift], -abs(shift)))
    return Containment(listed[0], listed[0] - inside[0], best, shares)


def held_by_chance(rollouts: Sequence[DumpedRollout], shift: int) -> NDArray[np.float64]:
    """Returns for each rollout the chance that all of its moved sets hold their tokens though they are not theirs:
    float64 [rollouts]. Sets are large in a small vocabulary: a token is then in most of its neighbours' sets, too."""
    shares = containment(rollouts).shares
    share = float(np.median([shares[other] for other in SHIFTS if other not in (0, shift)]))
    return share ** np.array([containment([shifted(rollout, shift)]).num_listed for rollout in rollouts], np.float64)


def at_least_by_chance(count: int, expected: float) -> float:
    """Returns the chance of `count` or more rare events if so many are expected (Poisson)."""
    if not count or not expected:
        return float(not count)
    return 1.0 - sum(math.exp(i * math.log(expected) - expected - math.lgamma(i + 1)) for i in range(count))


def shifted(rollout: DumpedRollout, shift: int) -> DumpedRollout:
    """Gives token t the set of token t + shift, and drops sets of tokens that were not sampled."""
    if rollout.kept is None:
        return rollout
    offsets, ids = rollout.kept.offsets, rollout.kept.ids
    rows: list[np.ndarray] = []
    for token in range(len(rollout)):
        at = token + shift
        has_set = rollout.sampled[token] and 0 <= at < len(rollout)
        rows.append(ids[offsets[at] : offsets[at + 1]] if has_set else ids[:0])
    moved = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return replace(rollout, kept=KeptSets(moved, np.concatenate(rows)))


def with_tokens(rollout: DumpedRollout) -> DumpedRollout:
    """Adds its token to every listed set."""
    if rollout.kept is None:
        return rollout
    rows = np.split(rollout.kept.ids, rollout.kept.offsets[1:-1])
    for token in np.flatnonzero(rollout.sampled & (rollout.kept.sizes > 0)).tolist():
        rows[token] = np.union1d(rows[token], rollout.token_ids[token : token + 1]).astype(rollout.kept.ids.dtype)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return replace(rollout, kept=KeptSets(offsets, np.concatenate(rows)))
