"""The table of goals of a GPU, and how far a run of `gpu_check.py` met them. Torch-free.

One list: the goal, the comparison, and the place of the measured value among the results of a check. A goal that a run
did not measure says why; on a CPU none is measured, since tiny sizes on another machine show nothing about it.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from _gpu_checks import Device, Outcome
from _report import Result

Comparison = Literal["<=", ">=", "=="]
_HOLDS: dict[Comparison, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True, slots=True)
class Goal:
    """A measured value that has to keep a limit."""

    name: str
    comparison: Comparison
    limit: float
    unit: str
    check: str
    """The check that measures it; its file is ``gpu-CHECK.json``."""
    result: str
    """How the name of one of its results begins."""
    over: str = ""
    """How the name of the result begins by which that is divided; empty: by none."""
    scale: float = 1.0
    """The result in its own unit times this is the value in `unit`."""


GOALS = (
    Goal("recipe=tiny runs as shipped, replay proved", "==", 1, "run", "start", "tiny: replay proved"),
    Goal("recipe=laptop runs as shipped, replay proved", "==", 1, "run", "start", "laptop: replay proved"),
    Goal("recipe=demo runs as shipped, replay proved", "==", 1, "run", "start", "demo: replay proved"),
    Goal("synchronisations that replay and proof add to a step", "==", 0, "calls", "proof", "synchronisations added"),
    Goal(
        "replay and proof on / off, step time, 128 experts",
        "<=",
        1.005,
        "ratio",
        "slice128",
        "replay on / off, wall time",
    ),
    Goal(
        "replay and proof on / off, step time, 16 experts",
        "<=",
        1.005,
        "ratio",
        "slice16",
        "replay on / off, wall time",
    ),
    Goal("masks on / off, step time, 128 experts", "<=", 0.75, "ratio", "slice128", "masks on / off, wall time"),
    Goal("masks on / off, step time, 16 experts", "<=", 0.75, "ratio", "slice16", "masks on / off, wall time"),
    Goal("share of peak, 128 experts", ">=", 0.22, "ratio", "slice128", "utilisation of"),
    Goal("share of peak, 16 experts", ">=", 0.30, "ratio", "slice16", "utilisation of"),
    Goal("ours / plain step, 128 experts", "<=", 1, "ratio", "slice128", "ours / plain, wall time"),
    Goal("ours / plain step, 16 experts", "<=", 1, "ratio", "slice16", "ours / plain, wall time"),
    Goal("kept scoring, realistic sets", "<=", 1.2, "ms", "scoring", "kept, realistic: time", scale=1e3),
    Goal("kept scoring, flat sets", "<=", 6, "ms", "scoring", "kept, flat: time", scale=1e3),
    Goal(
        "full vocabulary / cut-cross-entropy, time",
        "<=",
        1,
        "ratio",
        "scoring",
        "full: time",
        "cut-cross-entropy: time",
    ),
    Goal(
        "full vocabulary / cut-cross-entropy, peak memory",
        "<=",
        1,
        "ratio",
        "scoring",
        "full: peak memory",
        "cut-cross-entropy: peak memory",
    ),
)
"""Sizes of the last four: 4,096 rows, vocabulary 151,936, width 2,048, bfloat16, forward and backward."""


@dataclass(frozen=True, slots=True)
class Score:
    """A goal, and how a run met it."""

    goal: Goal
    measured: float | None
    state: Literal["met", "missed", "not measured"]
    reason: str = ""
    """Why it was not measured."""


def score(outcomes: Sequence[Outcome], device: Device, goals: Sequence[Goal] = GOALS) -> list[Score]:
    """Holds the results of a run against the goals. A check that failed without results, or did not run, measured none.

    Raises:
        ValueError: several results of a check are meant by one goal.
    """
    found = {outcome.name: outcome for outcome in outcomes}
    return [_score(goal, found, device) for goal in goals]


def _score(goal: Goal, outcomes: Mapping[str, Outcome], device: Device) -> Score:
    def not_measured(reason: str) -> Score:
        return Score(goal, None, "not measured", reason)

    if device == "cpu":
        return not_measured("no NVIDIA device")
    outcome = outcomes.get(goal.check)
    if outcome is None:
        return not_measured(f"check {goal.check} was not asked for")
    if outcome.findings is None:
        return not_measured(f"check {goal.check} {outcome.state}: {outcome.reason}")
    value = 1.0
    for beginning, power in ((goal.result, 1), (goal.over, -1)):
        if beginning:
            result = result_of(outcome.findings.results, beginning)
            if result is None:
                return not_measured(f"check {goal.check} has no result '{beginning}'")
            value *= result.value**power
    value *= goal.scale
    return Score(goal, value, "met" if _HOLDS[goal.comparison](value, goal.limit) else "missed")


def result_of(results: Sequence[Result], beginning: str) -> Result | None:
    """The result whose name begins so.

    Raises:
        ValueError: there are several.
    """
    found = [result for result in results if result.name.startswith(beginning)]
    if len(found) > 1:
        raise ValueError(f"'{beginning}' means several results: {', '.join(each.name for each in found)}")
    return found[0] if found else None


def show(scores: Sequence[Score]) -> None:
    """Prints a line for each goal: met, missed or not measured; what was measured; the goal."""
    print("goals:")
    for each in scores:
        goal = each.goal
        measured = "" if each.measured is None else f"{each.measured:.4g}"
        limit = f"{goal.comparison} {goal.limit:g} {goal.unit}"
        reason = f" ({each.reason})" if each.reason else ""
        print(f"  {each.state:<12} {measured:>10}  {limit:<14}  {goal.name}{reason}", flush=True)


def write(scores: Sequence[Score], heading: Sequence[Result], path: Path) -> None:
    """Writes JSON: what the run was, and a list of goals."""
    goals = [
        {
            "name": each.goal.name,
            "goal": f"{each.goal.comparison} {each.goal.limit:g}",
            "measured": each.measured,
            "unit": each.goal.unit,
            "state": each.state,
            "reason": each.reason,
            "check": each.goal.check,
        }
        for each in scores
    ]
    path.write_text(json.dumps({"run": [asdict(result) for result in heading], "goals": goals}, indent=2) + "\n")
