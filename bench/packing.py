"""Packing to a token budget with balanced operations, against longest-first on rows and first-fit decreasing.

`python bench/packing.py [--json FILE]`. Lengths are log-normal with a mean of about 4K rows and a 99th percentile of
32K, gathered to 0.985 of what the microbatches hold; operations are those of Qwen3-30B-A3B, attention included. The
baseline gives sequences to ranks by their rows alone, packs each rank's first-fit, and halves packs if a rank has
fewer microbatches than another. Torch-free, one process.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
from _report import Result, json_argument, report, timed
from _samples import describe_qwen3_moe

from moerl.batching.cost import sequence_flops
from moerl.batching.partition import Pack, plan_packs

COST = sequence_flops(
    describe_qwen3_moe(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        vocab_size=151936,
    )
)
SEEDS = range(5)
SHAPES = ((8, 32768, 128), (8, 65536, 64), (32, 65536, 64))
"""(data-parallel ranks, token budget, microbatches of all ranks)."""

Plan = list[list[Pack]]


def long_tailed(num_rows: int, seed: int) -> list[int]:
    """Lengths that make `num_rows` rows together."""
    normal = np.random.default_rng(seed).standard_normal(num_rows // 1000)
    lengths = np.clip(np.exp(7.66 + 1.177 * normal), 16, 32768).astype(int)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), num_rows))].tolist()


def by_rows_alone(sizes: Sequence[int], num_ranks: int, capacity: int) -> Plan:
    """The baseline."""
    plan = [
        [[members[i] for i in pack] for pack in first_fit([sizes[i] for i in members], capacity)]
        for members in longest_first(sizes, num_ranks)
    ]
    for packs in plan:
        while len(packs) < max(map(len, plan)):
            pack = packs.pop(max(range(len(packs)), key=lambda i: sum(sizes[j] for j in packs[i])))
            packs += [[pack[i] for i in half] for half in longest_first([sizes[i] for i in pack], 2)]
    return plan


def longest_first(sizes: Sequence[int], num_parts: int) -> list[Pack]:
    parts: list[Pack] = [[] for _ in range(num_parts)]
    loads = [(0, part) for part in range(num_parts)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, part = heapq.heappop(loads)
        parts[part].append(index)
        heapq.heappush(loads, (load + sizes[index], part))
    return parts


def first_fit(sizes: Sequence[int], capacity: int) -> list[Pack]:
    packs: list[Pack] = []
    rooms: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        chosen = next((i for i, room in enumerate(rooms) if room >= sizes[index]), None)
        if chosen is None:
            chosen = len(packs)
            packs.append([])
            rooms.append(capacity)
        packs[chosen].append(index)
        rooms[chosen] -= sizes[index]
    return packs


def quality(plan: Plan, sizes: Sequence[int], budget: int) -> tuple[float, float, float]:
    """(fill, largest cost of a rank over the mean, cost in lockstep over the mean)."""
    costs_RM = np.array([[sum(COST(sizes[i]) for i in pack) for pack in packs] for packs in plan])
    mean = costs_RM.sum() / len(plan)
    return sum(sizes) / (costs_RM.size * budget), costs_RM.sum(1).max() / mean, costs_RM.max(0).sum() / mean


def compare(num_ranks: int, budget: int, num_packs: int) -> list[Result]:
    batches = [long_tailed(int(0.985 * num_packs * budget), seed) for seed in SEEDS]
    results = []
    planners: dict[str, Callable[[Sequence[int]], Plan]] = {
        "moerl": lambda sizes: plan_packs(sizes, [COST(size) for size in sizes], num_ranks, budget),
        "baseline": lambda sizes: by_rows_alone(sizes, num_ranks, budget),
    }
    for name, planner in planners.items():
        seen = np.array([quality(planner(sizes), sizes, budget) for sizes in batches])
        at = f"DP {num_ranks}, budget {budget // 1024}K, {name}"
        worst = (seen[:, 0].min(), seen[:, 1].max(), seen[:, 2].max())
        goals = (">= 0.97", "<= 1.1", "") if name == "moerl" else ("", "", "")
        holds = (worst[0] >= 0.97, worst[1] <= 1.1, True) if goals[0] else (True, True, True)
        figures = ("least fill", "largest cost over mean", "largest cost in lockstep over mean")
        spreads = np.ptp(seen, axis=0)
        for figure, value, goal, held, spread in zip(figures, worst, goals, holds, spreads, strict=True):
            results.append(Result(f"{at}: {figure}", float(value), goal, bool(held), "1", float(spread)))
    return results


def main() -> None:
    json_path = json_argument(__doc__)
    results = [result for shape in SHAPES for result in compare(*shape)]
    many = long_tailed(10_000 * 4000, seed=0)[:10_000]
    ours, baseline = timed(
        [lambda: plan_packs(many, [COST(size) for size in many], 32, 32768), lambda: by_rows_alone(many, 32, 32768)],
        repeats=3,
    )
    results.append(
        Result(f"{len(many)} sequences, DP 32, moerl", ours.median, "<= 2", ours.median <= 2, "s", ours.spread)
    )
    results.append(Result(f"{len(many)} sequences, DP 32, baseline", baseline.median, unit="s", spread=baseline.spread))
    report(results, json_path)


if __name__ == "__main__":
    main()
