"""Gaps as sums of parts: what each fault, routing, masks, an engine apart and rounding make of them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.causes.apart import Apart
from moerl.diagnostics.causes.faults import CLEAN, Fault, Ground, changed
from moerl.diagnostics.causes.gaps import Assumption, Plan
from moerl.diagnostics.causes.texts import CAUSES
from moerl.diagnostics.report.data import Decomposition, Interval, Share


@dataclass(frozen=True, slots=True)
class Accounts:
    """Sums of parts. Every part is a difference of two mean |d|, so that the parts add up to the whole."""

    ground: Ground
    """Rollouts with their scores, and the floor."""
    recorded: Plan
    """Plan that enforces repaired records, everything else put right, too."""
    level_R: NDArray[np.float64]
    """Nats: mean |d| that the arithmetic of each rollout makes, and its routing if its record is of no use."""
    groups: Sequence[Apart]
    """Tokens that are apart; no token is in two groups."""

    def raw(self) -> list[Assumption]:
        """Returns the plan of the dump as it came: its record is enforced if it has one, and its kept sets count."""
        return [
            Assumption(
                "own" if rollout.expert_ids is None else "recorded", "full" if rollout.kept is None else "listed"
            )
            for rollout in self.ground.rollouts
        ]

    def as_recorded(
        self, inputs: Sequence[Fault], routes: Sequence[Fault], others: Sequence[Fault]
    ) -> tuple[Decomposition, list[Interval]]:
        """Returns the sum from the dump as it came to the last repair, one fault after the other, in the mean of both
        orders; and the part of each fault.

        Faults of prompt tokens come first in both, and those of routes one after the other: later repairs were made on
        their result.
        """
        first = self.ground.gaps.differences(self.raw()).sizes
        faults = [*inputs, *routes, *others]
        forth, last = self._chain(faults, first)
        back, _ = self._chain([*inputs, *reversed(others), *routes], first)
        parts = [(forth[id(fault)] + back[id(fault)]) / 2 for fault in faults]
        by_cause: dict[str, NDArray[np.float64]] = {}
        for fault, part in zip(faults, parts, strict=True):
            by_cause[fault.cause] = by_cause.get(fault.cause, 0.0) + part
        closed = self._closed("as recorded", first, last, by_cause)
        return closed, [self.ground.bootstrap.mean(part) for part in parts]

    def _chain(
        self, faults: Sequence[Fault], first: NDArray[np.float64]
    ) -> tuple[dict[int, NDArray[np.float64]], NDArray[np.float64]]:
        """Returns by how much each fault lowers |d| of every token when it is taken back, and |d| after all of them."""
        sizes, parts = first, dict[int, NDArray[np.float64]]()
        for number, fault in enumerate(faults):
            after = self.ground.gaps.differences(changed(self.raw(), faults[: number + 1])).sizes
            parts[id(fault)] = sizes - after
            sizes = after
        return parts, sizes

    def nothing_kept(self, values: Sequence[Fault], masks: Sequence[Fault]) -> Decomposition:
        """Returns the sum that starts from own routing over the vocabulary: faults of values first, then masks and
        routing, in the mean of both orders."""
        gaps = self.ground.gaps
        base = [Assumption()] * len(gaps.rollouts)
        first = sizes = gaps.differences(base).sizes
        parts: dict[str, NDArray[np.float64]] = {}
        for number, fault in enumerate(values):
            after = gaps.differences(_over_all(changed(base, values[: number + 1]))).sizes
            if (sizes != after).any():
                parts[fault.cause] = parts.get(fault.cause, 0.0) + sizes - after
            sizes = after
        listed = changed([replace(each, routing="own") for each in self.raw()], [*masks, *values])
        neither = _over_all(listed)
        plans = (neither, listed, self._enforced(neither), self._enforced(listed))
        n, k, e, b = (gaps.differences(plan).sizes for plan in plans)
        if any(each.kept != "full" for each in listed):
            parts["masks"] = ((n - k) + (e - b)) / 2
        if any(each.routing == "recorded" for each in self.recorded):
            parts["routing"] = ((n - e) + (k - b)) / 2
        return self._closed("nothing kept", first, b, parts)

    def _enforced(self, plan: Plan) -> list[Assumption]:
        """Returns the plan with the experts of repaired records."""
        return [
            replace(each, routing=record.routing, repairs=record.repairs)
            for each, record in zip(plan, self.recorded, strict=True)
        ]

    def _closed(
        self, name: str, first: NDArray[np.float64], last: NDArray[np.float64], parts: dict[str, NDArray[np.float64]]
    ) -> Decomposition:
        """Returns the sum of these parts and of what is left: tokens that are apart, rounding up to its level, and the
        rest."""
        rest = last.copy()
        for group in self.groups:
            excess = np.zeros_like(rest)
            excess[group.tokens_N] = np.maximum(0.0, rest[group.tokens_N].mean() - group.others)
            parts[group.cause] = parts.get(group.cause, 0.0) + excess
            rest = rest - excess
        counts = np.diff(self.ground.gaps.starts)
        level = float((self.level_R * counts).sum() / counts.sum())
        rounding = rest * min(1.0, CLEAN * level / max(float(rest.mean()), 1e-12))
        parts |= {"precision": rounding, "unexplained": rest - rounding}
        mean = self.ground.bootstrap.mean
        shares = [Share(cause, CAUSES[cause].label, mean(part)) for cause, part in parts.items()]
        return Decomposition(name, mean(first), tuple(shares))


def _over_all(plan: Plan) -> list[Assumption]:
    return [replace(each, kept="full") for each in plan]
