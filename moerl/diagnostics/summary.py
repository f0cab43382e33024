"""`summary.json` and the closing lines of a run. Torch-free; runs in the controller."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from moerl.contract.files import atomic_file
from moerl.telemetry.metrics import SCORERS

SUMMARY_FILE = "summary.json"
SKILL_STANDARD_ERRORS = 2.0
"""The final model must beat the worked cold start by this many standard errors before skill is claimed."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The numbers of a finished run."""

    recipe: str
    """Name of the recipe."""
    seed: int
    """Seed of the run."""
    steps: int
    """Batches of rollouts trained on."""
    tokens_trained: int
    """Tokens whose loss was part of an update."""
    wall_seconds: float
    """Sum over all processes that worked on the run, one after the other."""
    peak_rss_bytes: int
    """Sum over the controller, the ranks and an embedded engine."""
    heldout_problems: int
    """Problems that nothing else looked at, behind each accuracy."""
    heldout_accuracy_cold_start: float | None = None
    """Greedy accuracy in [0, 1]; None if not measured."""
    heldout_accuracy_cold_start_worked: float | None = None
    """Greedy accuracy of the cold start made to show its work; None if not measured."""
    heldout_accuracy_final: float | None = None
    """Greedy accuracy of the final model; None if not measured."""
    response_length_cold_start: float | None = None
    """Mean greedy response, tokens; None if not measured."""
    response_length_final: float | None = None
    """Mean greedy response, tokens; None if not measured."""
    num_quarantined: int = 0
    """Trajectories that broke the data contract."""
    mismatch_first: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """First mismatch table: figures per scorer (`moerl.telemetry.metrics.SCORERS`), by metric name. Sampling sharpens
    in training, so the first is larger than the last."""
    mismatch: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Last mismatch table, like the first."""

    @property
    def shows_skill(self) -> bool:
        """True if the final model beats the worked cold start by more than chance would explain.

        With accuracies p, q on n problems each, the standard error of the difference, taken as independent, is
        sqrt((p (1 - p) + q (1 - q)) / n).
        """
        worked, final = self.heldout_accuracy_cold_start_worked, self.heldout_accuracy_final
        if worked is None or final is None:
            return False
        error = math.sqrt((worked * (1 - worked) + final * (1 - final)) / self.heldout_problems)
        return final - worked > SKILL_STANDARD_ERRORS * error


def write_summary(summary: RunSummary, run_dir: Path) -> Path:
    """Writes `summary.json` atomically; returns its path."""
    path = run_dir / SUMMARY_FILE
    text = json.dumps({**asdict(summary), "shows_skill": summary.shows_skill}, indent=2, allow_nan=False)
    with atomic_file(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
    return path


def closing_lines(summary: RunSummary, run_dir: Path) -> list[str]:
    """Returns the last lines of a run: accuracy, mismatch, cost and the run directory."""
    cost = (
        f"{summary.steps} steps, {summary.tokens_trained:,} tokens trained in {summary.wall_seconds / 60:.1f} minutes"
        f" ({summary.tokens_trained / summary.wall_seconds:,.0f} tokens/s, start and evaluations included),"
        f" peak memory {summary.peak_rss_bytes / 2**30:.1f} GiB"
    )
    lines = [*_accuracy_lines(summary), *_mismatch_lines(summary), cost]
    if summary.num_quarantined:
        lines.append(f"{summary.num_quarantined} trajectories broke the data contract: see {run_dir / 'quarantine'}")
    return [*lines, f"run directory: {run_dir}"]


def _accuracy_lines(summary: RunSummary) -> list[str]:
    cold, final = summary.heldout_accuracy_cold_start, summary.heldout_accuracy_final
    on = f"greedy, {summary.heldout_problems} held-out problems"
    if cold is None or final is None:
        only = cold if final is None else final
        return [] if only is None else [f"accuracy {only:.3f} ({on})"]
    lines = [f"accuracy {cold:.3f} -> {final:.3f} ({on})"]
    before, after = summary.response_length_cold_start, summary.response_length_final
    if before is not None and after is not None:
        lines.append(f"response length {before:.1f} -> {after:.1f} tokens")
    worked = summary.heldout_accuracy_cold_start_worked
    if worked is None:
        return lines
    # The gain over the cold start is made of behaviour or of skill.
    gain = "does not beat it clearly: it learned to show its work, not to calculate better"
    if summary.shows_skill:
        gain = "beats it: it learned to show its work, and works better"
    elif final <= cold:
        gain = "does not beat the cold start: nothing was gained"
    return [*lines, f"the cold start made to show its work: {worked:.3f}; the final model {gain}"]


def _mismatch_lines(summary: RunSummary) -> list[str]:
    """Returns the mismatch table of the first and the last step, a line for each scorer."""
    tables = {"first step": summary.mismatch_first, "last step": summary.mismatch}
    figures = {
        scorer: [table.get(scorer, {}).get("mismatch/logprob_abs_mean") for table in tables.values()]
        for scorer in SCORERS
    }
    if any(figure is None for row in figures.values() for figure in row):
        return []
    heading = "sampler, trainer: mean |log-prob difference|, nats"
    rows = [(f"  {SCORERS[scorer]}", *(f"{figure:.1e}" for figure in row)) for scorer, row in figures.items()]
    return [f"{name:<{len(heading)}}{first:>13}{last:>12}" for name, first, last in [(heading, *tables), *rows]]
