"""Faults of kept sets: sets of another token, and sets without their token. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.causes.faults import CHANCE, FEW, OVER_FLOOR, Fault, Ground, repairing
from moerl.diagnostics.causes.gaps import Assumption, Change, Repair
from moerl.diagnostics.causes.masks import at_least_by_chance, containment, held_by_chance, shifted, with_tokens
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Evidence


def mask_faults(ground: Ground) -> list[Fault]:
    """Returns the faults of kept sets that do not hold their token: sets of another token, if the log-probs fit them,
    or sets without their token."""
    rollouts = ground.rollouts
    held = [containment([rollout]) for rollout in rollouts]
    outside_R = np.array([each.num_outside > 0 for each in held])
    shifts = {each.best_shift for each in held if each.num_outside and each.best_shift}
    faults = _mask_shifts(ground, sorted(shifts), outside_R)
    left_R = outside_R & ~np.any([fault.of_R for fault in faults], axis=0) if faults else outside_R
    if left_R.any():
        share = _share_outside(rollouts, left_R)
        faults.append(Fault("mask_misses", "sampled tokens are not in their kept sets", (share,), _FILLED, left_R))
    return faults


_FILLED = repairing(Repair("masks: with their token", with_tokens, "sets"))


def _share_outside(rollouts: Sequence[DumpedRollout], of_R: NDArray[np.bool_]) -> Evidence:
    held = containment([rollout for rollout, has in zip(rollouts, of_R, strict=True) if has])
    return Evidence("sampled tokens that are not in their kept set", f"{held.num_outside / held.num_listed:.1%}", "0")


def _mask_shifts(ground: Ground, shifts: Sequence[int], outside_R: NDArray[np.bool_]) -> list[Fault]:
    """Returns sets of another token, in those rollouts whose log-probs fit them clearly better than their own sets with
    the token in them, or fit them better and whose moved sets all hold their tokens, if these are too many for chance;
    and in those whose moved sets all hold their tokens, if others have this shift. If that is nearly all, also in those
    whose sets hold their tokens by chance."""
    if not shifts:
        return []
    rollouts = ground.rollouts
    listed_R = np.array([rollout.kept is not None for rollout in rollouts])
    start = [Assumption(kept="listed" if has else "full") for has in listed_R]

    def means(change: Change) -> NDArray[np.float64]:
        changed_ = [change(each) if has else each for each, has in zip(start, listed_R, strict=True)]
        return ground.gaps.differences(changed_).means

    changes = {shift: repairing(Repair(f"masks {shift:+d}", partial(shifted, shift=shift), "sets")) for shift in shifts}
    filled_R = means(_FILLED)
    gains = {shift: filled_R - means(changes[shift]) for shift in shifts}
    better = {shift: listed_R & (gains[shift] > 0) for shift in shifts}
    # Without a place that holds all tokens, a little is chance.
    clearly = {shift: better[shift] & (gains[shift] > OVER_FLOOR * ground.floors) for shift in shifts}
    fits = {shift: outside_R & listed_R & _holds(rollouts, shift) for shift in shifts}
    fits_R = np.any([*fits.values()], axis=0)
    left_R, faults = outside_R & listed_R, list[Fault]()
    for shift in sorted(shifts, key=lambda shift: -int((better[shift] & fits[shift]).sum())):
        of_R = left_R & clearly[shift] & (fits[shift] | ~fits_R)
        # Log-probs that fit a little better are a throw of a coin; several rollouts together may be none.
        both_R = left_R & better[shift] & fits[shift]
        if at_least_by_chance(int(both_R.sum()), 0.5 * float(held_by_chance(rollouts, shift)[left_R].sum())) < CHANCE:
            of_R |= both_R
        if of_R.any():
            of_R |= left_R & fits[shift]
        if of_R.sum() > (1.0 - FEW) * listed_R.sum():
            of_R |= better[shift]
        if of_R.any():
            direction = "late" if shift > 0 else "early"
            title = f"kept sets are {abs(shift)} token{'s' if abs(shift) > 1 else ''} too {direction}"
            faults.append(Fault("mask_shift", title, (_share_outside(rollouts, of_R),), changes[shift], of_R))
            left_R &= ~of_R
    return faults


def _holds(rollouts: Sequence[DumpedRollout], shift: int) -> NDArray[np.bool_]:
    """Returns bool [rollouts]: all moved sets of the rollout hold their tokens."""
    return np.array([not containment([shifted(rollout, shift)]).num_outside for rollout in rollouts])
