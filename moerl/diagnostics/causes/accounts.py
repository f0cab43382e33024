"""Gaps as sums of parts: what each fault, routing, masks, an engine apart and rounding make of them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.causes.apart import CLEAN, Apart
from moerl.diagnostics.causes.gaps import Assumption, Bootstrap, Gaps, Repair
from moerl.diagnostics.causes.route_faults import RouteSearch
from moerl.diagnostics.causes.routes import Place, apply_routes, completed
from moerl.diagnostics.causes.texts import CAUSES
from moerl.diagnostics.causes.values import Change
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Decomposition, Evidence, Share


@dataclass(frozen=True, slots=True, eq=False)
class Fault:
    """One fault with its place in the chain. change: takes it back."""

    cause: str
    title: str
    evidence: tuple[Evidence, ...]
    change: Change


def changed(assumption: Assumption, faults: Sequence[Fault]) -> Assumption:
    for fault in faults:
        assumption = fault.change(assumption)
    return assumption


def enforced(assumption: Assumption, routes: RouteSearch) -> Assumption:
    """The assumption with the repaired record enforced, where there is one."""
    if routes.repair is None:
        return assumption
    return replace(assumption.with_repair(routes.repair), routing="recorded")


@dataclass(frozen=True, slots=True)
class Accounts:
    """Sums of parts. Every part is a difference of two mean |d|, so that they add up to the whole."""

    gaps: Gaps
    bootstrap: Bootstrap
    floor: float
    supports: str
    routes: RouteSearch

    def raw(self) -> Assumption:
        """The dump as it came, its record enforced where it can be."""
        kept = "listed" if self.supports == "listed" else "full"
        if self.routes.repair is None:
            return Assumption(kept=kept)
        return self._fitted(Assumption("recorded", kept))

    def as_recorded(self, faults: Sequence[Fault], groups: Sequence[Apart]) -> Decomposition:
        """From the dump as it came to the last repair, one fault after the other, in the mean of both orders.

        Faults of prompt tokens come first in both, and those of routes one after the other: later repairs were made on
        their result.
        """
        first = self.gaps.differences(self.raw()).sizes
        inputs = [fault for fault in faults if fault.cause == "template"]
        routes = [fault for fault in faults if _is_of_routes(fault)]
        others = [fault for fault in faults if fault not in [*inputs, *routes]]
        forth, last = self._chain([*inputs, *routes, *others], first)
        back, _ = self._chain([*inputs, *reversed(others), *routes], first)
        parts = {fault.cause: (forth[fault.cause] + back[fault.cause]) / 2 for fault in faults}
        return self._closed("as recorded", first, last, parts, groups)

    def _chain(
        self, faults: Sequence[Fault], first: NDArray[np.float64]
    ) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.float64]]:
        """By how much each fault that is taken back lowers |d| of every token, and what is left."""
        base = replace(self.raw(), repairs=())
        sizes, done, parts = first, list[Fault](), dict[str, NDArray[np.float64]]()
        for fault in faults:
            done.append(fault)
            after = self.gaps.differences(self._fitted(changed(base, _in_order(done)))).sizes
            parts[fault.cause] = sizes - after
            sizes = after
        return parts, sizes

    def _fitted(self, assumption: Assumption) -> Assumption:
        """Routes that no repair has made sound are cut or filled so that they can be enforced."""
        if assumption.routing == "own" or any(r.name.startswith("routes: ") for r in assumption.repairs):
            return assumption
        scored = self.gaps.scores(replace(assumption, routing="own"))
        rollouts = self.gaps.repaired(assumption.repairs)
        own = {rollout.name: each.own_ids for rollout, each in zip(rollouts, scored, strict=True)}
        return assumption.with_repair(Repair("fit", partial(_fitted, own=own)))

    def nothing_kept(
        self,
        values: Sequence[Fault],
        masks: Sequence[Fault],
        groups: Sequence[Apart],
    ) -> Decomposition:
        """From own routing over the vocabulary: faults of values first, then masks and routing, in the mean of both
        orders."""
        base = Assumption(kept="full")
        first = sizes = self.gaps.differences(base).sizes
        parts: dict[str, NDArray[np.float64]] = {}
        for number, fault in enumerate(values):
            now = replace(changed(base, values[: number + 1]), kept="full")
            after = self.gaps.differences(now).sizes
            if (sizes != after).any():
                parts[fault.cause] = sizes - after
            sizes = after
        listed = changed(replace(base, kept=self.raw().kept), [*masks, *values])
        neither = replace(listed, kept="full")
        experts, both = self._enforce(neither), self._enforce(listed)
        n, k, e, b = (self.gaps.differences(each).sizes for each in (neither, listed, experts, both))
        if listed.kept != "full":
            parts["masks"] = ((n - k) + (e - b)) / 2
        if self.routes.repair is not None:
            parts["routing"] = ((n - e) + (k - b)) / 2
        return self._closed("nothing kept", first, b, parts, groups)

    def _enforce(self, assumption: Assumption) -> Assumption:
        return enforced(assumption, self.routes)

    def _closed(
        self,
        name: str,
        first: NDArray[np.float64],
        last: NDArray[np.float64],
        parts: dict[str, NDArray[np.float64]],
        groups: Sequence[Apart],
    ) -> Decomposition:
        """Adds what is left: tokens that are apart, rounding up to the floor, and the rest."""
        rest = last.copy()
        for group in groups:
            excess = np.zeros_like(rest)
            excess[group.tokens_N] = np.maximum(0.0, rest[group.tokens_N].mean() - group.others)
            parts[group.cause] = parts.get(group.cause, 0.0) + excess
            rest = rest - excess
        rounding = rest * min(1.0, CLEAN * self.floor / max(float(rest.mean()), 1e-12))
        parts |= {"precision": rounding, "unexplained": rest - rounding}
        shares = [Share(cause, CAUSES[cause].label, self.bootstrap.mean(part)) for cause, part in parts.items()]
        return Decomposition(name, self.bootstrap.mean(first), tuple(shares))


def _in_order(faults: Sequence[Fault]) -> list[Fault]:
    """Repairs of masks and tokens come before those of routes, which were made on their result; of routes the last
    repair holds those before it."""
    of_routes = [fault for fault in faults if _is_of_routes(fault)]
    return [*(fault for fault in faults if not _is_of_routes(fault)), *of_routes[-1:]]


def _is_of_routes(fault: Fault) -> bool:
    repairs = fault.change(Assumption()).repairs
    return any(repair.name.startswith("routes: ") for repair in repairs)


def _fitted(rollout: DumpedRollout, own: dict[str, NDArray[np.int16]]) -> DumpedRollout:
    """The record from its start, with the model's own choice where it names nothing."""
    if rollout.expert_ids is not None:
        rollout = replace(rollout, expert_ids=completed(rollout.expert_ids))
    return apply_routes(rollout, own, Place(), mappings={}, dead=())
