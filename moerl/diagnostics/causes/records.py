"""Records of routes against the model's own choice: which rollouts have a fault, and which fault. Torch-free.

First all rollouts with a record are searched together, then those that are still odd under it, as long as that brings
some nearer, then each of the rest alone. A record that no repair mends, though the model's own choice fits, is none of
these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.causes.faults import CLEAR_PART, COARSE, ODD, Fault, Ground, applied, changed, repairing
from moerl.diagnostics.causes.gaps import Assumption, Plan, Repair
from moerl.diagnostics.causes.route_faults import search_routes
from moerl.diagnostics.causes.routes import POOR, OwnIds, Place, compare, jaccard
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Evidence

MAX_IN_VAIN = 6
"""Rollouts in a row that are searched alone and show no fault, after which the search ends."""
OWN_FITS = 0.5
"""Times the gap of the record, below which that of the model's own choice shows the record to be at fault."""


@dataclass(slots=True)
class Records:
    """Result of the search."""

    plan: list[Assumption]
    """Plan that enforces repaired records."""
    faults: list[Fault] = field(default_factory=list)
    """Faults in the order of their repairs."""
    own_level: float = 0.0
    """Mean |d| of sound rollouts under the model's own choice, nats; 0 without sound records."""
    agreement: tuple[float, float] | None = None
    """Mean Jaccard of the record with the model's own choice, as recorded and repaired; None without routes."""


def search_records(ground: Ground, start: Plan) -> Records:
    """Finds the faults of recorded routes. start: plan with the model's own routing, everything else put right."""
    gaps = ground.gaps
    rollouts = gaps.repaired(start)
    has_R = np.array([rollout.expert_ids is not None for rollout in rollouts])
    enforced = [replace(each, routing="recorded") if has else each for each, has in zip(start, has_R, strict=True)]
    if not has_R.any():
        return Records(enforced)
    own = {rollout.name: each for rollout, each in zip(rollouts, gaps.own_ids(start), strict=True)}
    search = _Search(ground, rollouts, own, has_R, enforced, gaps.differences(start).means)
    search.together(has_R)
    while (suspect := search.suspect()).any() and search.together(suspect):
        pass
    in_vain = 0
    for number in np.flatnonzero(search.suspect()).tolist():
        in_vain = 0 if search.together(np.arange(len(rollouts)) == number) else in_vain + 1
        if in_vain == MAX_IN_VAIN:
            break
    search.foreign()
    sound = has_R.copy()
    for fault in search.faults:
        sound &= ~fault.of_R
    level = ground.mean_of(gaps.differences(start), sound)
    return Records(search.plan(), search.faults, level, search.agreement())


@dataclass(slots=True)
class _Search:
    ground: Ground
    rollouts: Sequence[DumpedRollout]
    own: OwnIds
    has_R: NDArray[np.bool_]
    enforced: list[Assumption]
    own_R: NDArray[np.float64]
    """Mean |d| with the model's own choice."""
    faults: list[Fault] = field(default_factory=list)
    searched: int = 0

    def plan(self) -> list[Assumption]:
        return changed(self.enforced, self.faults)

    def suspect(self) -> NDArray[np.bool_]:
        """Returns bool [R]: rollouts that are odd under their record as far as it is repaired, and far less under the
        model's own choice: the record is at fault."""
        means_R = self.ground.gaps.differences(self.plan()).means
        return self.ground.odd(means_R) & self.has_R & (self.own_R < OWN_FITS * means_R)

    def together(self, of_R: NDArray[np.bool_]) -> bool:
        """Searches these rollouts anew, from their record as it came. Returns True if a fault was found whose repair
        brings some odd rollouts clearly nearer."""
        self.searched += 1
        num_experts = self.ground.gaps.scorers[0].spec.num_experts
        faults = search_routes(self.rollouts, of_R, self.own, num_experts, self._judge, f"search {self.searched}")
        if not faults:
            return False
        after = changed(self.enforced, faults)
        judged_R = np.any([fault.of_R & fault.is_judged for fault in faults], axis=0)
        helped_R = self._helped(after, judged_R) if judged_R.any() else judged_R
        faults = [replace(fault, of_R=fault.of_R & helped_R) if fault.is_judged else fault for fault in faults]
        named = np.any([fault.of_R for fault in faults], axis=0)
        before_R = self.ground.gaps.differences(self.plan()).means
        after_R = self.ground.gaps.differences(changed(self.enforced, faults)).means
        first = np.array([not any(fault.of_R[i] for fault in self.faults) for i in range(len(named))])
        nearer = named & (first | (before_R - after_R > CLEAR_PART * before_R))
        if not nearer.any():
            return False
        self.faults = [*_only(self.faults, ~nearer), *_only(faults, nearer)]
        return bool((self.ground.odd(before_R) & nearer & (before_R - after_R > CLEAR_PART * before_R)).any())

    def _helped(self, after: Plan, judged_R: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns the rollouts, of those judged, that the repairs of `after` help. Another temperature than the one
        said hides that in single rollouts: if one fits clearly better, they are compared at it."""
        helped_R = self.ground.helped(self.enforced, after, judged_R, part=0.0)
        if not (judged_R & ~helped_R).any():
            return helped_R
        means_F = self.ground.gaps.means_by_factor(after, COARSE)[:, judged_R].mean(1)
        best, said = int(means_F.argmin()), means_F[COARSE.index(1.0)]
        if means_F[best] > (1.0 - CLEAR_PART) * said or best in (0, len(COARSE) - 1):
            return helped_R
        one, other = ([replace(each, factor=COARSE[best]) for each in plan] for plan in (self.enforced, after))
        return helped_R | self.ground.helped(one, other, judged_R, part=0.0)

    def _judge(self, one: Repair, other: Repair, of_R: NDArray[np.bool_]) -> bool:
        plans = (applied(self.enforced, repairing(repair), of_R) for repair in (one, other))
        gap, left = map(self.ground.gaps.differences, plans)
        gained = self.ground.bootstrap.mean(gap.sizes - left.sizes, of_R)
        if of_R.sum() < 3:
            return gained.value > CLEAR_PART * self.ground.mean_of(gap, of_R)
        return gained.value > 0 and gained.low > 0

    def foreign(self) -> None:
        """Adds faults for the records that are still suspect: the model's own choice replaces them."""
        of_R = self.suspect()
        if not of_R.any():
            return
        means_R = self.ground.gaps.differences(self.plan()).means
        # A rollout too short to be suspect by itself may share the fault of others.
        of_R |= self.has_R & (means_R > ODD * self.ground.floor) & (self.own_R < OWN_FITS * means_R)
        owners = {i: self._owner(i) for i in np.flatnonzero(of_R).tolist()}
        exchanged = of_R & np.array([owners.get(i) is not None for i in range(len(of_R))])
        for those, title in (
            (exchanged, "routes are those of other rollouts"),
            (of_R & ~exchanged, "routes are not those of the tokens, and the model's own choice fits"),
        ):
            if not those.any():
                continue
            seen = Evidence(
                "mean |d| with the record, and with the model's own choice",
                f"{means_R[those].mean():.2e}, {self.own_R[those].mean():.2e} nats",
            )
            pairs = [
                f"{self.rollouts[i].name} has those of {owners[i]}" for i in np.flatnonzero(those).tolist() if owners[i]
            ]
            evidence = (seen, Evidence("of them", "; ".join(pairs[:4]))) if pairs else (seen,)
            fault = Fault("foreign_routes", title, evidence, partial(replace, routing="own"), those)
            self.faults = [*_only(self.faults, ~those), fault]

    def _owner(self, number: int) -> str | None:
        """Returns the name of the rollout whose tokens the record fits in its generated rows; None if there is none."""
        record = self.rollouts[number]
        assert record.expert_ids is not None
        best, owner = POOR, None
        for other in self.rollouts:
            own = self.own[other.name]
            first = max(record.num_prompt, other.num_prompt)
            rows = min(len(record.expert_ids), len(own))
            if other.name == record.name or rows - first < 4 or record.expert_ids.shape[1:] != own.shape[1:]:
                continue
            mean = float(jaccard(record.expert_ids[first:rows], own[first:rows]).mean())
            if mean > best:
                best, owner = mean, other.name
        return owner

    def agreement(self) -> tuple[float, float]:
        plan = self.plan()
        enforced = zip(self.ground.gaps.repaired(plan), plan, strict=True)
        repaired = [rollout for rollout, assumption in enforced if assumption.routing == "recorded"]
        layers = range(self.ground.gaps.scorers[0].spec.num_moe_layers)
        before = compare(self.rollouts, self.own, Place()).mean(layers)
        return before, compare(repaired, self.own, Place()).mean(layers) if repaired else 0.0


def _only(faults: Sequence[Fault], of_R: NDArray[np.bool_]) -> list[Fault]:
    """Returns the faults in these rollouts, without those that none of them has."""
    return [replace(fault, of_R=fault.of_R & of_R) for fault in faults if (fault.of_R & of_R).any()]
