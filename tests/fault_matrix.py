"""Single faults of dumps, planted in some of the rollouts or in all, and what `moerl diagnose` may say of each.

A fault changes one rollout; `Planting` has what it needs beside it. It is found if its cause is named, for no other
rollouts than those that have it; a fault that is named otherwise is a false accusation, and a dump that is in order
though more than twice rounding is unexplained is falsely green.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from planted_faults import (
    VOCAB,
    Ground,
    extra_row,
    layer_late,
    lost_first_token,
    masks_late,
    one_layer_constant,
    one_layer_zero,
    pads_as_routes,
    row_late,
    wrong_top_p,
)

from moerl.contract.fields import KeptSets
from moerl.diagnostics.causes.diagnosis import Diagnosis
from moerl.diagnostics.causes.masks import shifted
from moerl.diagnostics.causes.values import with_logprobs_of
from moerl.diagnostics.dump_report import verdict
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.scoring import Question, Scored

# --- faults ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planting:
    """Inputs of a fault. others: all rollouts. scored, stale: scores of this rollout by its own model and by older
    weights. old: the rollout that the engine sampled with the older weights."""

    rng: np.random.Generator
    others: Sequence[DumpedRollout]
    scored: Scored
    stale: Scored
    old: DumpedRollout


Change = Callable[[DumpedRollout, Planting], DumpedRollout]


def _ids(rollout: DumpedRollout) -> NDArray[np.int32]:
    assert rollout.expert_ids is not None
    return rollout.expert_ids


def _routes(change: Callable[[NDArray[np.int32], np.random.Generator], NDArray[np.int32]]) -> Change:
    def plant(rollout: DumpedRollout, planting: Planting) -> DumpedRollout:
        ids = change(_ids(rollout).copy(), planting.rng)
        return replace(rollout, expert_ids=np.ascontiguousarray(ids, np.int32), routed=None)

    return plant


def _plain(change: Callable[[DumpedRollout], DumpedRollout]) -> Change:
    return lambda rollout, planting: change(rollout)


def _generated(shift: int) -> Change:
    def plant(rollout: DumpedRollout, planting: Planting) -> DumpedRollout:
        ids = _ids(rollout).copy()
        ids[rollout.num_prompt :] = np.roll(ids[rollout.num_prompt :], shift, axis=0)
        return replace(rollout, expert_ids=ids)

    return plant


def _set(index: Any, value: Any) -> Change:
    def change(ids: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
        ids[index] = value
        return ids

    return _routes(change)


def _reordered(ids: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
    return ids[:, ::-1]


def _swapped_layers(ids: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
    ids[:, [1, 2]] = ids[:, [2, 1]]
    return ids


def _renumbered(ids: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
    return np.random.default_rng(5).permutation(int(ids.max()) + 1).astype(np.int32)[ids]


def _renumbered_layer(ids: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
    ids[:, 1] = _renumbered(ids, rng)[:, 1]
    return ids


def _exchanged_experts(ids: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
    order = np.arange(int(ids.max()) + 1)
    order[[0, 1, 2, 3]] = order[[3, 2, 1, 0]]
    return order[ids].astype(np.int32)


def _one_id_other(ids: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
    """The last id of each row is one that the row does not hold."""
    count = int(ids.max()) + 1
    for row in ids.reshape(-1, ids.shape[2]):
        row[-1] = rng.choice(np.setdiff1d(np.arange(count), row))
    return ids


def _drawn(ids: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
    count = int(ids.max()) + 1
    return rng.random((*ids.shape[:2], count)).argsort(-1)[..., : ids.shape[2]].astype(np.int32)


def _repeated(ids: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
    ids[1::3] = ids[0 : len(ids) - 1 : 3][: len(ids[1::3])]
    return ids


def _constant_pads(ids: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
    ids[-10:] = np.arange(ids.shape[2])
    return ids


def _draft_layer(ids: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
    return np.concatenate([ids, _drawn(ids, rng)[:, :1]], axis=1)


def _dense_layer(ids: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
    return np.concatenate([np.zeros_like(ids[:, :1]), ids], axis=1)


def _of_another_rollout(rollout: DumpedRollout, planting: Planting) -> DumpedRollout:
    far = [other for other in planting.others if other.group != rollout.group]
    other = far[int(planting.rng.integers(len(far)))]
    ids, count = _ids(other), len(rollout) - 1
    whole = np.concatenate([ids] * (count // len(ids) + 1))[:count]
    return replace(rollout, expert_ids=whole, routed=None)


def _stale_prefix(rollout: DumpedRollout, planting: Planting) -> DumpedRollout:
    ids = _ids(rollout).copy()
    ids[: rollout.num_prompt - 1] = planting.stale.own_ids[: rollout.num_prompt - 1]
    return replace(rollout, expert_ids=ids)


def _missed_sets(rollout: DumpedRollout, planting: Planting) -> DumpedRollout:
    """Every third set lacks its token."""
    assert rollout.kept is not None
    rows = [row.copy() for row in np.split(rollout.kept.ids, rollout.kept.offsets[1:-1])]
    for token in np.flatnonzero(rollout.sampled)[::3]:
        rows[token] = rows[token][rows[token] != rollout.token_ids[token]]
    offsets = np.concatenate([[0], np.cumsum(list(map(len, rows)))]).astype(np.int64)
    return replace(rollout, kept=KeptSets(offsets, np.concatenate(rows)))


def _with_logprobs(rollout: DumpedRollout, logprobs_T: NDArray[np.floating]) -> DumpedRollout:
    logprobs = rollout.rollout_logprobs.copy()
    logprobs[rollout.sampled] = np.minimum(logprobs_T, 0.0)
    return replace(rollout, rollout_logprobs=logprobs)


def _over_vocabulary(rollout: DumpedRollout, planting: Planting) -> DumpedRollout:
    """Log-probs before top-p, sets listed, as slime has them."""
    inside = rollout.rollout_logprobs[rollout.sampled].astype(np.float64)
    return _with_logprobs(rollout, inside + (planting.scored.full_TF - planting.scored.kept_TF)[:, 0])


def _before_temperature(rollout: DumpedRollout, planting: Planting) -> DumpedRollout:
    """Log-probs at temperature 1 inside of the sets: the temperature said is 0.8."""
    inside = rollout.rollout_logprobs[rollout.sampled].astype(np.float64)
    return _with_logprobs(rollout, inside + planting.scored.kept_TF[:, 1] - planting.scored.kept_TF[:, 0])


def _temperature(said: float) -> Change:
    return lambda rollout, planting: replace(
        rollout, temperatures=np.where(rollout.sampled, said, 1.0).astype(np.float32)
    )


def _noise(nats: float) -> Change:
    def plant(rollout: DumpedRollout, planting: Planting) -> DumpedRollout:
        logprobs = rollout.rollout_logprobs[rollout.sampled]
        return _with_logprobs(rollout, logprobs + planting.rng.normal(0.0, nats, len(logprobs)))

    return plant


def _shifted_logprobs(shift: int) -> Change:
    def plant(rollout: DumpedRollout, planting: Planting) -> DumpedRollout:
        moved = with_logprobs_of(rollout, shift=shift)
        return replace(moved, rollout_logprobs=np.nan_to_num(moved.rollout_logprobs, nan=-1.0))

    return plant


def _fabricated(rollout: DumpedRollout, planting: Planting) -> DumpedRollout:
    """The last six tokens were never sampled: a trainer put them there, with log-prob 0."""
    tokens, logprobs = rollout.token_ids.copy(), rollout.rollout_logprobs.copy()
    tokens[-6:] = planting.rng.integers(3, VOCAB, 6)
    logprobs[-6:] = 0.0
    assert rollout.kept is not None
    sizes, ids = rollout.kept.sizes.copy(), rollout.kept.ids[: rollout.kept.offsets[-7]]
    sizes[-6:] = 0
    kept = KeptSets(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), ids)
    return replace(rollout, token_ids=tokens, rollout_logprobs=logprobs, kept=kept)


def _replaced_tokens(rollout: DumpedRollout, planting: Planting) -> DumpedRollout:
    """Two generated tokens are others: a tokenizer that does not give back what it was given."""
    tokens = rollout.token_ids.copy()
    at = np.flatnonzero(rollout.sampled)[[1, -2] if rollout.num_sampled > 2 else [0]]
    tokens[at] = (tokens[at] + 17) % VOCAB
    return replace(rollout, token_ids=tokens, kept=None)


def _engine_of(rollout: DumpedRollout, planting: Planting) -> DumpedRollout:
    return replace(planting.old, name=rollout.name, group=rollout.group, engine=rollout.engine)


FAULTS: Mapping[str, tuple[Change, frozenset[str]]] = {
    name: (change, frozenset(causes.split()))
    for name, change, causes in (
        ("layer late", _plain(layer_late), "layer_shift layer_order"),
        ("layer early", _routes(lambda ids, _: np.roll(ids, -1, axis=1)), "layer_shift layer_order"),
        ("layers reversed", _routes(_reordered), "layer_order"),
        ("two layers exchanged", _routes(_swapped_layers), "layer_order blank_layer"),
        ("layer of zeros", _plain(one_layer_zero), "blank_layer route_pads"),
        ("layer constant", _plain(one_layer_constant), "blank_layer"),
        ("layer that copies another", _set((slice(None), 1), 0), "blank_layer route_pads"),
        ("layer that is drawn", _routes(lambda ids, rng: _with_layer(ids, 1, _drawn(ids, rng))), "blank_layer"),
        ("first layer lost", _routes(lambda ids, _: ids[:, 1:]), "layer_shift"),
        ("draft layer behind", _routes(_draft_layer), "layer_shift"),
        ("dense layer before", _routes(_dense_layer), "layer_shift route_pads blank_layer"),
        ("row late", _plain(row_late), "row_shift"),
        ("row early", _routes(lambda ids, _: np.roll(ids, -1, axis=0)), "row_shift"),
        ("two rows late", _routes(lambda ids, _: np.roll(ids, 2, axis=0)), "row_shift"),
        ("generated rows late", _generated(1), "row_shift"),
        ("generated rows early", _generated(-1), "row_shift"),
        ("row in front", _plain(extra_row), "row_shift"),
        ("last rows lost", _routes(lambda ids, _: ids[:-5]), "row_shift"),
        ("first rows lost", _routes(lambda ids, _: ids[5:]), "row_shift"),
        ("rows repeat", _routes(_repeated), "route_repeats"),
        ("pads of zeros", _plain(pads_as_routes), "route_pads"),
        ("pads of experts", _routes(_constant_pads), "route_repeats"),
        ("renumbered", _routes(_renumbered), "renumbered"),
        ("one layer renumbered", _routes(_renumbered_layer), "renumbered blank_layer"),
        ("experts exchanged", _routes(_exchanged_experts), "renumbered"),
        ("one id of each row another", _routes(_one_id_other), ""),
        ("ids out of range", _set((slice(None), slice(None), 0), 4000), "route_pads"),
        ("ids named twice", _routes(lambda ids, _: np.repeat(ids[..., :1], ids.shape[2], -1)), "route_pads"),
        ("one expert less", _routes(lambda ids, _: ids[..., 1:]), "route_shape"),
        ("routes of another rollout", _of_another_rollout, ""),
        ("routes drawn", _routes(_drawn), ""),
        ("stale prefix", _stale_prefix, "stale_prefix"),
        ("sets late", _plain(masks_late), "mask_shift mask_misses"),
        ("sets early", _plain(lambda rollout: shifted(rollout, 1)), "mask_shift mask_misses"),
        ("sets without their token", _missed_sets, "mask_misses"),
        ("sets lost", _plain(lambda rollout: replace(rollout, kept=None)), "hidden_masks"),
        ("log-probs before top-p", _over_vocabulary, "full_logprobs"),
        ("log-probs before temperature", _before_temperature, "temperature"),
        ("temperature 1 said", _temperature(1.0), "temperature"),
        ("temperature 0.6 said", _temperature(0.6), "temperature"),
        ("top-p 0.6 said", _plain(wrong_top_p), "top_p"),
        ("log-probs late", _shifted_logprobs(-1), "logprob_shift"),
        ("log-probs early", _shifted_logprobs(1), "logprob_shift"),
        ("noise of 0.05 nats", _noise(0.05), "weights"),
        ("log-probs 0.3 too low", lambda r, _: _with_logprobs(r, r.rollout_logprobs[r.sampled] - 0.3), "weights"),
        ("tokens nobody sampled", _fabricated, "no_logprobs"),
        ("tokens replaced", _replaced_tokens, "weights hidden_masks"),
        ("first token lost", _plain(lost_first_token), "template"),
        ("older weights", _engine_of, "weights bad_engine"),
    )
}
"""By name: how it is planted, and causes that are right. A record of no use may always be called foreign."""


def _with_layer(ids: NDArray[np.int32], layer: int, other: NDArray[np.int32]) -> NDArray[np.int32]:
    ids[:, layer] = other[:, layer]
    return ids


OF_ROUTES = frozenset(
    {
        *("layer_shift", "layer_order", "blank_layer", "row_shift", "route_repeats", "route_pads", "renumbered"),
        *("route_shape", "stale_prefix", "foreign_routes"),
    }
)


def right(name: str) -> frozenset[str]:
    """Causes that are right for a fault."""
    _, causes = FAULTS[name]
    return causes | {"foreign_routes"} if not causes or causes & OF_ROUTES else causes


def planted(name: str, ground: Ground, chosen: Sequence[int], seed: int = 0) -> list[DumpedRollout]:
    """The rollouts of a ground, with a fault in those that are chosen."""
    rng, change = np.random.default_rng(seed), FAULTS[name][0]
    some = [ground.clean[i] for i in chosen]
    question = Question((1.0, 1.25))
    scored = ground.now.score(some, question)
    stale = ground.old.score([replace(rollout, expert_ids=None, routed=None) for rollout in some], question)
    changed = dict(enumerate(ground.clean))
    for place, number in enumerate(chosen):
        planting = Planting(rng, ground.clean, scored[place], stale[place], ground.of_old[number])
        changed[number] = change(ground.clean[number], planting)
    return [changed[number] for number in range(len(ground.clean))]


# --- judging ---------------------------------------------------------------------------------------------------------


OF_LOST_RECORDS = ("route_shape", "route_pads")
"""Causes that leave nothing to score with: what they cost is not known."""


def judged(name: str, found: Diagnosis, chosen: Sequence[int], made: float) -> str:
    """ "named", "unexplained", "small" (in order, and it is no more than rounding), or what is wrong.

    made: nats by which the gap is larger than that of the sound dump.
    """
    rollouts = found.gaps.rollouts
    mine = {rollouts[i].name for i in chosen}
    accused = [finding for finding in found.findings if finding.level == "fault"]
    causes = right(name)
    wrong = [finding for finding in accused if finding.cause not in causes]
    if wrong:
        return f"WRONG CAUSE: {wrong[0].title}"
    of_rollouts = [each for each in accused if each.cause not in ("weights", "top_p", "bad_engine")]
    for finding in of_rollouts:
        innocent = set(finding.rollouts or [rollout.name for rollout in rollouts]) - mine
        if innocent:
            return f"INNOCENT: {len(innocent)} of {len(rollouts)}: {finding.title}"
    left = [finding for finding in found.findings if finding.cause == "unexplained"]
    if accused:
        low, high = (
            sum(finding.nats.low for finding in accused),
            sum(finding.nats.high for finding in [*accused, *left]),
        )
        is_lost = any(finding.cause in OF_LOST_RECORDS for finding in accused)
        if not is_lost and not low - found.floor <= made <= high + found.floor:
            return f"WRONG SIZE: {low:.3f} to {high:.3f} nats of {made:.3f}: {accused[0].title}"
        return "named"
    if left:
        return "unexplained"
    level = verdict(found.findings, found.decompositions, found.floor).level
    recorded = found.decompositions[-1].total.value
    if level == "good" and recorded > 2.0 * found.floor:
        return f"FALSELY GREEN: {recorded / found.floor:.1f} times rounding"
    return "small"
