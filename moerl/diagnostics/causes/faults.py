"""Faults that were found, and how clear it is that rollouts have one. Torch-free.

Shape legend: R = rollouts, N = sampled tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.causes.gaps import Assumption, Bootstrap, Change, Differences, Gaps, Plan, Repair
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Evidence

CLEAN = 2.0
"""Times the floor, up to which the gap left is called rounding (docs/routing_mismatch.md has that of sound dumps)."""
MOST_FLOOR = 0.1
"""Nats, above which rounding is too coarse to call anything sound. Models in bfloat16 have 0.002 to 0.03."""
COARSE = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.11, 1.25, 1.43, 1.67, 2.0)
"""Temperature factors of the first look."""
ODD = 4.0
"""Times the floor, above which one rollout of `LEAST_TOKENS` is odd. Sound ones stay under 3."""
LEAST_TOKENS = 16
CLEAR_PART = 0.5
"""Part of the gap that a change must close."""
MOST = 0.7
"""Part of the gap of a rollout that a change closes if it is right, and nothing else is wrong with it."""
OVER_FLOOR = 0.5
"""Times the floor, that a change must close."""
FEW = 0.25
"""Share of rollouts below which they are few: they follow the others if a change does them good, too."""

CHANCE = 0.01
"""Chance below which rollouts that fit a change are no accident."""


def unchanged(assumption: Assumption) -> Assumption:
    """Returns the assumption: a change that leaves nothing out is measured against it."""
    return assumption


@dataclass(frozen=True, slots=True, eq=False)
class Fault:
    """A fault that was found, or that may be there, with the change that takes it back."""

    cause: str
    """Key of `CAUSES`."""
    title: str
    """The fault in one line."""
    evidence: tuple[Evidence, ...]
    """Measurements that show the fault."""
    change: Change
    """Takes the fault back in the assumption of a rollout that has it."""
    of_R: NDArray[np.bool_]
    """True for the rollouts that have it, or that may have it."""
    is_judged: bool = False
    """True for a fault of routes whose repair brought the mean of these rollouts nearer, so that some may not have
    it."""
    against: Change = unchanged
    """Leaves out what the change leaves out, and changes nothing else: what is gained is measured from there."""


def applied(plan: Plan, change: Change, of_R: NDArray[np.bool_]) -> list[Assumption]:
    """Returns the plan with a change of these rollouts."""
    return [change(each) if has else each for each, has in zip(plan, of_R, strict=True)]


def changed(plan: Plan, faults: Sequence[Fault]) -> list[Assumption]:
    """Returns the plan with all these faults taken back."""
    now = list(plan)
    for fault in faults:
        now = applied(now, fault.change, fault.of_R)
    return now


def repairing(repair: Repair) -> Change:
    """Returns the change that adds a repair."""
    return partial(Assumption.with_repair, repair=repair)


@dataclass(frozen=True, slots=True)
class Ground:
    """Rollouts with their scores, and the gap that is no fault."""

    gaps: Gaps
    """All rollouts and their scores."""
    bootstrap: Bootstrap
    """Resampled rollouts behind all intervals."""
    floor: float
    """Mean |d| that rounding makes with the same experts, nats."""
    own_floor: float
    """The same if each side has the experts of its own routers: rounding decides ties between experts, too."""

    @property
    def floors(self) -> NDArray[np.float64]:
        """Mean |d| of a sound rollout, nats: without recorded routes nobody knows the experts of the engine."""
        return np.array([self.own_floor if each.expert_ids is None else self.floor for each in self.rollouts])

    @property
    def rollouts(self) -> Sequence[DumpedRollout]:
        return self.gaps.rollouts

    def odd(self, means_R: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Returns bool [R]: rollouts that are not sound by themselves. means_R: mean |d|."""
        # A rollout of fewer tokens says nothing by itself.
        return (means_R > ODD * self.floors) & (np.diff(self.gaps.starts) >= LEAST_TOKENS)

    def helped(
        self, before: Plan, after: Plan, may_R: NDArray[np.bool_], part: float = CLEAR_PART, *, is_last: bool = False
    ) -> NDArray[np.bool_]:
        """Returns the rollouts, of those that may, of which a change closes a clear part of the gap: each by itself, or
        all that are left together.

        Args:
            part: share of the gap that must be closed of the rollouts that are left together. If these are few, or if
                `part` is 0, the change must hurt none of them: sound rollouts may be among them.
            is_last: True if all other faults have been taken back: a change that helps one among many, and leaves it
                odd, is chance however much it closes.
        """
        one, other = self.gaps.differences(before), self.gaps.differences(after)
        gains_R = one.means - other.means
        odd, fits = self.odd(one.means) & may_R, ~(is_last & self.odd(other.means))
        clear = odd & (gains_R > CLEAR_PART * one.means)
        if 2 * clear.sum() < odd.sum():  # one among many that it does not help is chance, unless nearly all is closed
            clear &= (gains_R > MOST * one.means) & fits
        if clear.any():  # the fault is there: what is too short to show it by itself may have it, too
            clear |= may_R & fits & (gains_R > CLEAR_PART * one.means) & (gains_R > self.floors)
        rest = may_R & ~clear
        if not rest.any():
            return clear
        gained, of_them = (self.bootstrap.mean(each, rest) for each in (one.sizes - other.sizes, one.sizes))
        is_few = rest.sum() < FEW * may_R.sum()
        if (is_few or not part) and (gains_R < -OVER_FLOOR * self.floors)[rest].any():
            return clear
        least = OVER_FLOOR * float(self.floors[rest].mean()) if part else 0.0
        limit = least if is_few else max(part * of_them.value, least)
        return may_R.copy() if gained.value > limit and (is_few or gained.low > 0) else clear

    def seen(self, of_R: NDArray[np.bool_], before: Plan, after: Plan) -> Evidence:
        """Returns the gap of these rollouts, before and after, as evidence."""
        one, other = (self.mean_of(self.gaps.differences(plan), of_R) for plan in (before, after))
        return Evidence("mean |d| as the dump says, and put right", f"{one:.2e}, {other:.2e} nats")

    def mean_of(self, differences: Differences, of_R: NDArray[np.bool_]) -> float:
        """Returns the mean |d| of the tokens of these rollouts; 0 without rollouts."""
        of_N = np.repeat(of_R, np.diff(self.gaps.starts))
        return float(differences.sizes[of_N].mean()) if of_N.any() else 0.0
