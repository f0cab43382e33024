"""Metrics of a step by turn: how many sessions reach a turn, and how far the trainer is from the engine there.

Pure; numpy alone. Runs in the controller. Names, units and meanings: docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moerl.contract.spans import turn_numbers
from moerl.contract.trainer import RowTable
from moerl.contract.trajectory import TURN_REWARDS, Trajectory
from moerl.telemetry.metrics import NUM_TURNS, turn_metric


def turn_metrics(updates: Sequence[tuple[Sequence[Trajectory], RowTable]]) -> dict[str, float]:
    """Returns the metrics of turns 1 to `NUM_TURNS`; empty if no trajectory has several turns. Turns of a fork are
    counted from the beginning of the session it comes from.

    Args:
        updates: the trajectories of each update, and its rows.
    """
    if all(len(each.sampled_turns) < 2 for trajectories, _ in updates for each in trajectories):
        return {}
    tokens, sessions = np.zeros(NUM_TURNS, np.int64), np.zeros(NUM_TURNS, np.int64)
    rewards, rows = np.zeros(NUM_TURNS), np.zeros(NUM_TURNS)
    gaps, flips = np.zeros(NUM_TURNS), np.zeros(NUM_TURNS)
    credited = False
    for trajectories, table in updates:
        numbers = turn_numbers(trajectories)
        for trajectory, number_N in zip(trajectories, numbers, strict=True):
            tokens += _sums(number_N).astype(np.int64)
            sessions += _sums(np.unique(number_N)).astype(np.int64)
            if TURN_REWARDS in trajectory.scores:
                credited = True
                rewards += _sums(number_N, trajectory.scores[TURN_REWARDS][trajectory.sampled])
        number_R = _numbers_of_rows(trajectories, numbers, table)
        rows += _sums(number_R)
        gaps += _sums(number_R, np.abs(table.trainer.astype(np.float64) - table.rollout))
        flips += _sums(number_R, table.layers_differing > 0)
    metrics = dict[str, float]()
    for turn in np.flatnonzero(rows).tolist():
        figures = {
            "sessions": sessions[turn],
            "tokens_mean": tokens[turn] / sessions[turn],
            "logprob_abs_mean": gaps[turn] / rows[turn],
            "tokens_with_different_experts": flips[turn] / rows[turn],
            **({"reward_mean": rewards[turn] / sessions[turn]} if credited else {}),
        }
        metrics |= {turn_metric(turn + 1, name): float(value) for name, value in figures.items()}
    return metrics


def _numbers_of_rows(
    trajectories: Sequence[Trajectory], numbers: Sequence[NDArray[np.int64]], table: RowTable
) -> NDArray[np.int64]:
    """Returns the number of the turn of each row, from 0: int64 [R]."""
    lengths = np.array([len(each) for each in trajectories])
    starts = np.cumsum(lengths) - lengths
    number_of_all = np.zeros(lengths.sum(), np.int64)
    for trajectory, start, number_N in zip(trajectories, starts, numbers, strict=True):
        number_of_all[start + np.flatnonzero(trajectory.sampled)] = number_N
    return number_of_all[starts[table.sample.astype(np.int64)] + table.position.astype(np.int64)]


def _sums(numbers: NDArray[np.int64], values: NDArray[np.generic] | None = None) -> NDArray[np.float64]:
    """Returns the sum of the values of each turn, of ones without values: float64 [`NUM_TURNS`]."""
    counted = numbers < NUM_TURNS
    weights = None if values is None else values[counted].astype(np.float64)
    return np.bincount(numbers[counted], weights, NUM_TURNS).astype(np.float64)
