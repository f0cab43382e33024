"""Sums over the rollouts of a dump, taken one rollout at a time: routing by layer, position and turn, gaps by kind of
token. Memory grows with the dump by a number a sampled token, a few sums a rollout and a sample of margins. Torch-free.

Shape legend: R = rows of a rollout, L = MoE layers, E = experts, K = experts per token, W = 64-bit words for E bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Histogram, Interval, Layer, LayerMap, Slice, Swap

MAX_SWAPS = 24
MAX_COLUMNS = 64
"""Most columns of the layer maps by position and by turn; later ones share the last. The map by step has all steps."""
MARGIN_BINS = 24
CHUNK_ROWS = 4096


def expert_bits(ids: NDArray[np.integer], num_experts: int) -> NDArray[np.uint64]:
    """Returns uint64 [..., W]: bit e is set if expert e is among the K of the last axis; ids out of range set none."""
    words = -(-num_experts // 64)
    bits = np.zeros((*ids.shape[:-1], words), np.uint64)
    for k in range(ids.shape[-1]):
        chosen = ids[..., k]
        known = (chosen >= 0) & (chosen < num_experts)
        flags = np.where(known, np.uint64(1) << (chosen & 63).astype(np.uint64), np.uint64(0))
        if words == 1:
            bits[..., 0] |= flags
        else:
            for word in range(words):
                bits[..., word] |= np.where(chosen >> 6 == word, flags, np.uint64(0))
    return bits


@dataclass(slots=True)
class _Sum:
    """A mean over tokens, for a bootstrap: sum and count of each rollout. Rows of routing, and those that differ."""

    parts: list[tuple[float, int]] = field(default_factory=list)
    rows: int = 0
    flipped: int = 0

    def interval(self) -> Interval | None:
        if not self.parts:
            return None
        sums_counts = np.array(self.parts)
        rng = np.random.default_rng(0)
        drawn = rng.integers(0, len(sums_counts), (200, min(len(sums_counts), 20_000)))
        totals = sums_counts[drawn].sum(1)
        low, high = np.quantile(totals[:, 0] / totals[:, 1], [0.025, 0.975])
        value = float(sums_counts[:, 0].sum() / sums_counts[:, 1].sum())
        return Interval(value, min(float(low), value), max(float(high), value))


class Tallies:
    """Sums over the rollouts of one dump.

    Args:
        num_layers, num_experts, top_k: of the model; 0 layers if no routes are compared.
        classes: by token id, the class of a token; empty without a tokenizer.
        current_version: the newest policy version, from which ages count; -1 if it is not known.
        label: suffix of the names of maps, slices and histograms.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        *,
        classes: Sequence[str] = (),
        current_version: int = -1,
        label: str = "",
    ) -> None:
        self._classes, self._current, self._label = np.array(classes, dtype=object), current_version, label
        self.size(num_layers, num_experts, top_k)
        self._margin_samples: tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]] = ([], [])
        self._maps: dict[str, dict[int, NDArray[np.int64]]] = {"position": {}, "turn": {}, "step": {}}
        self._swaps: Counter[tuple[int, int, int]] = Counter()
        self._slices: dict[tuple[str, str], _Sum] = defaultdict(_Sum)
        self.num_rollouts = self.num_rows = 0
        self.d: list[NDArray[np.float32]] = []
        self.names: list[str] = []

    def size(self, num_layers: int, num_experts: int, top_k: int) -> None:
        """Sets the sizes of routes, before any are added."""
        self._num_layers, self._num_experts, self._top_k = num_layers, num_experts, top_k
        self._rows_L, self._flips_L = np.zeros(num_layers, np.int64), np.zeros(num_layers, np.int64)
        self._jaccard_L = np.zeros(num_layers)
        self._margins = np.zeros((2, num_layers))
        self._margin_counts = np.zeros((2, num_layers), np.int64)

    def holds(self, ids: NDArray[np.integer]) -> bool:
        """Returns True if routes [S - 1, L, K] are of the sizes that were set."""
        return ids.shape[1:] == (self._num_layers, self._top_k) and int(ids.max(initial=0)) < self._num_experts

    # --- adding ------------------------------------------------------------------------------------------------------

    def add(
        self,
        rollout: DumpedRollout,
        own_ids: NDArray[np.integer] | None,
        d_T: NDArray[np.floating] | None,
        margins: NDArray[np.floating] | None = None,
    ) -> NDArray[np.int64] | None:
        """Adds one rollout.

        Args:
            own_ids: [S - 1, L, K], the choice of the model's routers, without a model that of the dumped trainer; None
                if neither is known.
            d_T: of the sampled tokens, nats; None if nothing scored them. margins: [S - 1, L].

        Returns:
            Number of layers that differ by row, int64 [S - 1]; -1 for rows without a recorded route. None without
                routes.
        """
        self.num_rollouts += 1
        differing_R = None
        if own_ids is not None and rollout.expert_ids is not None and len(rollout.expert_ids) == len(own_ids):
            differing_R = self._add_routes(rollout, own_ids, margins)
        if d_T is not None:
            self.d.append(np.asarray(d_T, np.float32))
            self.names.append(rollout.name)
            self._add_gaps(rollout, np.abs(d_T))
        if differing_R is not None:
            self._add_kinds(rollout, differing_R)
        return differing_R

    def _add_routes(
        self, rollout: DumpedRollout, own_ids: NDArray[np.integer], margins: NDArray[np.floating] | None
    ) -> NDArray[np.int64]:
        assert rollout.expert_ids is not None
        num_rows, routed = len(own_ids), rollout.routed_rows
        differing_R = np.full(num_rows, -1, np.int64)
        for start in range(0, num_rows, CHUNK_ROWS):
            part = slice(start, min(start + CHUNK_ROWS, num_rows))
            flips = self._add_rows(rollout.expert_ids[part], own_ids[part], routed[part])
            differing_R[part] = np.where(routed[part], flips.sum(1), -1)
            self._add_maps(rollout, part, flips, routed[part])
            if margins is not None:
                self._add_margins(margins[part], flips, routed[part])
        self.num_rows += int(routed.sum())
        return differing_R

    def _add_rows(
        self, recorded: NDArray[np.integer], own: NDArray[np.integer], routed: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Returns bool [R, L]: rows that differ."""
        ours, theirs = expert_bits(own, self._num_experts), expert_bits(recorded, self._num_experts)
        shared_RL = np.bitwise_count(ours & theirs).sum(-1)
        flips_RL = (shared_RL < self._top_k) & routed[:, None]
        self._rows_L += int(routed.sum())
        self._flips_L += flips_RL.sum(0)
        jaccard_RL = shared_RL / (2 * self._top_k - shared_RL)
        self._jaccard_L += jaccard_RL[routed].sum(0)
        rows, layers = np.nonzero(flips_RL & (shared_RL == self._top_k - 1))
        if len(rows):
            lost = _only_bit(theirs[rows, layers] & ~ours[rows, layers])
            taken = _only_bit(ours[rows, layers] & ~theirs[rows, layers])
            known = (lost >= 0) & (taken >= 0)
            codes = (layers[known] * self._num_experts + lost[known]) * self._num_experts + taken[known]
            for code, count in zip(*(each.tolist() for each in np.unique(codes, return_counts=True)), strict=True):
                pair, to = divmod(code, self._num_experts)
                self._swaps[(*divmod(pair, self._num_experts), to)] += count
        return flips_RL

    def _add_maps(
        self, rollout: DumpedRollout, part: slice, flips_RL: NDArray[np.bool_], routed: NDArray[np.bool_]
    ) -> None:
        rows = np.arange(part.start, part.stop)
        columns = {
            "position": np.where(rows < 16, 0, np.floor(np.log2(np.maximum(rows, 1))).astype(np.int64) - 3),
            "turn": rollout.turns[part].astype(np.int64),
            "step": np.full(len(rows), rollout.step, np.int64),
        }
        for name, column_R in columns.items():
            column_R = np.minimum(column_R, MAX_COLUMNS - 1) if name != "step" else column_R
            for column in np.unique(column_R[routed]).tolist():
                chosen = routed & (column_R == column)
                sums = self._maps[name].setdefault(column, np.zeros((2, self._num_layers), np.int64))
                sums[0] += int(chosen.sum())
                sums[1] += flips_RL[chosen].sum(0)

    def _add_margins(
        self, margins: NDArray[np.floating], flips_RL: NDArray[np.bool_], routed: NDArray[np.bool_]
    ) -> None:
        for number, chosen in enumerate((flips_RL, ~flips_RL & routed[:, None])):
            self._margins[number] += np.where(chosen, margins, 0.0).sum(0)
            self._margin_counts[number] += chosen.sum(0)
            values = margins[chosen].astype(np.float32)
            self._margin_samples[number].append(values[:: max(1, len(values) // 256)])

    def _add_gaps(self, rollout: DumpedRollout, sizes_T: NDArray[np.floating]) -> None:
        tokens = np.flatnonzero(rollout.sampled)
        place = np.arange(len(tokens))
        quarter = np.minimum(3, place * 4 // max(1, len(tokens)))
        versions = rollout.policy_versions[tokens]
        slices = {
            "turn": rollout.turns[tokens].astype(str),
            "position": np.array(["first quarter", "second quarter", "third quarter", "last quarter"])[quarter],
            "engine": np.full(len(tokens), rollout.engine),
        }
        if self._current >= 0:
            slices["age"] = np.where(versions < 0, "", (self._current - versions).astype(str))
        if rollout.prefix_versions is not None:
            cached = rollout.prefix_versions[: tokens[0]]
            age = int(versions[0] - cached.min(initial=versions[0], where=cached >= 0))
            slices["prefix age"] = np.full(len(tokens), str(age))
        if len(self._classes):
            slices["token class"] = self._classes[np.minimum(rollout.token_ids[tokens], len(self._classes) - 1)]
        for by, names in slices.items():
            for name in np.unique(names.astype(str)).tolist():
                if name:
                    chosen = names == name
                    self._slices[by, name].parts.append((float(sizes_T[chosen].sum()), int(chosen.sum())))

    def _add_kinds(self, rollout: DumpedRollout, differing_R: NDArray[np.int64]) -> None:
        predicts = np.append(rollout.sampled[1:], False)[: len(differing_R)]
        kinds = {("kind", "prompt"): ~predicts, ("kind", "response"): predicts}
        if rollout.engine:
            kinds["engine", rollout.engine] = np.ones(len(differing_R), np.bool_)
        for key, of_it in kinds.items():
            differing = differing_R[of_it & (differing_R >= 0)]
            self._slices[key].rows += len(differing)
            self._slices[key].flipped += int((differing > 0).sum())

    # --- results -----------------------------------------------------------------------------------------------------

    def layers(self) -> tuple[Layer, ...]:
        """Returns a `Layer` per MoE layer; empty if no routes were compared."""
        if not self.num_rows:
            return ()
        rows = np.maximum(1, self._rows_L)
        counts = self._margin_counts
        means = self._margins / np.maximum(1, counts)
        return tuple(
            Layer(
                layer,
                float(self._flips_L[layer] / rows[layer]),
                float(self._jaccard_L[layer] / rows[layer]),
                float(means[0, layer]) if counts[0, layer] else None,
                float(means[1, layer]) if counts[1, layer] else None,
            )
            for layer in range(self._num_layers)
        )

    def maps(self) -> tuple[LayerMap, ...]:
        """Returns the maps by position, turn and step, of those that have several columns."""
        maps: list[LayerMap] = []
        for name, columns in self._maps.items():
            if len(columns) < 2:
                continue
            chosen = sorted(columns)
            shares = np.stack([columns[each][1] / np.maximum(1, columns[each][0]) for each in chosen], 1)
            labels = [_position(each) if name == "position" else str(each) for each in chosen]
            maps.append(LayerMap(name + self._label, tuple(labels), tuple(tuple(map(float, row)) for row in shares)))
        return tuple(maps)

    def swaps(self) -> tuple[Swap, ...]:
        """Returns the commonest swaps, of rows that differ in one expert."""
        return tuple(
            Swap(layer, lost, taken, count, float(count / max(1, self._flips_L[layer])))
            for (layer, lost, taken), count in self._swaps.most_common(MAX_SWAPS)
        )

    def slices(self) -> tuple[Slice, ...]:
        """Returns the slices of every criterion that has several; a single slice would only repeat the whole."""
        count = Counter(by for by, _ in self._slices)
        return tuple(
            Slice(
                by + self._label,
                name,
                sum(tokens for _, tokens in total.parts) or total.rows,
                total.interval(),
                total.flipped / total.rows if total.rows else None,
            )
            for (by, name), total in sorted(self._slices.items(), key=lambda item: (item[0][0], _number(item[0][1])))
            if count[by] > 1
        )

    def histograms(self) -> tuple[Histogram, ...]:
        """Returns a histogram of d, and one of router margins with rows whose experts differ apart from the others."""
        found: list[Histogram] = []
        if self.d:
            d = np.concatenate(self.d)
            limit = max(1e-6, float(np.quantile(np.abs(d), 0.995)))
            counts, edges = np.histogram(np.clip(d, -limit, limit), 41, (-limit, limit))
            found.append(Histogram("d, nats" + self._label, tuple(edges.tolist()), {"tokens": tuple(counts.tolist())}))
        flipped, others = (np.concatenate(each) if each else np.zeros(0) for each in self._margin_samples)
        if len(flipped) and len(others):
            edges = np.linspace(0.0, float(np.quantile(others, 0.99)) or 1.0, MARGIN_BINS + 1)
            binned = {
                name: tuple(np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0].tolist())
                for name, values in (("experts differ", flipped), ("experts agree", others))
            }
            found.append(Histogram("router margin, score" + self._label, tuple(edges.tolist()), binned))
        return tuple(found)


def _only_bit(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns int64 [n]: the number of the one bit that is set in words [n, W]; -1 if none or several are."""
    counts = np.bitwise_count(words).sum(-1)
    word = words.argmax(-1)
    value = words[np.arange(len(words)), word]
    bit = np.log2(np.maximum(value, np.uint64(1)).astype(np.float64)).astype(np.int64)
    return np.where(counts == 1, word * 64 + bit, -1)


def _position(column: int) -> str:
    return "0-15" if column == 0 else f"{2 ** (column + 3)}-{2 ** (column + 4) - 1}"


def _number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.lstrip("-").isdigit() else (1 << 60, name)
