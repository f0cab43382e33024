"""Sums over a dump beside the same counted row by row."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from foreign_dumps import make_dumped

from moerl.diagnostics.tallies import Tallies, expert_bits


@pytest.mark.parametrize("num_experts", [8, 64, 65, 256])
def test_bits_are_those_of_the_experts_and_of_no_others(num_experts: int):
    rng = np.random.default_rng(num_experts)
    ids = rng.integers(-1, num_experts + 2, (50, 3, 4))
    bits = expert_bits(ids, num_experts)
    for row, layer in np.ndindex(50, 3):
        words = bits[row, layer]
        held = {e for e in range(num_experts) if int(words[e // 64]) >> (e % 64) & 1}
        assert held == {e for e in ids[row, layer].tolist() if 0 <= e < num_experts}


def test_layers_swaps_and_kinds_are_those_counted_row_by_row():
    rng = np.random.default_rng(0)
    num_layers, num_experts, top_k = 3, 70, 4
    tallies = Tallies(num_layers, num_experts, top_k)
    rows, differing, shared_sum = 0, np.zeros(num_layers), np.zeros(num_layers)
    swaps: Counter[tuple[int, int, int]] = Counter()
    kinds: dict[str, list[bool]] = {"prompt": [], "response": []}
    for number in range(6):
        dumped = make_dumped(rng, name=str(number), spans=(7, 12))
        size = len(dumped) - 1
        own = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(size * num_layers)])
        own = own.reshape(size, num_layers, top_k)
        recorded = own.copy()
        for row, layer in np.ndindex(size, num_layers):
            if rng.random() < 0.3:
                outside = [e for e in range(num_experts) if e not in own[row, layer]]
                recorded[row, layer, 1] = rng.choice(outside)
                swaps[layer, int(recorded[row, layer, 1]), int(own[row, layer, 1])] += 1
        routed = rng.random(size) < 0.9
        for row in np.flatnonzero(~routed):
            for layer in range(num_layers):
                if set(recorded[row, layer]) != set(own[row, layer]):
                    swaps[layer, int(recorded[row, layer, 1]), int(own[row, layer, 1])] -= 1
        rollout = replace(dumped, expert_ids=recorded.astype(np.int32), routed=routed)
        layers = tallies.add(rollout, own, None)
        assert layers is not None
        for row in range(size):
            differs = [set(recorded[row, layer]) != set(own[row, layer]) for layer in range(num_layers)]
            assert layers[row] == (sum(differs) if routed[row] else -1)
            if routed[row]:
                rows += 1
                differing += differs
                shared = [len(set(recorded[row, layer]) & set(own[row, layer])) for layer in range(num_layers)]
                shared_sum += [each / (2 * top_k - each) for each in shared]
                kinds["response" if rollout.sampled[row + 1] else "prompt"].append(any(differs))
    assert [layer.differing for layer in tallies.layers()] == pytest.approx(differing / rows)
    assert [layer.jaccard for layer in tallies.layers()] == pytest.approx(shared_sum / rows)
    named = {(swap.layer, swap.recorded, swap.own): swap.count for swap in tallies.swaps()}
    assert all(swaps[key] == count for key, count in named.items())
    assert sorted(named.values(), reverse=True) == [count for _, count in swaps.most_common(len(named))]
    of_kind = {each.name: each for each in tallies.slices() if each.by == "kind"}
    assert {name: each.differing for name, each in of_kind.items()} == pytest.approx(
        {name: np.mean(flags) for name, flags in kinds.items()}
    )


def test_gaps_by_engine_are_means_over_its_tokens():
    tallies = Tallies(0, 1, 1)
    rng, by_engine = np.random.default_rng(1), dict[str, list[float]]()
    for number in range(8):
        rollout = replace(make_dumped(rng, name=str(number), spans=(3, 5 + number)), engine=f"e{number % 2}")
        d = rng.standard_normal(rollout.num_sampled)
        tallies.add(rollout, None, d)
        by_engine.setdefault(rollout.engine, []).extend(np.abs(d).tolist())
    found = {each.name: each for each in tallies.slices() if each.by == "engine"}
    for name, values in by_engine.items():
        gap = found[name].gap
        assert gap is not None
        assert gap.value == pytest.approx(np.mean(values))
        assert gap.low <= gap.value <= gap.high
        assert found[name].num_tokens == len(values)
