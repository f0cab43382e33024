"""Findings of `moerl verify`: log-probs of several implementations pair by pair, and routing layer by layer.

Torch-free: numpy in, numbers and tables out. Shape legend: S = tokens of a trajectory, L, K as in the data contract.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from moerl.contract.trajectory import Trajectory
from moerl.printable import printable

_NUMBERS_WIDTH = 120
"""Columns of the table of trajectories without the names, which must not be cut: a user looks them up."""


@dataclass(frozen=True, slots=True)
class Difference:
    """|difference of log-probs| over the sampled tokens of one trajectory, nats."""

    largest: float
    """nan if any log-prob is not finite."""
    mean: float
    """nan if any log-prob is not finite."""
    worst_token: int
    """Index, in the trajectory, of the token with the largest; the first that is not finite, if any."""


@dataclass(frozen=True, slots=True)
class TrajectoryOpinion:
    """Differences of one trajectory between implementations."""

    rollout_id: str
    """Name of the trajectory, printable."""
    num_sampled: int
    """Sampled tokens."""
    differences: Mapping[tuple[str, str], Difference]
    """By the names of the two implementations, in the order in which they were given."""

    @property
    def worst_token(self) -> int:
        """Index of the token at which two implementations are farthest apart."""
        return max(self.differences.values(), key=lambda each: (math.isnan(each.largest), each.largest)).worst_token

    def within(self, tolerance: float) -> bool:
        return all(each.largest <= tolerance for each in self.differences.values())  # False for nan


@dataclass(frozen=True, slots=True, eq=False)
class LayerOpinion:
    """Routing per MoE layer, over the captured rows of all trajectories."""

    num_rows: int
    """Captured rows, the same in every layer."""
    num_live: int
    """Rows without captured routing, left to the router."""
    differing_L: NDArray[np.float64]
    """float64, share of rows whose natural experts are not the recorded ones, as sets."""
    jaccard_L: NDArray[np.float64]
    """float64, mean of |natural and recorded| / |natural or recorded|."""


def compare_logprobs(trajectory: Trajectory, logprobs: Mapping[str, NDArray[np.floating]]) -> TrajectoryOpinion:
    """Compares every pair of implementations.

    Args:
        logprobs: by implementation, [S] in nats; only those of sampled tokens are read.
    """
    sampled = np.flatnonzero(trajectory.sampled)
    differences = {
        (one, other): _difference(logprobs[one][sampled], logprobs[other][sampled], sampled)
        for one, other in combinations(logprobs, 2)
    }
    return TrajectoryOpinion(printable(trajectory.lineage.rollout_id), len(sampled), differences)


def _difference(one: NDArray[np.floating], other: NDArray[np.floating], tokens: NDArray[np.int64]) -> Difference:
    with np.errstate(invalid="ignore"):
        gaps = np.abs(one.astype(np.float64) - other.astype(np.float64))
    # Infinities are no numbers to compare, and argmax and max both name a nan before any number.
    gaps[~np.isfinite(gaps)] = np.nan
    return Difference(float(gaps.max()), float(gaps.mean()), int(tokens[gaps.argmax()]))


def compare_routing(trajectories: Sequence[Trajectory], own_ids: Sequence[NDArray[np.int64]]) -> LayerOpinion:
    """Compares recorded experts with those that the routers would have chosen, as sets.

    Args:
        own_ids: per trajectory int64 [S-1, L, K].
    """
    num_layers, top_k = trajectories[0].expert_ids.shape[1:]
    differing_L, jaccard_L, num_rows, num_live = np.zeros(num_layers), np.zeros(num_layers), 0, 0
    for trajectory, natural in zip(trajectories, own_ids, strict=True):
        recorded_rLK = trajectory.expert_ids[trajectory.routed].astype(np.int64)
        own_rLK = natural[trajectory.routed]
        shared_rL = (recorded_rLK[..., :, None] == own_rLK[..., None, :]).sum((-1, -2))
        differing_L += (shared_rL < top_k).sum(0)
        jaccard_L += (shared_rL / (2 * top_k - shared_rL)).sum(0)
        num_rows += len(recorded_rLK)
        num_live += int((~trajectory.routed).sum())
    count = max(num_rows, 1)
    return LayerOpinion(num_rows, num_live, differing_L / count, jaccard_L / count)


def print_opinions(opinions: Sequence[TrajectoryOpinion], layers: LayerOpinion, tolerance: float) -> None:
    """Prints both tables, a line for each pair of implementations, and the trajectories outside the tolerance."""
    width = _NUMBERS_WIDTH + max(len(opinion.rollout_id) for opinion in opinions)
    console = Console(width=width, highlight=False, markup=False)
    console.print(_layer_table(layers))
    console.print(_trajectory_table(opinions, tolerance))
    outside = [opinion.rollout_id for opinion in opinions if not opinion.within(tolerance)]
    for one, other in opinions[0].differences:
        largest = np.max([opinion.differences[one, other].largest for opinion in opinions])
        print(f"{one} against {other}: largest difference {largest:.2e} nats")
    if outside:
        print(f"outside the tolerance of {tolerance:g} nats: {len(outside)} of {len(opinions)} trajectories")
        print("\n".join(f"  {rollout_id}" for rollout_id in outside))
    else:
        print(f"all {len(opinions)} trajectories within the tolerance of {tolerance:g} nats")


def _layer_table(layers: LayerOpinion) -> Table:
    table = Table(title=f"routing, {layers.num_rows} captured rows, {layers.num_live} without", title_justify="left")
    for name in ("MoE layer", "rows differing", "Jaccard"):
        table.add_column(name, justify="right")
    for layer, (differing, jaccard) in enumerate(zip(layers.differing_L, layers.jaccard_L, strict=True)):
        table.add_row(str(layer), f"{differing:.4%}", f"{jaccard:.6f}")
    return table


def _trajectory_table(opinions: Sequence[TrajectoryOpinion], tolerance: float) -> Table:
    table = Table(title="|difference of log-probs| in nats, by trajectory", title_justify="left")
    table.add_column("trajectory", no_wrap=True)
    table.add_column("tokens", justify="right")
    for one, other in opinions[0].differences:
        table.add_column(f"{one}\n{other}\nmax / mean", justify="right")
    table.add_column("token of\nthe largest", justify="right")
    table.add_column("")
    for opinion in opinions:
        cells = [f"{each.largest:.2e} / {each.mean:.2e}" for each in opinion.differences.values()]
        mark = "" if opinion.within(tolerance) else "OUTSIDE"
        table.add_row(opinion.rollout_id, str(opinion.num_sampled), *cells, str(opinion.worst_token), mark)
    return table
