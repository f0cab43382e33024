"""State of a run that a checkpoint keeps next to the weights. Plain data; any process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

STAGE_ORDER = ("sft", "rl")


@dataclass(slots=True)
class RunState:
    """State of a run that a checkpoint keeps next to the weights; plain JSON."""

    tokens_trained: int = 0
    """Tokens with a loss, in all stages."""
    wall_seconds: float = 0.0
    """Time of earlier processes of this run."""
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Latest evaluation by name (cold_start, cold_start_worked, dev, final): fields of `Evaluation`."""
    quarantine: dict[str, int] = field(default_factory=dict)
    """Number of refused records by reason code, and of `admitted` ones."""
    peak_rss_bytes: int = 0
    """Peak resident memory of the controller, the largest of earlier processes of this run."""
    mismatch_first: dict[str, dict[str, float]] = field(default_factory=dict)
    """First mismatch table, by scorer and metric; empty before it."""
    mismatch: dict[str, dict[str, float]] = field(default_factory=dict)
    """Latest mismatch table, by scorer and metric."""
    evaluation_due: bool = False
    """True if the run was stopped before the evaluation of this step was done."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Result of `moerl.orchestration.groups.GroupSource.snapshot`; empty before the first step."""


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
