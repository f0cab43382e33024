"""Recorded routes against those that a model's own routers choose: are they of this row, this layer, these experts?

A sound record agrees with the model's own choice unless rounding flips it. A record that is shifted, renumbered, dead
or stale in a part agrees with it at another place, or at none. Torch-free. Shape legend: n = rows looked at, R = rows
of a record, L = MoE layers, K = experts per token, E = experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.dumps.rollout import DumpedRollout

MAX_ROWS = 4000
"""Rows that a comparison looks at, about."""
ROW_SHIFTS = (0, -1, 1, -2, 2, -3, 3)
LAYER_SHIFTS = (0, -1, 1, -2, 2)
CLEAR = 0.1
"""Mean Jaccard by which another place must agree better before the recorded one is doubted."""
POOR = 0.6
"""Mean agreement below which a record may be at another place and have other numbers, too."""
SOUND = 0.9
"""Mean agreement below which a record at its own place is looked at."""

OwnIds = Mapping[str, NDArray[np.int16]]
"""The model's own choice, [S - 1, L, K], by the name of the rollout."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place in a record of the routes of row r and layer l."""

    row: int = 0
    """They are at row r + row."""
    layer: int = 0
    """They are at layer l + layer."""
    from_end: bool = False
    """Rows are counted so that last rows meet, instead of first rows."""
    generated: bool = False
    """Rows of the prompt, before the first sampled token, are not moved."""
    order: tuple[int, ...] | None = None
    """Recorded layer of each MoE layer, instead of `layer`; None: `layer` counts."""


def jaccard(recorded: NDArray[np.integer], own: NDArray[np.integer]) -> NDArray[np.float64]:
    """Returns the similarity of two sets of K experts each, along the last axis; experts that are named twice count
    once."""
    shared = (own[..., :, None] == recorded[..., None, :]).any(-1).sum(-1)
    return shared / (2 * own.shape[-1] - shared)


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """Rows of several rollouts at one place."""

    recorded: NDArray[np.int32]
    """[n, L, K], the record; -1 if there is none."""
    own: NDArray[np.int16]
    """[n, L, K], the model's own choice."""
    there_nL: NDArray[np.bool_]
    """True if there is a record, and it names distinct experts."""

    def agreement(self) -> NDArray[np.float64]:
        """Returns the Jaccard similarity, [n, L]; nan without a record."""
        agreement = jaccard(self.recorded, self.own)
        agreement[~self.there_nL] = np.nan
        return agreement

    def by_layer(self) -> NDArray[np.float64]:
        """Returns the mean agreement of each layer, [L]; rows without a record count as 0."""
        return np.nan_to_num(np.where(self.there_nL, self.agreement(), 0.0).mean(0))

    def mean(self, layers: Sequence[int]) -> float:
        """Returns the mean agreement over these layers; 0 without any record."""
        values = self.agreement()[:, list(layers)]
        return 0.0 if np.isnan(values).all() else float(np.nanmean(values))


def compare(rollouts: Sequence[DumpedRollout], own: OwnIds, place: Place, *, max_rows: int = MAX_ROWS) -> Compared:
    """Compares rows of all rollouts with routes, evenly thinned to about `max_rows`."""
    with_routes = [rollout for rollout in rollouts if rollout.expert_ids is not None]
    total = sum(len(rollout) - 1 for rollout in with_routes)
    stride = max(1, -(-total // max_rows))
    tables = [route_table(rollout, own[rollout.name].shape, place) for rollout in with_routes]
    recorded = np.concatenate([ids[::stride] for ids, _ in tables])
    there = np.concatenate([has[::stride] for _, has in tables])
    chosen = np.concatenate([own[rollout.name][::stride] for rollout in with_routes])
    return Compared(recorded, chosen, there & is_distinct(recorded))


def route_table(
    rollout: DumpedRollout, shape: tuple[int, ...], place: Place
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Returns the record at a place: ids, int32 [S - 1, L, K], -1 if the record has nothing there; and whether it has
    something, bool [S - 1, L]. A record of another K is no record.

    shape: [S - 1, L, K] of the model.
    """
    ids_RLK = rollout.expert_ids
    assert ids_RLK is not None
    num_rows, num_layers, top_k = shape
    ids = np.full(shape, -1, np.int32)
    if ids_RLK.shape[2] != top_k:
        return ids, np.zeros((num_rows, num_layers), bool)
    first = place.row + (len(ids_RLK) - num_rows if place.from_end else 0)
    rows, layers = np.arange(num_rows) + first, np.arange(num_layers) + place.layer
    if place.generated:
        rows = np.where(rows < rollout.num_prompt, -1, rows)
        rows[: rollout.num_prompt] = np.arange(rollout.num_prompt)
    if place.order is not None:
        layers = np.array(place.order)
    has_row = (rows >= 0) & (rows < len(ids_RLK))
    has_row[has_row] = rollout.routed_rows[rows[has_row]]
    has_layer = (layers >= 0) & (layers < ids_RLK.shape[1])
    ids[np.ix_(has_row, has_layer)] = ids_RLK[np.ix_(rows[has_row], layers[has_layer])]
    return ids, has_row[:, None] & has_layer[None, :]


def is_distinct(ids: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Returns bool [...]: the K experts of a row are distinct, and none is negative."""
    ordered = np.sort(ids, axis=-1)
    return (ordered[..., 1:] != ordered[..., :-1]).all(-1) & (ordered[..., 0] >= 0)


def completed(ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Fills up rows that name experts twice with the first other experts, as padding in a trainer does."""
    rows, whole = ids.reshape(-1, ids.shape[-1]).copy(), is_distinct(ids).reshape(-1)
    for row in np.flatnonzero(~whole):
        named = list(dict.fromkeys(expert for expert in rows[row].tolist() if expert >= 0))
        others = [expert for expert in range(ids.shape[-1]) if expert not in named]
        rows[row] = (named + others)[: ids.shape[-1]]
    return rows.reshape(ids.shape)


def constant_layers(compared: Compared) -> list[int]:
    """Returns the layers whose record says the same for (nearly) every row, while the model's own choice differs."""
    found: list[int] = []
    for layer in range(compared.recorded.shape[1]):
        ids = np.sort(compared.recorded[:, layer], axis=-1)
        own = np.sort(compared.own[:, layer], axis=-1)
        has_record = (ids >= 0).any(-1)
        if has_record.sum() < 8:
            continue
        if _share_of_commonest(ids[has_record]) > 0.98 and _share_of_commonest(own[has_record]) < 0.9:
            found.append(layer)
    return found


def _share_of_commonest(rows: NDArray[np.integer]) -> float:
    return float(np.unique(rows, axis=0, return_counts=True)[1].max() / len(rows))


def candidate_places(rollouts: Sequence[DumpedRollout], num_layers: int) -> list[Place]:
    """Returns the places to try, the recorded place first."""
    records = [(rollout.expert_ids, len(rollout) - 1) for rollout in rollouts if rollout.expert_ids is not None]
    surplus = {ids.shape[1] - num_layers for ids, _ in records}
    layers = sorted({*LAYER_SHIFTS, *surplus, *(extra // 2 for extra in surplus)}, key=abs)
    places = [Place(row, layer) for row in ROW_SHIFTS for layer in layers]
    if any(len(ids) != rows for ids, rows in records):
        places += [Place(row, layer, from_end=True) for row in (0, -1, 1) for layer in layers]
    return [*places, *(Place(row, generated=True) for row in ROW_SHIFTS[1:])]


def best_place(rollouts: Sequence[DumpedRollout], own: OwnIds, layers: Sequence[int]) -> tuple[Place, float, float]:
    """Returns the place that agrees best over these layers, its agreement, and that of the recorded place.

    The recorded place is returned unless another is clearly better.
    """
    shape = next(iter(own.values())).shape
    scores = {
        place: compare(rollouts, own, place, max_rows=MAX_ROWS // 2).mean(layers)
        for place in candidate_places(rollouts, shape[1])
    }
    best = max(scores, key=lambda place: scores[place])
    recorded = scores[Place()]
    if scores[best] < recorded + CLEAR:
        best = Place()
    return best, scores[best], recorded


def layer_order(rollouts: Sequence[DumpedRollout], own: OwnIds, place: Place) -> tuple[int, ...] | None:
    """Returns the recorded layer of each MoE layer, one to one, under which they agree best at the rows of this place;
    None if the record has fewer layers, or that is the order as recorded."""
    num_layers = next(iter(own.values())).shape[1]
    widths = {rollout.expert_ids.shape[1] for rollout in rollouts if rollout.expert_ids is not None}
    if min(widths) < num_layers:
        return None
    agreement = np.zeros((min(widths), num_layers))
    for recorded in range(min(widths)):
        everywhere = replace(place, layer=0, order=(recorded,) * num_layers)
        agreement[recorded] = compare(rollouts, own, everywhere, max_rows=MAX_ROWS // 8).by_layer()
    order = np.full(num_layers, -1)
    for flat in np.argsort(-agreement, axis=None, kind="stable"):
        recorded, layer = divmod(int(flat), num_layers)
        if order[layer] < 0 and recorded not in order:
            order[layer] = recorded
    return None if (order == np.arange(num_layers)).all() else tuple(order.tolist())


def repeats(rollout: DumpedRollout, own: NDArray[np.int16] | None) -> NDArray[np.bool_]:
    """Returns bool [S - 1]: rows that are equal to the one before in every layer, though the model chooses other
    experts for the two. rollout: with a record of the model's shape."""
    repeated = np.zeros(len(rollout) - 1, bool)
    ids = rollout.expert_ids
    if ids is None or own is None or len(ids) != len(own) or len(ids) < 2:
        return repeated
    equal = (ids[1:] == ids[:-1]).all((1, 2)) & (ids[1:] >= 0).all((1, 2))
    repeated[1:] = equal & (jaccard(own[1:], own[:-1]).mean(1) < POOR)
    return repeated


def renumbering(compared: Compared, layer: int, num_experts: int) -> NDArray[np.int32] | None:
    """Returns int32 [E], the expert of the model by recorded number, if that makes the record of a layer agree clearly
    better and well; None if not.

    A recorded number gets the expert that most often occurs with it, among those not in a surer pair.
    """
    there = compared.there_nL[:, layer]
    recorded, own = compared.recorded[there, layer], compared.own[there, layer].astype(np.int64)
    if len(recorded) < 32 or recorded.max(initial=0) >= num_experts:
        return None
    counts = np.zeros((num_experts, num_experts))
    np.add.at(counts, (recorded[:, :, None], own[:, None, :]), 1.0)
    strength = counts / np.sqrt(np.outer(counts.sum(1), counts.sum(0)) + 1e-9)
    mapping = np.full(num_experts, -1, np.int32)
    for flat in np.argsort(-strength, axis=None, kind="stable"):
        one, other = divmod(int(flat), num_experts)
        if mapping[one] < 0 and other not in mapping:
            mapping[one] = other
    before, after = jaccard(recorded, own).mean(), jaccard(mapping[recorded], own).mean()
    return mapping if after > max(POOR, before + CLEAR) else None


def enforceable(rollout: DumpedRollout, own: NDArray[np.int16], num_experts: int) -> DumpedRollout:
    """Returns the rollout with a record [S - 1, L, K] that can be enforced: from its start, with the model's own choice
    for rows and layers whose ids do not all exist. Rows that name experts twice are filled up as padding in a trainer
    does."""
    ids, there = route_table(rollout, own.shape, Place())
    there &= (ids >= 0).all(-1) & (ids < num_experts).all(-1)
    filled = np.where(there[..., None], ids, own.astype(np.int32))
    return replace(rollout, expert_ids=completed(filled), routed=there.any(1))
