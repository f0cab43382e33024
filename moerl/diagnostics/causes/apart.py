"""Tokens whose gap is apart from that of the others when everything else is put right: of older weights, of one engine.

Torch-free. Shape legend: N = sampled tokens of all rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.causes.gaps import Differences
from moerl.diagnostics.dumps.rollout import DumpedRollout

FAR = 3.0
"""Times the gap of the others."""
ROUNDING = 5.0
"""Times the floor, by which tokens are apart from others, or what is left is called a fault."""
CLEAN = 2.0
"""Times the floor, up to which what is left is called rounding (docs/routing_mismatch.md has that of sound dumps)."""
ODD = 4.0
"""Times the floor, above which one rollout of `LEAST_TOKENS` is odd. Sound ones stay under 3."""
LEAST_TOKENS = 16
LEAST_ROLLOUTS = 3
ERRORS = 4.0
"""Standard errors, over rollouts."""


@dataclass(frozen=True, slots=True, eq=False)
class Apart:
    """cause: "staleness" or "bad_engine". name: of the engine, or the ages. tokens_N: bool. mean, others: mean |d| of
    these tokens and of the others, nats."""

    cause: str
    name: str
    tokens_N: NDArray[np.bool_]
    mean: float
    others: float


def odd_rollouts(
    rollouts: Sequence[DumpedRollout], residual: Differences, floor: float, groups: Sequence[Apart]
) -> list[tuple[str, float]]:
    """Returns rollouts that are odd by themselves, whatever the mean of all: their names and mean |d| in nats, the
    largest first. Tokens of groups that are apart do not count."""
    left = ~np.any([group.tokens_N for group in groups], axis=0) if groups else np.ones(len(residual.d_N), bool)
    counts = np.add.reduceat(left.astype(np.int64), residual.starts[:-1])
    sums = np.add.reduceat(np.where(left, residual.sizes, 0.0), residual.starts[:-1])
    means = sums / np.maximum(counts, 1)
    odd = np.flatnonzero((counts >= LEAST_TOKENS) & (means > ODD * floor))
    return [(rollouts[i].name, float(means[i])) for i in sorted(odd.tolist(), key=lambda i: -means[i])]


def tokens_apart(
    rollouts: Sequence[DumpedRollout], residual: Differences, floor: float, version: int | None
) -> list[Apart]:
    """version: of the weights that scored; None where nobody said, or where there are several."""
    aged = None if version is None else _aged(rollouts, residual, floor, version)
    left = np.ones(len(residual.d_N), bool) if aged is None else ~aged.tokens_N
    found = [] if aged is None else [aged]
    return found + _engines(rollouts, residual, floor, left)


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


def _engines(
    rollouts: Sequence[DumpedRollout], residual: Differences, floor: float, left: NDArray[np.bool_]
) -> list[Apart]:
    engine_N = np.repeat([rollout.engine for rollout in rollouts], np.diff(residual.starts))
    names = sorted(set(engine_N.tolist()))
    apart: list[Apart] = []
    for name in names:
        mine, others = _means(residual, (engine_N == name) & left), _means(residual, (engine_N != name) & left)
        if min(len(mine), len(others)) >= LEAST_ROLLOUTS and _is_apart(mine, others, floor):
            chosen = (engine_N == name) & left
            apart.append(Apart("bad_engine", name, chosen, float(mine.mean()), float(others.mean())))
    return apart if len(apart) * 2 <= len(names) else []


def _means(residual: Differences, chosen_N: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Mean |d| of the chosen tokens of every rollout that has some."""
    counts = np.add.reduceat(chosen_N.astype(np.int64), residual.starts[:-1])
    sums = np.add.reduceat(np.where(chosen_N, residual.sizes, 0.0), residual.starts[:-1])
    return sums[counts > 0] / counts[counts > 0]


def _is_apart(mine: NDArray[np.float64], others: NDArray[np.float64], floor: float) -> bool:
    error = np.sqrt(mine.var() / len(mine) + others.var() / len(others))
    limit = max(FAR * others.mean(), others.mean() + ROUNDING * floor)
    return bool(mine.mean() > limit and mine.mean() - others.mean() > ERRORS * error)
