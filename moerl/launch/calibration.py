"""Costs of the parts of a step, fitted to the metrics of a run. Torch-free."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.buffer.simulated_turns import SimulatedTurn
from moerl.buffer.simulation import SimulatedFleet, StepCosts
from moerl.config.load import CONFIG_FILE, load_resolved
from moerl.config.rollouts import EmbeddedRolloutConfig, RolloutConfig
from moerl.config.schema import BufferConfig, RLConfig, WeightsConfig
from moerl.contract.disk import read_parquet
from moerl.contract.fields import TurnKind
from moerl.contract.trajectory import Trajectory
from moerl.errors import ConfigError
from moerl.telemetry.sinks import METRICS_FILE, read_rows

MIN_STEPS = 12
"""Fewer steps do not tell three costs apart."""

_ENVIRONMENT = "environment_seconds"
"""Name among a trajectory's timings of the time in which the environment worked."""

_READ = (
    *("response/length_mean", "response/length_max", "weights/stalled_seconds"),
    *("seconds/step", "seconds/rollout", "seconds/weights"),
)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Costs and episodes that were read from a run."""

    costs: StepCosts
    """Fitted to the metrics of the run."""
    episodes: list[list[SimulatedTurn]]
    """Turns of each response in the run's dumps."""
    step_seconds: float
    """Mean time of a step, as measured."""
    num_steps: int
    """Steps that the costs are fitted to: all but the first."""


def calibrate(run_dir: Path) -> Calibration:
    """Fits the costs of a synchronous run whose responses were all sampled side by side.

    The time of sampling is fitted by ``decode_step * longest + decode_row * tokens + rest`` over steps, the time of
    training by ``train_token * tokens + rest``, both without negative costs. Such a run interrupts nothing: a token
    that servers compute again counts as one that is decoded, without its share of the step. From the time of sampling
    the seconds of the environment are taken off, those of the slowest episode of a dump in the mean; the rest is that
    of prompts and observations, by their tokens.

    Raises:
        ConfigError: it is no run, was not synchronous, sampled in turns, or is too short.
    """
    if not (run_dir / CONFIG_FILE).is_file() or not (run_dir / METRICS_FILE).is_file():
        raise _unfit(run_dir, f"no {CONFIG_FILE} or no {METRICS_FILE}", "the directory of a run")
    config = load_resolved(run_dir / CONFIG_FILE)
    _check_one_after_another(run_dir, config.rollout, config.rl, config.buffer)
    rows = [row for row in read_rows(run_dir / METRICS_FILE) if row["stage"] == "rl"][1:]
    dumps = sorted((run_dir / "rollouts").glob("step-*.parquet"))
    if len(rows) < MIN_STEPS or not dumps:
        raise _unfit(
            run_dir, f"{len(rows) + 1} steps, {len(dumps)} dumps", f"at least {MIN_STEPS + 1} steps and a dump"
        )
    missing = [name for name in _READ if any(name not in row for row in rows)]
    if missing:
        raise _unfit(run_dir, f"steps without {', '.join(missing)}", "metrics as this version writes them")
    steps = [_episodes(read_parquet(dump)) for dump in dumps]
    played = [each for step in steps for each in step]
    responses = config.rl.prompts_per_step * config.rl.group_size
    tokens_N = _column(rows, "response/length_mean") * responses
    longest_N, ones_N = _column(rows, "response/length_max"), np.ones(len(rows))
    acting = statistics.mean(max(step, key=lambda each: each.seconds).environment_seconds for step in steps)
    decode = _fit(_column(rows, "seconds/rollout") - acting, longest_N, tokens_N, ones_N)
    rest_N = _column(rows, "seconds/step") - _column(rows, "seconds/rollout") - _column(rows, "seconds/weights")
    train = _fit(rest_N, tokens_N, ones_N)
    num_prompt = statistics.mean(each.num_prompt for each in played)
    num_later = statistics.mean(
        _later_tokens(each, keeps_prefixes=fleet_of(config.rollout).keeps_prefixes) for each in played
    )
    prefill_token = decode[2] / responses / (num_prompt + num_later)
    costs = StepCosts(
        decode_step=decode[0],
        decode_row=decode[1],
        prefill_row=prefill_token * num_prompt,
        train_step=train[1],
        train_token=train[0],
        publish=statistics.mean(_column(rows, "seconds/weights")),
        stall=statistics.mean(_column(rows, "weights/stalled_seconds")),
        recompute_token=decode[1] if computes_again(config.rollout, config.weights) else 0.0,
        prefill_token=prefill_token,
    )
    return Calibration(
        costs, [each.turns for each in played], statistics.mean(_column(rows, "seconds/step")), len(rows)
    )


def fleet_of(rollout: RolloutConfig) -> SimulatedFleet:
    """Returns the engines of a run."""
    keeps_prefixes = not isinstance(rollout, EmbeddedRolloutConfig)
    return SimulatedFleet(max(1, rollout.num_servers), rollout.max_running, keeps_prefixes)


@dataclass(slots=True)
class _Episode:
    """An episode of a dump. environment_seconds: of all its turns. seconds: of all that was timed."""

    num_prompt: int
    turns: list[SimulatedTurn]
    environment_seconds: float
    seconds: float


def _episodes(trajectories: Iterable[Trajectory]) -> list[_Episode]:
    """Returns the episodes of a dump. Sessions of an episode count as if they were played one after the other, and each
    gap between two turns has the same share of the time of the environment."""
    found: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        found.setdefault(trajectory.lineage.episode, []).append(trajectory)
    return [_episode(sessions) for sessions in found.values()]


def _episode(sessions: Sequence[Trajectory]) -> _Episode:
    sampled, observed, num_prompt = list[int](), list[int](), 0
    for turn in (turn for session in sessions for turn in session.turns):
        if turn.kind is TurnKind.SAMPLED:
            sampled.append(turn.end - turn.start)
            observed.append(0)
        elif sampled:
            observed[-1] += turn.end - turn.start
        else:
            num_prompt += turn.end - turn.start
    acting = max(session.timings.get(_ENVIRONMENT, 0.0) for session in sessions)
    gaps = max(1, len(sampled) - 1)
    shares = [acting / gaps if number < gaps else 0.0 for number in range(len(sampled))]
    turns = [SimulatedTurn(*each) for each in zip(sampled, observed, shares, strict=True)]
    timed = sum(seconds for session in sessions for seconds in session.timings.values())
    return _Episode(num_prompt, turns, acting, timed)


def _later_tokens(episode: _Episode, *, keeps_prefixes: bool) -> int:
    """Returns the tokens that an engine prefills for all turns behind the first."""
    observed = [turn.num_observed for turn in episode.turns[:-1]]
    if keeps_prefixes:
        return sum(observed)
    behind = itertools.accumulate(turn.num_tokens + turn.num_observed for turn in episode.turns[:-1])
    return sum(episode.num_prompt + num_tokens for num_tokens in behind)


def computes_again(rollout: RolloutConfig, weights: WeightsConfig) -> bool:
    """Returns True for servers that, with new weights, compute tokens of unfinished responses again; the embedded
    engine, and servers that are drained first, do not."""
    return not isinstance(rollout, EmbeddedRolloutConfig) and weights.interrupt != "drain"


def _check_one_after_another(run_dir: Path, rollout: RolloutConfig, rl: RLConfig, buffer: BufferConfig) -> None:
    """Raises `ConfigError` unless the run samples all responses of a step at once, and trains after that."""
    at_once = fleet_of(rollout).engines * rollout.max_running
    if buffer.max_staleness:
        raise _unfit(run_dir, f"buffer.max_staleness {buffer.max_staleness}", "0: parts that do not overlap")
    if rl.prompts_per_step * rl.group_size > at_once:
        raise _unfit(run_dir, f"rollout.max_running {rollout.max_running}", "room for all responses of a step")
    if isinstance(rollout, EmbeddedRolloutConfig) and rollout.placement == "process":
        raise _unfit(run_dir, "rollout.placement process", "controller: what one core does alone")


def _unfit(run_dir: Path, seen: str, expected: str) -> ConfigError:
    return ConfigError(
        f"plan run: cannot be calibrated with {run_dir}",
        seen=seen,
        expected=expected,
        remedy="give another run, or leave out --calibrate",
    )


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    return np.array([row[name] for row in rows], np.float64)


def _fit(values_N: NDArray[np.float64], *columns: NDArray[np.float64]) -> list[float]:
    """Solves least squares without negative coefficients; tries every choice of columns above zero, as they are few."""
    best, found = np.inf, np.zeros(len(columns))
    for count in range(1, len(columns) + 1):
        for chosen in itertools.combinations(range(len(columns)), count):
            matrix = np.stack([columns[i] for i in chosen], axis=1)
            own = np.linalg.lstsq(matrix, values_N, rcond=None)[0]
            error = float(((matrix @ own - values_N) ** 2).sum())
            if (own >= 0).all() and error < best:
                best, found = error, np.zeros(len(columns))
                found[list(chosen)] = own
    return found.tolist()
