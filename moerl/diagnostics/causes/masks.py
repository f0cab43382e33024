"""Faults of kept sets: sets of another token, and sets without their token. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moerl.contract.fields import KeptSets
from moerl.diagnostics.causes.faults import CHANCE, CLEAR_PART, FEW, OVER_FLOOR, Fault, Ground, applied, repairing
from moerl.diagnostics.causes.gaps import Assumption, Change, Repair
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Evidence

SHIFTS = (0, -1, 1, -2, 2)
CLEARLY_BY_CHANCE = 0.005
"""Chance, at most, that log-probs fit sets of another token clearly better: 2 of 1,710 rollouts and places did."""


@dataclass(frozen=True, slots=True)
class Containment:
    """Counts of tokens and their kept sets."""

    num_listed: int
    """Sampled tokens with a listed set."""
    num_outside: int
    """Tokens of `num_listed` that are not in their sets."""
    best_shift: int
    """Token t is most often in the set of token t + best_shift; 0: in its own."""
    shares: Mapping[int, float]
    """By shift: share of the tokens t that are in the set of token t + shift."""


def containment(rollouts: Sequence[DumpedRollout]) -> Containment:
    """Counts over all rollouts that have kept sets."""
    inside, listed = dict.fromkeys(SHIFTS, 0), dict.fromkeys(SHIFTS, 0)
    for rollout in rollouts:
        if rollout.kept is None:
            continue
        offsets, ids = rollout.kept.offsets, rollout.kept.ids
        owner = np.repeat(np.arange(len(rollout)), np.diff(offsets))
        for shift in SHIFTS:
            token_of = owner - shift
            known = (token_of >= 0) & (token_of < len(rollout))
            known[known] = rollout.sampled[token_of[known]]
            listed[shift] += len(np.unique(token_of[known]))
            hits = known.copy()
            hits[known] = ids[known] == rollout.token_ids[token_of[known]]
            inside[shift] += len(np.unique(token_of[hits]))
    shares = {shift: inside[shift] / max(1, listed[shift]) for shift in SHIFTS}
    best = max(SHIFTS, key=lambda shift: (shares[shift], -abs(shift)))
    return Containment(listed[0], listed[0] - inside[0], best, shares)


def held_by_chance(rollouts: Sequence[DumpedRollout], shift: int) -> NDArray[np.float64]:
    """Returns for each rollout the chance that all of its moved sets hold their tokens though they are not theirs:
    float64 [rollouts]. Sets are large in a small vocabulary: a token is then in most of its neighbours' sets, too."""
    shares = containment(rollouts).shares
    share = float(np.median([shares[other] for other in SHIFTS if other not in (0, shift)]))
    return share ** np.array([containment([shifted(rollout, shift)]).num_listed for rollout in rollouts], np.float64)


def at_least_by_chance(count: int, expected: float) -> float:
    """Returns the chance of `count` or more rare events if so many are expected (Poisson)."""
    if not count or not expected:
        return float(not count)
    return 1.0 - sum(math.exp(i * math.log(expected) - expected - math.lgamma(i + 1)) for i in range(count))


def shifted(rollout: DumpedRollout, shift: int) -> DumpedRollout:
    """Gives token t the set of token t + shift, and drops sets of tokens that were not sampled."""
    if rollout.kept is None:
        return rollout
    at = np.arange(len(rollout)) + shift
    has_set = rollout.sampled & (at >= 0) & (at < len(rollout))
    # One more row, which lists nothing.
    longer = KeptSets(np.append(rollout.kept.offsets, rollout.kept.offsets[-1]), rollout.kept.ids)
    return replace(rollout, kept=longer.take(np.where(has_set, at, len(rollout))))


def with_tokens(rollout: DumpedRollout) -> DumpedRollout:
    """Adds its token to every listed set."""
    if rollout.kept is None:
        return rollout
    rows = np.split(rollout.kept.ids, rollout.kept.offsets[1:-1])
    for token in np.flatnonzero(rollout.sampled & (rollout.kept.sizes > 0)).tolist():
        rows[token] = np.union1d(rows[token], rollout.token_ids[token : token + 1]).astype(rollout.kept.ids.dtype)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return replace(rollout, kept=KeptSets(offsets, np.concatenate(rows)))


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
    """Returns sets of another token, in those rollouts whose log-probs are far nearer under them than under their own
    sets with the token in them, or are nearer and whose moved sets all hold their tokens, if these are too many for
    chance; and in those whose moved sets all hold their tokens, if others have this shift. If that is nearly all, also
    in those whose sets hold their tokens by chance."""
    if not shifts:
        return []
    rollouts = ground.rollouts
    listed_R = np.array([rollout.kept is not None for rollout in rollouts])
    start = [Assumption(kept="listed" if has else "full") for has in listed_R]

    def means(change: Change) -> NDArray[np.float64]:
        return ground.gaps.differences(applied(start, change, listed_R)).means

    changes = {shift: repairing(Repair(f"masks {shift:+d}", partial(shifted, shift=shift), "sets")) for shift in shifts}
    filled_R = means(_FILLED)
    gains = {shift: filled_R - means(changes[shift]) for shift in shifts}
    better = {shift: listed_R & (gains[shift] > 0) for shift in shifts}
    # A rollout that is left without sets shows nothing.
    clearly = {
        shift: better[shift] & _has_sets(rollouts, shift) & (gains[shift] > OVER_FLOOR * ground.floors)
        for shift in shifts
    }
    fits = {shift: outside_R & listed_R & _hold_all(rollouts, shift) for shift in shifts}
    fits_R = np.any([*fits.values()], axis=0)
    left_R, faults = outside_R & listed_R, list[Fault]()
    for shift in sorted(shifts, key=lambda shift: -int((better[shift] & fits[shift]).sum())):
        of_R = left_R & clearly[shift] & (gains[shift] > CLEAR_PART * filled_R) & (fits[shift] | ~fits_R)
        # A little less is chance in one rollout, and may be none in several together.
        by_chance = float(held_by_chance(rollouts, shift)[left_R].sum())
        for which, chance in ((clearly, CLEARLY_BY_CHANCE), (better, 0.5)):
            both_R = left_R & which[shift] & fits[shift]
            if at_least_by_chance(int(both_R.sum()), chance * by_chance) < CHANCE:
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


def _has_sets(rollouts: Sequence[DumpedRollout], shift: int) -> NDArray[np.bool_]:
    """Returns bool [rollouts]: some token of the rollout has a moved set."""
    return np.array([containment([shifted(rollout, shift)]).num_listed > 0 for rollout in rollouts])


def _hold_all(rollouts: Sequence[DumpedRollout], shift: int) -> NDArray[np.bool_]:
    """Returns bool [rollouts]: all moved sets of the rollout, if any, hold their tokens."""
    return np.array([not containment([shifted(rollout, shift)]).num_outside for rollout in rollouts])
