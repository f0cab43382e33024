"""State of a run that a checkpoint keeps beside weights. Plain data; any process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

STAGE_ORDER = ("sft", "rl")


@dataclass(slots=True)
class RunState:
    """State of a run that a checkpoint keeps beside weights; plain JSON.

    tokens_trained: tokens with a loss, all stages. wall_seconds: of earlier processes of this run.
    evaluations: by name (cold_start, cold_start_worked, dev, final), the latest of each.
    quarantine: records refused by reason code, and `admitted`. peak_rss_bytes: largest of earlier processes.
    mismatch_first, mismatch: the first and the latest mismatch table.
    evaluation_due: the run was stopped before the evaluation of this step was done.
    groups: `moerl.orchestration.groups.GroupSource.snapshot`; empty before the first step.
    """

    tokens_trained: int = 0
    wall_seconds: float = 0.0
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    quarantine: dict[str, int] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    mismatch_first: dict[str, dict[str, float]] = field(default_factory=dict)
    mismatch: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluation_due: bool = False
    groups: dict[str, Any] = field(default_factory=dict)


def find_state_problem(stored: dict[str, Any]) -> str | None:
    """Returns why a run cannot go on with the state of a checkpoint; None if it can."""
    if stored.get("stage") not in STAGE_ORDER:
        return f"no stage of a run: {stored.get('stage')!r:.40}"
    state = stored.get("run")
    unknown = sorted(state.keys() - asdict(RunState()).keys()) if isinstance(state, dict) else ()
    if unknown:
        return f"its run state has unknown keys: {', '.join(unknown)[:200]}"
    try:
        msgspec.convert(state, RunState)
    except msgspec.ValidationError as error:
        return f"its run state is not one: {error}"
    return None
