"""Faults of recorded routes, one after the other, each with the repair that takes it back. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.causes.gaps import Repair
from moerl.diagnostics.causes.routes import (
    CLEAR,
    POOR,
    Compared,
    OwnIds,
    Place,
    apply_routes,
    best_place,
    compare,
    constant_layers,
    is_distinct,
    jaccard,
    renumbering,
    route_table,
)
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Evidence

CLEARLY = 6.0
"""Standard errors, over rollouts, of a difference that is believed."""


@dataclass(frozen=True, slots=True, eq=False)
class RouteFault:
    """cause: key of `moerl.diagnostics.causes.texts`. repair: takes back this fault and those before it."""

    cause: str
    title: str
    evidence: tuple[Evidence, ...]
    repair: Repair


@dataclass(frozen=True, slots=True, eq=False)
class RouteSearch:
    """agreement: mean Jaccard of the record with the model's own choice, as it is and repaired; None without routes."""

    faults: tuple[RouteFault, ...] = ()
    repair: Repair | None = None
    agreement: tuple[float, float] | None = None


@dataclass(slots=True)
class _State:
    """What is known so far of the record; `repair` makes a rollout sound with it."""

    own: OwnIds
    num_experts: int
    place: Place = field(default_factory=Place)
    mappings: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    dead: list[int] = field(default_factory=list)
    engines: set[str] = field(default_factory=set)
    stale: Callable[[DumpedRollout], NDArray[np.bool_]] | None = None

    def repair(self, name: str) -> Repair:
        return Repair(f"routes: {name}", partial(_apply, self.copy()))

    def copy(self) -> _State:
        return replace(self, mappings=dict(self.mappings), dead=list(self.dead), engines=set(self.engines))


def _apply(state: _State, rollout: DumpedRollout) -> DumpedRollout:
    if rollout.engine in state.engines:
        return replace(rollout, expert_ids=None, routed=None)
    own_rows = None if state.stale is None else state.stale(rollout)
    return apply_routes(rollout, state.own, state.place, mappings=state.mappings, dead=state.dead, own_rows=own_rows)


def search_routes(rollouts: Sequence[DumpedRollout], own: OwnIds, num_experts: int) -> RouteSearch:
    """All faults of the routes of these rollouts.

    Args:
        own: the model's own choice for each of them.
    """
    rollouts = [rollout for rollout in rollouts if rollout.expert_ids is not None]
    if not rollouts:
        return RouteSearch()
    state, faults = _State(own, num_experts), list[RouteFault]()
    top_k = next(iter(own.values())).shape[2]
    before = compare(rollouts, own, Place())
    faults += _broken_rows(rollouts, state, top_k)
    faults += _bad_engines(before, rollouts, state)
    rest = [rollout for rollout in rollouts if rollout.engine not in state.engines]
    if rest:
        faults += _moved(rest, state)
        faults += _layers(rest, state)
        faults += _stale_prefix(rest, state)
    repair = state.repair("all")
    repaired = compare([repair.apply(rollout) for rollout in rest], own, Place()) if rest else None
    layers = range(before.own.shape[1])
    after = 0.0 if repaired is None else repaired.mean([layer for layer in layers if layer not in state.dead])
    return RouteSearch(tuple(faults), repair, (before.mean(layers), after))


def _broken_rows(rollouts: Sequence[DumpedRollout], state: _State, top_k: int) -> list[RouteFault]:
    """Rows that name an expert twice, or one that is not there; a dump without such rows has no such fault."""
    broken, out_of_range, total, worst = 0, 0, 0, np.zeros(0)
    wrong_k = 0
    for rollout in rollouts:
        assert rollout.expert_ids is not None
        ids = rollout.expert_ids
        if ids.shape[2] != top_k:
            wrong_k += 1
            continue
        routed = np.ones(len(ids), bool) if rollout.routed is None else rollout.routed
        bad_RL = (~is_distinct(ids) | (ids >= state.num_experts).any(-1)) & routed[:, None]
        out_of_range += int(((ids < 0) | (ids >= state.num_experts)).any(-1)[routed].sum())
        broken, total = broken + int(bad_RL.sum()), total + int(routed.sum()) * ids.shape[1]
        by_layer = bad_RL.sum(0)
        if len(worst) != len(by_layer):
            worst = np.zeros(max(len(worst), len(by_layer)))
        worst[: len(by_layer)] += by_layer
    faults: list[RouteFault] = []
    if wrong_k:
        evidence = (Evidence("rollouts with another number of experts per token", f"{wrong_k}", f"{top_k} per token"),)
        faults.append(RouteFault("route_shape", "routes name another number of experts", evidence, state.repair("k")))
    whole_layers = [int(layer) for layer in np.flatnonzero(worst * len(worst) > 0.9 * max(1, total))]
    if whole_layers and len(whole_layers) <= len(worst) // 2:
        evidence = (Evidence(f"MoE layer {_listed(whole_layers)}", "every row names an expert twice", "distinct ids"),)
        title = f"MoE layer {_listed(whole_layers)} of the routes is blank"
        faults.append(RouteFault("blank_layer", title, evidence, state.repair("blank")))
        broken -= int(worst[whole_layers].sum())
    if broken:
        evidence = (
            Evidence("rows, times layers, that name an expert twice or one that is not there", f"{broken}", "0"),
            Evidence("of them out of range", f"{out_of_range}", "0"),
        )
        title = f"{broken / max(1, total):.2%} of the routes are no routes (pads taken for captures)"
        faults.append(RouteFault("route_pads", title, evidence, state.repair("pads")))
    return faults


def _bad_engines(compared: Compared, rollouts: Sequence[DumpedRollout], state: _State) -> list[RouteFault]:
    """An engine whose routes agree far less than those of the others."""
    names = np.array([rollouts[i].engine for i in range(len(rollouts))])
    found = sorted(set(names.tolist()))
    if len(found) < 2:
        return []
    per_row = np.nanmean(np.where(compared.there_nL, compared.agreement(), 0.0), axis=1)
    by_rollout = _means_by(per_row, compared.rollout_n, len(rollouts))
    means = {name: by_rollout[names == name] for name in found}
    faults: list[RouteFault] = []
    for name in found:
        others = np.concatenate([means[other] for other in found if other != name])
        gap, error = _difference(others, means[name])
        if np.median(others) > POOR and means[name].mean() < POOR * others.mean() and gap > CLEARLY * error:
            state.engines.add(name)
            evidence = (
                Evidence(
                    f"agreement of engine {name!r} with the model's own routing (Jaccard)",
                    f"{means[name].mean():.2f}",
                    f"{others.mean():.2f} as of the others",
                ),
            )
            title = f"the routes of engine {name!r} are not those of its tokens"
            faults.append(RouteFault("bad_engine", title, evidence, state.repair(f"engine {name}")))
    return faults if len(faults) * 2 <= len(found) else []


def _moved(rollouts: Sequence[DumpedRollout], state: _State) -> list[RouteFault]:
    """Rows or layers that stand in another place, with or without other numbers."""
    shape = next(iter(state.own.values())).shape
    layers = [layer for layer in range(shape[1]) if layer not in state.dead]
    place, best, recorded = best_place(rollouts, state.own, layers)
    if best < POOR:
        place, best = _renumbered_place(rollouts, state, layers, place, best)
    faults: list[RouteFault] = []
    sizes = {
        (len(rollout.expert_ids) - len(rollout) + 1, rollout.expert_ids.shape[1] - shape[1])
        for rollout in rollouts
        if rollout.expert_ids is not None
    }
    surplus_rows, surplus_layers = sorted({rows for rows, _ in sizes}), sorted({layers for _, layers in sizes})
    state.place = place
    agreement = Evidence(
        "agreement with the model's own routing (Jaccard), as recorded and moved", f"{recorded:.2f}, {best:.2f}"
    )
    if place.layer or surplus_layers != [0]:
        evidence = (Evidence("MoE layers of the routes beyond the model's", _listed(surplus_layers), "0"), agreement)
        title = f"routes are {_by(place.layer, 'layer')}" if place.layer else "routes have another number of layers"
        faults.append(RouteFault("layer_shift", title, evidence, state.repair("layers")))
    if place.row or place.from_end or surplus_rows != [0]:
        evidence = (Evidence("rows of the routes beyond tokens - 1", _listed(surplus_rows), "0"), agreement)
        if place.row and not place.from_end:
            title = f"routes are {_by(place.row, 'row')}"
        else:
            title = "routes and tokens have different lengths" + (", counted from the end" if place.from_end else "")
        faults.append(RouteFault("row_shift", title, evidence, state.repair("rows")))
    return faults


def _renumbered_place(
    rollouts: Sequence[DumpedRollout], state: _State, layers: Sequence[int], place: Place, best: float
) -> tuple[Place, float]:
    """A place where the record agrees once experts are renumbered, where that is clearly better."""
    for row in (0, -1, 1):
        for layer_shift in (0, -1, 1):
            there = Place(row, layer_shift)
            mean = float(np.mean([_renumbered(compare(rollouts, state.own, there), layer, state) for layer in layers]))
            if mean > best + 2 * CLEAR:
                place, best = there, mean
    return place, best


def _renumbered(compared: Compared, layer: int, state: _State) -> float:
    """Mean agreement of a layer after renumbering, or as it is."""
    mapping = renumbering(compared, layer, state.num_experts)
    there = compared.there_nL[:, layer]
    if not there.any():
        return 0.0
    recorded = compared.recorded[there, layer]
    return float(jaccard(recorded if mapping is None else mapping[recorded], compared.own[there, layer]).mean())


def _layers(rollouts: Sequence[DumpedRollout], state: _State) -> list[RouteFault]:
    """Layers whose experts have other numbers, and layers whose record agrees with nothing."""
    compared = compare(rollouts, state.own, state.place)
    constant = [layer for layer in constant_layers(compared) if layer not in state.dead]
    agreement = np.where(compared.there_nL.any(0), np.nan_to_num(np.nanmean(_or_zero(compared), axis=0)), np.nan)
    alive = [layer for layer in range(len(agreement)) if layer not in (*state.dead, *constant)]
    known = [layer for layer in alive if np.isfinite(agreement[layer])]
    renumbered: list[int] = []
    for layer in known:
        if agreement[layer] < POOR:
            mapping = renumbering(compared, layer, state.num_experts)
            if mapping is not None:
                state.mappings[layer] = mapping
                renumbered.append(layer)
    faults: list[RouteFault] = []
    if renumbered:
        evidence = tuple(
            Evidence(f"MoE layer {layer}, agreement (Jaccard) as recorded", f"{agreement[layer]:.2f}", "near 1")
            for layer in renumbered[:4]
        )
        title = f"experts are renumbered in MoE layer {_listed(renumbered)}"
        faults.append(RouteFault("renumbered", title, evidence, state.repair("renumbered")))
    lost = [layer for layer in constant if compared.there_nL[:, layer].any()]
    lost += _outliers(agreement, [layer for layer in known if layer not in renumbered])
    if lost and len(lost) * 2 <= len(agreement):
        state.dead += lost
        evidence = tuple(
            Evidence(f"MoE layer {layer}, agreement (Jaccard)", f"{np.nan_to_num(agreement[layer]):.2f}", "near 1")
            for layer in lost[:4]
        )
        title = f"the routes of MoE layer {_listed(sorted(lost))} are not those of the tokens"
        faults.append(RouteFault("blank_layer", title, evidence, state.repair("dead")))
    return faults


def _outliers(agreement: NDArray[np.float64], layers: Sequence[int]) -> list[int]:
    """Layers that agree less than half as well as the others."""
    if len(layers) < 2:
        return []
    found: list[int] = []
    for layer in layers:
        others = float(np.median([agreement[other] for other in layers if other != layer]))
        if others > POOR and agreement[layer] < others / 2:
            found.append(layer)
    return found


def _stale_prefix(rollouts: Sequence[DumpedRollout], state: _State) -> list[RouteFault]:
    """Rows of prompts, or rows that the dump calls cached, that flip far more often than the others."""
    flips: dict[str, tuple[list[float], list[float]]] = {"prompt": ([], []), "cached": ([], [])}
    alive = [layer for layer in range(next(iter(state.own.values())).shape[1]) if layer not in state.dead]
    for rollout in rollouts:
        moved = _apply(state, rollout)
        ids, there = route_table(moved, state.own[rollout.name].shape, Place())
        flipped = (jaccard(ids, state.own[rollout.name]) < 1.0)[:, alive] & there[:, alive]
        for name, (stale, others) in flips.items():
            rows = _prompt_rows(moved) if name == "prompt" else _cached_rows(moved)
            if rows.any() and not rows.all():
                stale.append(float(flipped[rows].mean()))
                others.append(float(flipped[~rows].mean()))
    for name, choose in (("cached", _cached_rows), ("prompt", _prompt_rows)):
        stale, others = (np.array(values) for values in flips[name])
        if len(stale) < 4:
            continue
        excess = stale - others
        error = excess.std(ddof=1) / np.sqrt(len(excess))
        if excess.mean() > max(0.05, 3 * others.mean()) and excess.mean() > CLEARLY * error:
            state.stale = choose
            evidence = (
                Evidence(f"rows and layers of {name} tokens whose experts differ", f"{stale.mean():.1%}"),
                Evidence("of other tokens", f"{others.mean():.1%}", "about the same"),
            )
            title = "the routes of prompts were captured under other weights (a stale prefix cache)"
            return [RouteFault("stale_prefix", title, evidence, state.repair("prefix"))]
    return []


def _prompt_rows(rollout: DumpedRollout) -> NDArray[np.bool_]:
    """Rows that predict no sampled token, before the first one that does."""
    return np.arange(len(rollout) - 1) < rollout.num_prompt - 1


def _cached_rows(rollout: DumpedRollout) -> NDArray[np.bool_]:
    """Rows whose cached keys and values the dump calls older than the tokens that follow them."""
    if rollout.prefix_versions is None:
        return np.zeros(len(rollout) - 1, bool)
    first = rollout.policy_versions[rollout.sampled][0]
    versions = rollout.prefix_versions[:-1]
    return (versions >= 0) & (versions < first)


def _or_zero(compared: Compared) -> NDArray[np.float64]:
    """Agreement [n, L], 0 where there is no record."""
    return np.where(compared.there_nL, compared.agreement(), 0.0)


def _means_by(values: NDArray[np.float64], owner: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    sums = np.bincount(owner, values, count)
    return sums / np.maximum(1, np.bincount(owner, minlength=count))


def _difference(one: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[float, float]:
    """Of the means, with its standard error."""
    variance = one.var() / max(1, len(one)) + other.var() / max(1, len(other))
    return float(one.mean() - other.mean()), float(np.sqrt(variance))


def _by(shift: int, what: str) -> str:
    """That recorded rows stand `shift` later than they should."""
    return f"{abs(shift)} {what}{'s' if abs(shift) > 1 else ''} too {'late' if shift > 0 else 'early'}"


def _listed(values: Sequence[int] | Mapping[int, object]) -> str:
    numbers = list(values)
    text = ", ".join(map(str, numbers[:6]))
    return text + (f" and {len(numbers) - 6} more" if len(numbers) > 6 else "")
