"""Fewer points and columns, so that reports of long runs stay small. Pure; torch-free; any process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moerl.diagnostics.report.data import LayerMap, ReportStep


def thinned_points(ys: Sequence[float], limit: int) -> list[int]:
    """Returns indices of at most `limit` points of a curve, in order: its first and last and the smallest and largest
    of each stretch, so that no spike is lost."""
    if len(ys) <= limit:
        return [*range(len(ys))]
    values = np.asarray(ys, np.float64)
    chosen = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), (limit - 2) // 2):
        chosen |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
    return sorted(chosen)


def thinned_steps(steps: Sequence[ReportStep], limit: int) -> tuple[ReportStep, ...]:
    """Returns the steps with at most `limit` values of each metric (`thinned_points`), without steps that have no value
    left."""
    if len(steps) <= limit:
        return tuple(steps)
    kept: list[dict[str, float]] = [{} for _ in steps]
    for name in sorted({name for step in steps for name in step.metrics}):
        places = [place for place, step in enumerate(steps) if name in step.metrics]
        values = [steps[place].metrics[name] for place in places]
        for at in thinned_points(values, limit):
            kept[places[at]][name] = values[at]
    return tuple(ReportStep(step.step, metrics) for step, metrics in zip(steps, kept, strict=True) if metrics)


def joined_columns(each: LayerMap, limit: int) -> LayerMap:
    """Returns the columns in `limit` groups, with the means of their shares, if there are more columns than that."""
    if len(each.columns) <= limit:
        return each
    values = np.array(each.differing, np.float64)  # None becomes nan
    parts = np.array_split(np.arange(len(each.columns)), limit)
    # A group of groups goes from the start of its first to the end of its last.
    firsts = (each.columns[part[0]].partition(" to ")[0] for part in parts)
    lasts = (each.columns[part[-1]].rpartition(" to ")[2] for part in parts)
    starts = [int(part[0]) for part in parts]
    there = np.isfinite(values)
    sums = np.add.reduceat(np.where(there, values, 0.0), starts, axis=1)
    counts = np.add.reduceat(there, starts, axis=1)
    means = tuple(
        tuple(float(s / n) if n else None for s, n in zip(*row, strict=True)) for row in zip(sums, counts, strict=True)
    )
    names = tuple(f"{first} to {last}" for first, last in zip(firsts, lasts, strict=True))
    return replace(each, columns=names, differing=means)
