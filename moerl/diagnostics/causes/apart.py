"""Tokens whose gap is apart from that of the others when everything else is put right: those of older weights, of one
engine, of one turn, or of one depth of the context. Also single rollouts that are apart.

Torch-free. Shape legend: N = sampled tokens of all rollouts, R = rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.causes.faults import LEAST_TOKENS, ODD
from moerl.diagnostics.causes.gaps import Differences
from moerl.diagnostics.dumps.rollout import DumpedRollout

FAR = 3.0
"""Times the gap of the others, above which tokens are apart."""
ROUNDING = 5.0
"""Times the floor, by which tokens are apart from others, or above which a remaining gap is called a fault."""
LEAST_ROLLOUTS = 3
ERRORS = 4.0
"""Standard errors, over rollouts."""
DEPTHS = (1 << 10, 1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 17)
"""Positions at which a depth of the context begins, after the first."""


@dataclass(frozen=True, slots=True, eq=False)
class Apart:
    """Tokens that are apart from the others for one cause."""

    cause: str
    """Key of `CAUSES`: "staleness", "bad_engine", "turn_apart" or "depth_apart"."""
    name: str
    """Name of the engine, number of the turn, the depth as `depth_names` has it, or the ages in versions."""
    tokens_N: NDArray[np.bool_]
    """True for the tokens of this group."""
    mean: float
    """Mean |d| of these tokens, nats, in the mean of the rollouts that have some."""
    others: float
    """The same of the other tokens; the floor if too few rollouts have others ("staleness" alone)."""


def depth_names(positions: NDArray[np.integer]) -> NDArray[np.str_]:
    """Returns the depth of the context at these positions, such as "8K to 16K"."""
    bounds = [0, *DEPTHS]
    names = [f"{low >> 10}K to {high >> 10}K" for low, high in zip(bounds, DEPTHS, strict=False)]
    names.append(f"{DEPTHS[-1] >> 10}K and more")
    return np.array(names)[np.searchsorted(np.array(DEPTHS), positions, side="right")]


def odd_rollouts(residual: Differences, level_R: NDArray[np.float64], groups: Sequence[Apart]) -> NDArray[np.bool_]:
    """Returns bool [R]: rollouts that are odd by themselves, whatever the mean of all. Tokens of groups that are apart
    do not count. level_R: mean |d| that is no fault, nats."""
    left = ~np.any([group.tokens_N for group in groups], axis=0) if groups else np.ones(len(residual.d_N), bool)
    counts = np.add.reduceat(left.astype(np.int64), residual.starts[:-1])
    sums = np.add.reduceat(np.where(left, residual.sizes, 0.0), residual.starts[:-1])
    return (counts >= LEAST_TOKENS) & (sums / np.maximum(counts, 1) > ODD * level_R)


def tokens_apart(
    rollouts: Sequence[DumpedRollout], residual: Differences, floor: float, version: int | None
) -> list[Apart]:
    """Returns the groups of tokens that are apart: by age first, then by engine, depth and turn. version: of the
    weights that scored; None if nobody said, or if there are several."""
    aged = None if version is None else _aged(rollouts, residual, floor, version)
    left = np.ones(len(residual.d_N), bool) if aged is None else ~aged.tokens_N
    found = [] if aged is None else [aged]
    names_N = {
        "bad_engine": np.repeat([rollout.engine for rollout in rollouts], np.diff(residual.starts)),
        "depth_apart": depth_names(np.concatenate([np.flatnonzero(rollout.sampled) for rollout in rollouts])),
        "turn_apart": np.concatenate([rollout.turns[rollout.sampled] for rollout in rollouts]).astype(str),
    }
    for cause, names in names_N.items():
        of_it = _named(cause, names, residual, floor, left)
        for group in of_it:
            left = left & ~group.tokens_N
        found += of_it
    return found


def _aged(rollouts: Sequence[DumpedRollout], residual: Differences, floor: float, version: int) -> Apart | None:
    versions = np.concatenate([rollout.policy_versions[rollout.sampled] for rollout in rollouts])
    older = (versions >= 0) & (versions < version)
    mine, others = _means(residual, older), _means(residual, ~older)
    ages = np.unique(version - versions[older])
    if len(mine) < LEAST_ROLLOUTS:
        return None
    if len(others) < LEAST_ROLLOUTS:
        others = np.full(LEAST_ROLLOUTS, floor)
    if not _is_apart(mine, others, floor):
        return None
    name = f"{ages[0]}" if len(ages) == 1 else f"{ages[0]} to {ages[-1]}"
    return Apart("staleness", name, older, float(mine.mean()), float(others.mean()))


def _named(
    cause: str, names_N: NDArray[np.str_], residual: Differences, floor: float, left: NDArray[np.bool_]
) -> list[Apart]:
    """Returns the groups of tokens that are apart from all other groups; none if that is the greater part of the
    groups."""
    names = sorted(set(names_N.tolist()))
    apart: list[Apart] = []
    for name in names:
        mine, others = _means(residual, (names_N == name) & left), _means(residual, (names_N != name) & left)
        if min(len(mine), len(others)) >= LEAST_ROLLOUTS and _is_apart(mine, others, floor):
            apart.append(Apart(cause, name, (names_N == name) & left, float(mine.mean()), float(others.mean())))
    return apart if len(apart) * 2 <= len(names) else []


def _means(residual: Differences, chosen_N: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns mean |d| of the chosen tokens of every rollout that has some."""
    counts = np.add.reduceat(chosen_N.astype(np.int64), residual.starts[:-1])
    sums = np.add.reduceat(np.where(chosen_N, residual.sizes, 0.0), residual.starts[:-1])
    return sums[counts > 0] / counts[counts > 0]


def _is_apart(mine: NDArray[np.float64], others: NDArray[np.float64], floor: float) -> bool:
    error = np.sqrt(mine.var() / len(mine) + others.var() / len(others))
    limit = max(FAR * others.mean(), others.mean() + ROUNDING * floor)
    return bool(mine.mean() > limit and mine.mean() - others.mean() > ERRORS * error)
