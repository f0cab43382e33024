"""Headlines of a run's report: reward, accuracy, and the mismatch gap with values to compare the gap with.

Pure; torch-free; any process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moerl.diagnostics.report.data import Headline, Level
from moerl.diagnostics.report.run_findings import GAP_FAULT, GAP_NOTE, RECENT, Seen
from moerl.diagnostics.report.words import brief

ACCURACIES = (("heldout/accuracy", "held-out problems"), ("accuracy/mean", "dev problems"))
"""Metrics of evaluations, the most telling first, and the names of their problems."""
_ROUNDING = {"float32": "float32 rounding of the same weights makes about 1e-07 nats"}
_ROUNDING_16 = f"16-bit rounding makes 0.001 to {GAP_NOTE:g} nats"


def headlines_of(rows: Sequence[Mapping[str, Any]], seen: Seen) -> tuple[Headline, ...]:
    """Returns reward, accuracy and gap, without those that the run did not measure.

    Args:
        rows: of `metrics.jsonl`, all stages. seen: of the stage rl.
    """
    found = (_reward(seen), _accuracy(rows), _gap(seen))
    return tuple(headline for headline in found if headline is not None)


def _reward(seen: Seen) -> Headline | None:
    values = seen.values("reward/mean")
    if not values:
        return None
    first, last = _mean(values[:RECENT]), _mean(values[-RECENT:])
    many = min(RECENT, len(values))
    return Headline("Reward", f"{last:.3f}", (f"mean of the last {many} steps; {first:.3f} in the first {many}",))


def _accuracy(rows: Sequence[Mapping[str, Any]]) -> Headline | None:
    evaluations = [row for row in rows if row["stage"] == "evaluation"]
    for metric, where in ACCURACIES:
        found = [(row["step"], row[metric]) for row in evaluations if metric in row]
        if found:
            (first_step, first), (last_step, last) = found[0], found[-1]
            before = f"; {first:.3f} after step {first_step}" if len(found) > 1 else ""
            return Headline("Accuracy", f"{last:.3f}", (f"greedy, {where}, after step {last_step}{before}",))
    return None


def _gap(seen: Seen) -> Headline | None:
    if not seen.trained:
        return None
    level: Level = "fault" if seen.now >= GAP_FAULT else "note" if seen.now >= GAP_NOTE else "good"
    rounding = _ROUNDING.get(seen.settings.precision or "", _ROUNDING_16)
    notes = [f"mean |log-prob difference| of trainer and sampler; healthy below {GAP_NOTE:g} nats", rounding]
    floor = seen.part("unexplained")
    if seen.gap and seen.settings.routing != "off" and seen.settings.masks:
        # With both kept, the gap is its own floor: "1.0 times its floor" would say nothing.
        notes.insert(1, f"with nothing kept it would be {brief(seen.total)} nats")
    elif floor > 0.0 and seen.trained_at_table is not None:
        times = seen.trained_at_table / floor
        notes.insert(1, f"{times:.1f} times its floor: {brief(floor)} nats remain with routing and masks kept")
    return Headline("Mismatch gap", f"{brief(seen.now)} nats", tuple(notes), level)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
