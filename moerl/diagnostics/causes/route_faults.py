"""Faults of recorded routes, one after the other, each with the repair that takes it back. Torch-free.

A search takes rollouts whose records are thought to have the same faults. Rollouts that do not show a fault leave the
search when it is repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.causes.faults import Fault, repairing
from moerl.diagnostics.causes.gaps import Repair
from moerl.diagnostics.causes.routes import (
    CLEAR,
    POOR,
    SOUND,
    Compared,
    OwnIds,
    Place,
    best_place,
    compare,
    constant_layers,
    is_distinct,
    jaccard,
    layer_order,
    renumbering,
    repeats,
    route_table,
)
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Evidence

CLEARLY = 6.0
"""Standard errors, over rollouts, of a difference that is believed."""
MANY_LAYERS = 3
"""MoE layers from which on a row that equals the one before it in all layers is no chance."""

LEAST_REPEATS = 3
"""Repeated rows of a rollout that are no chance."""

Rows = Callable[[DumpedRollout], NDArray[np.bool_]]
"""Choice of rows of a rollout, bool [S - 1]."""
Judge = Callable[[Repair, Repair, NDArray[np.bool_]], bool]
"""Judgement: True if the other repair brings these rollouts, bool [all], clearly nearer to the model than the one."""


@dataclass(slots=True)
class _State:
    """Knowledge of the record; `repair` makes a rollout sound with it."""

    own: OwnIds
    num_experts: int
    label: str
    place: Place = field(default_factory=Place)
    mappings: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    dead: list[int] = field(default_factory=list)
    not_captured: tuple[Rows, ...] = ()

    def repair(self) -> Repair:
        known = (self.place, sorted(self.mappings), sorted(self.dead), len(self.not_captured))
        return Repair(f"routes: {self.label} {known}", self.applied, of="routes")

    def applied(self, rollout: DumpedRollout) -> DumpedRollout:
        """Moves and renumbers the record of a rollout. Ids are -1 if nothing sound is recorded for a row and layer."""
        if rollout.expert_ids is None:
            return rollout
        ids, there = route_table(rollout, (len(rollout) - 1, *self.shape[1:]), self.place)
        for layer, mapping in self.mappings.items():
            known = there[:, layer] & (ids[:, layer] < len(mapping)).all(-1)
            ids[known, layer] = mapping[ids[known, layer]]
        there &= is_distinct(ids)
        there[:, self.dead] = False
        for choose in self.not_captured:
            there[choose(rollout)] = False
        return replace(rollout, expert_ids=np.where(there[..., None], ids, -1), routed=there.any(1))

    @property
    def shape(self) -> tuple[int, ...]:
        return next(iter(self.own.values())).shape


def search_routes(
    rollouts: Sequence[DumpedRollout], of_R: NDArray[np.bool_], own: OwnIds, num_experts: int, judge: Judge, label: str
) -> list[Fault]:
    """Returns all faults of the routes of some rollouts, at least one, each with a record; a repair takes back its
    fault and those before it.

    Args:
        rollouts: all. of_R: those that are searched. own: the model's own choice for each.
        label: makes names of repairs unique.
    """
    chosen = [rollout for rollout, has in zip(rollouts, of_R, strict=True) if has]
    search = _Search([rollout.name for rollout in rollouts], chosen, _State(own, num_experts, label), judge)
    for look in (search.broken_rows, search.moved, search.repeated_rows, search.layers, search.stale_prefix):
        look()
    return search.faults


@dataclass(slots=True)
class _Search:
    names: Sequence[str]
    rollouts: list[DumpedRollout]
    state: _State
    judge: Judge
    faults: list[Fault] = field(default_factory=list)

    def _take(
        self,
        cause: str,
        title: str,
        evidence: Sequence[Evidence],
        names: Collection[str],
        state: _State | None = None,
        is_judged: bool = False,
    ) -> None:
        """Adds a fault. If it comes with a new state, rollouts that do not have the fault leave the search."""
        if state is not None:
            self.state = state
            self.rollouts = [rollout for rollout in self.rollouts if rollout.name in names]
        change = repairing(self.state.repair())
        self.faults.append(Fault(cause, title, tuple(evidence), change, self._of(names), is_judged))

    def _propose(
        self, cause: str, title: str, evidence: Sequence[Evidence], names: Collection[str], state: _State
    ) -> bool:
        """Adds a fault if the judge sees it, too; returns whether it does."""
        if not names or not self.judge(self.state.repair(), state.repair(), self._of(names)):
            return False
        self._take(cause, title, evidence, names, state, is_judged=True)
        return True

    def _of(self, names: Collection[str]) -> NDArray[np.bool_]:
        return np.array([name in names for name in self.names])

    def broken_rows(self) -> None:
        """Finds rows with an expert twice, or one that does not exist, and records of another K."""
        top_k = self.state.shape[2]
        wrong_k = {r.name for r in self.rollouts if r.expert_ids is not None and r.expert_ids.shape[2] != top_k}
        if wrong_k:
            what = "rollouts with another number of experts per token"
            seen = Evidence(what, f"{len(wrong_k)}", f"{top_k} per token")
            self._take("route_shape", "routes name another number of experts", (seen,), wrong_k)
        broken = [(r.name, *_broken(r, self.state.num_experts)) for r in self.rollouts if r.name not in wrong_k]
        blank: dict[tuple[int, ...], set[str]] = {}
        for name, bad_RL, _ in broken:
            whole = np.flatnonzero(bad_RL.mean(0) > 0.9) if len(bad_RL) else np.zeros(0, np.int64)
            if len(whole) and 2 * len(whole) <= bad_RL.shape[1]:
                blank.setdefault(tuple(whole.tolist()), set()).add(name)
        in_blank = {name: layers for layers, names in blank.items() for name in names}
        count = outside = total = 0
        padded: set[str] = set()
        for name, bad_RL, out_RL in broken:
            left = np.delete(bad_RL, in_blank.get(name, ()), axis=1)
            count, total = count + int(left.sum()), total + bad_RL.size
            outside += int(np.delete(out_RL, in_blank.get(name, ()), axis=1).sum())
            padded |= {name} if left.any() else set[str]()
        if count:
            evidence = (
                Evidence("rows, times layers, that name an expert twice or one that is not there", f"{count}", "0"),
                Evidence("of them out of range", f"{outside}", "0"),
            )
            title = f"{count / max(1, total):.2%} of the routes are no routes (pads taken for captures)"
            self._take("route_pads", title, evidence, padded)
        for layers, names in sorted(blank.items(), key=lambda item: -len(item[1]))[:1]:
            evidence = (Evidence(f"MoE layer {_listed(layers)}", "rows name an expert twice", "distinct ids"),)
            title = f"MoE layer {_listed(layers)} of the routes is blank"
            self._take("blank_layer", title, evidence, names, replace(self.state, dead=list(layers)))

    def repeated_rows(self) -> None:
        """Finds rows that repeat the row before them, though the model does not choose the same twice."""
        if self.state.shape[1] < MANY_LAYERS:
            return
        choose = partial(_repeated, self.state)
        found = {rollout.name: int(choose(rollout).sum()) for rollout in self.rollouts}
        names = {name for name, count in found.items() if count >= LEAST_REPEATS}
        if names:
            rows = {rollout.name: len(rollout) - 1 for rollout in self.rollouts}
            share = sum(found[name] for name in names) / sum(rows[name] for name in names)
            seen = Evidence("rows that repeat the one before them in every layer", f"{share:.1%}", "0")
            state = replace(self.state, not_captured=(*self.state.not_captured, choose))
            self._propose("route_repeats", "rows of the routes repeat the row before them", (seen,), names, state)

    def moved(self) -> None:
        """Finds rows or layers at another place, with or without other numbers."""
        state, shape = self.state, self.state.shape
        layers = [layer for layer in range(shape[1]) if layer not in state.dead]
        place, best, recorded = best_place(self.rollouts, state.own, layers)
        if best < SOUND and (ordered := layer_order(self.rollouts, state.own, place)) is not None:
            other = replace(place, layer=0, order=ordered)
            mean = compare(self.rollouts, state.own, other).mean(layers)
            if mean > best + CLEAR:
                place, best = other, mean
        if best < POOR:
            place, best = self._renumbered_place(layers, place, best)
        agreement = Evidence(
            "agreement with the model's own routing (Jaccard), as recorded and moved", f"{recorded:.2f}, {best:.2f}"
        )
        self._layers_elsewhere(place, agreement)
        self._rows_elsewhere(place, agreement)

    def _layers_elsewhere(self, place: Place, agreement: Evidence) -> None:
        num_layers = self.state.shape[1]
        surplus = {r.name: r.expert_ids.shape[1] - num_layers for r in self.rollouts if r.expert_ids is not None}
        wrong = {name for name, extra in surplus.items() if extra}
        state = replace(self.state, place=replace(self.state.place, layer=place.layer, order=place.order))
        evidence = (
            Evidence("MoE layers of the routes beyond the model's", _listed(sorted(set(surplus.values()))), "0"),
            agreement,
        )
        if place.order is not None:
            order = ", ".join(map(str, place.order[:8])) + (", ..." if len(place.order) > 8 else "")
            self._propose(
                "layer_order", f"layers of the routes come in the order {order}", evidence, self._all(), state
            )
        elif wrong:
            extra = max(surplus.values(), key=abs)
            what = f"{abs(extra)} layer{'s' if abs(extra) > 1 else ''}"
            title = f"routes lack {what}" if extra < 0 else f"routes hold {what} beyond the model's, such as a draft's"
            title += f", and are {_by(place.layer, 'layer')}" if place.layer else ""
            self._take("layer_shift", title, evidence, wrong, state)
        elif place.layer:
            self._propose("layer_shift", f"routes are {_by(place.layer, 'layer')}", evidence, self._all(), state)

    def _rows_elsewhere(self, place: Place, agreement: Evidence) -> None:
        surplus = {r.name: len(r.expert_ids) - len(r) + 1 for r in self.rollouts if r.expert_ids is not None}
        wrong = {name for name, extra in surplus.items() if extra}
        moved = replace(self.state.place, row=place.row, from_end=place.from_end, generated=place.generated)
        evidence = (
            Evidence("rows of the routes beyond tokens - 1", _listed(sorted(set(surplus.values()))), "0"),
            agreement,
        )
        title = f"routes are {_by(place.row, 'row')}"
        if place.generated:
            title = f"routes of generated tokens are {_by(place.row, 'row')}, those of prompts are not"
        elif wrong and (place.from_end or not place.row):
            title = "routes and tokens have different lengths" + (", counted from the end" if place.from_end else "")
        state = replace(self.state, place=moved)
        if wrong:
            self._take("row_shift", title, evidence, wrong, state)
        elif place.row:
            self._propose("row_shift", title, evidence, self._all(), state)

    def _all(self) -> set[str]:
        return {rollout.name for rollout in self.rollouts}

    def _renumbered_place(self, layers: Sequence[int], place: Place, best: float) -> tuple[Place, float]:
        """Returns a place at which the record agrees clearly better once experts are renumbered, else `place`."""
        for row in (0, -1, 1):
            for layer_shift in (0, -1, 1):
                there = Place(row, layer_shift)
                compared = compare(self.rollouts, self.state.own, there)
                mean = float(np.mean([_renumbered(compared, layer, self.state) for layer in layers]))
                if mean > best + 2 * CLEAR:
                    place, best = there, mean
        return place, best

    def layers(self) -> None:
        """Finds layers whose experts have other numbers, and layers whose record agrees with nothing."""
        if not self.rollouts:
            return
        state = self.state
        compared = compare(self._repaired(), state.own, Place())
        constant = [layer for layer in constant_layers(compared) if layer not in state.dead]
        agreement = np.where(compared.there_nL.any(0), compared.by_layer(), np.nan)
        alive = [layer for layer in range(len(agreement)) if layer not in (*state.dead, *constant)]
        known = [layer for layer in alive if np.isfinite(agreement[layer])]
        mappings = {
            layer: mapping
            for layer in known
            if agreement[layer] < SOUND and (mapping := renumbering(compared, layer, state.num_experts)) is not None
        }
        if mappings:
            evidence = _agreements(agreement, list(mappings), " as recorded")
            title = f"experts are renumbered in MoE layer {_listed(mappings)}"
            if not self._propose("renumbered", title, evidence, self._all(), replace(state, mappings=mappings)):
                mappings = {}
        lost = [layer for layer in constant if compared.there_nL[:, layer].any()]
        lost += _outliers(agreement, [layer for layer in known if layer not in mappings])
        if lost and len(lost) * 2 <= len(agreement):
            evidence = _agreements(agreement, lost)
            title = f"the routes of MoE layer {_listed(sorted(lost))} are not those of the tokens"
            dead = replace(self.state, dead=[*self.state.dead, *lost])
            self._propose("blank_layer", title, evidence, self._all(), dead)

    def stale_prefix(self) -> None:
        """Finds rows of prompts, or rows that the dump calls cached, that flip far more often than the others."""
        flips: dict[str, list[tuple[str, float, float]]] = {"prompt": [], "cached": []}
        chosen: dict[str, Rows] = {"cached": _cached_rows, "prompt": _prompt_rows}
        alive = [layer for layer in range(self.state.shape[1]) if layer not in self.state.dead]
        for moved in self._repaired():
            own = self.state.own[moved.name]
            ids, there = route_table(moved, own.shape, Place())
            flipped, known = (jaccard(ids, own) < 1.0)[:, alive], there[:, alive]
            for name, choose in chosen.items():
                rows = choose(moved)
                if known[rows].any() and known[~rows].any():
                    stale, other = (float(flipped[each][known[each]].mean()) for each in (rows, ~rows))
                    flips[name].append((moved.name, stale, other))
        for name, choose in chosen.items():
            if len(flips[name]) < 4:
                continue
            stale, others = (np.array([each[i] for each in flips[name]]) for i in (1, 2))
            excess = stale - others
            error = excess.std(ddof=1) / np.sqrt(len(excess))
            least = max(0.05, 3 * others.mean())
            if excess.mean() <= max(least, CLEARLY * error):
                continue
            has = stale - others.mean() > least  # others may be sound
            evidence = (
                Evidence(f"rows and layers of {name} tokens whose experts differ", f"{stale[has].mean():.1%}"),
                Evidence("of other tokens", f"{others[has].mean():.1%}", "about the same"),
            )
            title = "the routes of prompts were captured under other weights (a stale prefix cache)"
            state = replace(self.state, not_captured=(*self.state.not_captured, choose))
            names = {each[0] for each, is_stale in zip(flips[name], has, strict=True) if is_stale}
            if self._propose("stale_prefix", title, evidence, names, state):
                return

    def _repaired(self) -> list[DumpedRollout]:
        return [self.state.applied(rollout) for rollout in self.rollouts]


def _broken(rollout: DumpedRollout, num_experts: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns two of bool [R, L]: rows that are no routes; of them, those with an expert that does not exist."""
    assert rollout.expert_ids is not None
    ids = rollout.expert_ids
    routed_R1 = rollout.routed_rows[:, None]
    outside = ((ids < 0) | (ids >= num_experts)).any(-1) & routed_R1
    return (~is_distinct(ids) & routed_R1) | outside, outside


def _repeated(state: _State, rollout: DumpedRollout) -> NDArray[np.bool_]:
    return repeats(state.applied(rollout), state.own.get(rollout.name))


def _renumbered(compared: Compared, layer: int, state: _State) -> float:
    """Returns the mean agreement of a layer after renumbering, or as it is."""
    mapping = renumbering(compared, layer, state.num_experts)
    there = compared.there_nL[:, layer]
    if not there.any():
        return 0.0
    recorded = compared.recorded[there, layer]
    return float(jaccard(recorded if mapping is None else mapping[recorded], compared.own[there, layer]).mean())


def _agreements(agreement: NDArray[np.float64], layers: Sequence[int], when: str = "") -> tuple[Evidence, ...]:
    """Returns the agreement of the first few of these layers as evidence."""
    what = f"agreement (Jaccard){when}"
    values = [(layer, np.nan_to_num(agreement[layer])) for layer in layers[:4]]
    return tuple(Evidence(f"MoE layer {layer}, {what}", f"{value:.2f}", "near 1") for layer, value in values)


def _outliers(agreement: NDArray[np.float64], layers: Sequence[int]) -> list[int]:
    """Returns the layers that agree less than half as well as the others."""
    if len(layers) < 2:
        return []
    others = {layer: np.median([agreement[other] for other in layers if other != layer]) for layer in layers}
    return [layer for layer in layers if others[layer] > POOR and agreement[layer] < others[layer] / 2]


def _prompt_rows(rollout: DumpedRollout) -> NDArray[np.bool_]:
    """Returns bool [S - 1]: rows before the first one that predicts a sampled token."""
    return np.arange(len(rollout) - 1) < rollout.num_prompt - 1


def _cached_rows(rollout: DumpedRollout) -> NDArray[np.bool_]:
    """Returns bool [S - 1]: rows whose cached keys and values the dump calls older than the first sampled token."""
    if rollout.prefix_versions is None:
        return np.zeros(len(rollout) - 1, bool)
    first = rollout.policy_versions[rollout.sampled][0]
    versions = rollout.prefix_versions[:-1]
    return (versions >= 0) & (versions < first)


def _by(shift: int, what: str) -> str:
    """Returns the words for rows or layers that stand `shift` later than they should."""
    return f"{abs(shift)} {what}{'s' if abs(shift) > 1 else ''} too {'late' if shift > 0 else 'early'}"


def _listed(values: Collection[int] | Mapping[int, object]) -> str:
    numbers = list(values)
    text = ", ".join(map(str, numbers[:6]))
    return text + (f" and {len(numbers) - 6} more" if len(numbers) > 6 else "")
