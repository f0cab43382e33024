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
"""Columns of the table of trajectories beside the names, which must not be cut: a user looks them up."""


@dataclass(frozen=True, slots=True)
class Difference:
    """|difference of log-probs| over the sampled tokens of one trajectory, nats; nan where one of them is not finite.

    worst_token: index of the token with the largest.
    """

    largest: float
    mean: float
    worst_token: int

    def within(self, tolerance: float) -> bool:
        """False for nan as well."""
        return self.largest <= tolerance


@dataclass(frozen=True, slots=True)
class TrajectoryOpinion:
    """One trajectory: `differences` by the names of the two implementations, in the order in which they were given."""

    rollout_id: str
    num_sampled: int
    differences: Mapping[tuple[str, str], Difference]

    @property
    def worst_token(self) -> int:
        """Index of the token where two implementations are farthest apart."""
        return max(self.differences.values(), key=lambda each: (math.isnan(each.largest), each.largest)).worst_token

    def within(self, tolerance: float) -> bool:
        return all(difference.within(tolerance) for difference in self.differences.values())


@dataclass(frozen=True, slots=True, eq=False)
class LayerOpinion:
    """Per MoE layer, over the captured rows of all trajectories.

    num_rows: captured rows, the same in every layer. num_live: rows without captured routing, left to the router.
    differing_L: float64, share of rows whose natural experts are not the recorded ones, as sets.
    jaccard_L: float64, mean of |natural and recorded| / |natural or recorded|.
    """

    num_rows: int
    num_live: int
    differing_L: NDArray[np.float64]
    jaccard_L: NDArray[np.float64]


def compare_logprobs(trajectory: Trajectory, logprobs: Mapping[str, NDArray[np.floating]]) -> TrajectoryOpinion:
    """Every pair of implementations.

    Args:
        logprobs: by implementation, [S] in nats; read where the trajectory was sampled.
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
    """Recorded experts against those the routers would have chosen, as sets.

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
    """Both tables, and one line that says what they come to, with the names of the trajectories outside."""
    width = _NUMBERS_WIDTH + max(len(opinion.rollout_id) for opinion in opinions)
    console = Console(width=width, highlight=False, markup=False)
    console.print(_layer_table(layers))
    console.print(_trajectory_table(opinions, tolerance))
    outside = [opinion.rollout_id for opinion in opinions if not opinion.within(tolerance)]
    largest: dict[tuple[str, str], list[float]] = {}
    for opinion in opinions:
        for pair, difference in opinion.differences.items():
            largest.setdefault(pair, []).append(difference.largest)
    for (one, other), values in largest.items():
        print(f"{one} against {other}: largest difference {np.max(values):.2e} nats")
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
