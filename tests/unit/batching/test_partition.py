"""Division of sequences into packs and among ranks: nothing lost, budgets kept, full and balanced."""

from __future__ import annotations

import numpy as np
import pytest
from factories import QWEN3_30B
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.batching.cost import SequenceCost, sequence_flops
from moerl.batching.partition import Pack, best_fit_decreasing, deal, fit, plan_packs
from moerl.models.description import describe

SIZES = st.lists(st.integers(1, 40), max_size=40)
QWEN3_30B_A3B = sequence_flops(describe(QWEN3_30B, "published"))


def members(plan: list[list[Pack]]) -> list[int]:
    return sorted(index for packs in plan for pack in packs for index in pack)


def long_tailed(num: int, seed: int) -> list[int]:
    """Log-normal lengths with a mean of about 4K rows and a 99th percentile of 32K, where they are cut."""
    normal = np.random.default_rng(seed).standard_normal(num)
    return np.clip(np.exp(7.66 + 1.177 * normal), 16, 32768).astype(int).tolist()


def filling(num_rows: int, seed: int) -> list[int]:
    """Returns lengths that make just under `num_rows` rows together: a batch gathered to a number of tokens."""
    lengths = long_tailed(num_rows // 1000, seed)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), num_rows))]


def costs_of(plan: list[list[Pack]], costs: list[float]) -> np.ndarray:
    """[ranks, packs]"""
    return np.array([[sum(costs[i] for i in pack) for pack in packs] for packs in plan])


def test_the_long_tail_is_the_one_the_gates_speak_of():
    lengths = long_tailed(100_000, 0)
    assert np.mean(lengths) == pytest.approx(4096, rel=0.03)
    assert np.percentile(lengths, 99) == pytest.approx(32768, rel=0.05)


# A sequence of 32K rows fills a pack of 32K; four such packs per rank are too few to level out which rank has one.
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("num_ranks", "budget", "num_packs"),
    [
        *[(2, 32768, 128), (4, 32768, 128), (8, 32768, 128), (16, 32768, 128), (32, 32768, 256)],
        *[(2, 65536, 64), (4, 65536, 64), (8, 65536, 64), (16, 65536, 64), (32, 65536, 64)],
    ],
)
def test_packs_are_full_and_ranks_balanced_on_a_long_tail(num_ranks: int, budget: int, num_packs: int, seed: int):
    sizes = filling(int(0.985 * num_packs * budget), seed)
    costs = [QWEN3_30B_A3B(size) for size in sizes]
    plan = plan_packs(sizes, costs, num_ranks, budget)
    costs_RM = costs_of(plan, costs)
    assert costs_RM.size <= num_packs
    assert sum(sizes) / (costs_RM.size * budget) >= 0.97
    assert costs_RM.sum(1).max() / costs_RM.sum(1).mean() <= 1.1


@pytest.mark.parametrize("num_samples", [512, 768, 1024])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_any_number_of_samples_takes_the_fewest_microbatches_balanced(num_samples: int, num_ranks: int):
    sizes, budget = long_tailed(num_samples, num_samples), 65536
    costs = [QWEN3_30B_A3B(size) for size in sizes]
    costs_RM = costs_of(plan_packs(sizes, costs, num_ranks, budget), costs)
    assert costs_RM.shape[1] == -(-sum(sizes) // (budget * num_ranks))
    assert costs_RM.sum(1).max() / costs_RM.sum(1).mean() <= 1.1
    lockstep = costs_RM.max(0).sum() / costs_RM.sum(1).mean()
    assert lockstep <= 1.1, "packs that run together cost about the same"


@pytest.mark.parametrize("seed", range(2))
def test_exchanges_level_ranks_of_few_packs_some_filled_by_one_sequence(seed: int):
    sizes = long_tailed(1024, seed)
    costs = [QWEN3_30B_A3B(size) for size in sizes]
    costs_RM = costs_of(plan_packs(sizes, costs, 32, 32768), costs)
    assert costs_RM.shape == (32, 4)
    assert costs_RM.sum(1).max() / costs_RM.sum(1).mean() <= 1.1


@settings(deadline=None)
@given(SIZES, st.integers(1, 60), st.integers(1, 9), st.sampled_from([0.0, 0.05, 3.0]))
def test_a_plan_holds_every_sequence_once_within_the_budget(
    sizes: list[int], capacity: int, num_ranks: int, quadratic: float
):
    costs = [SequenceCost(1.0, quadratic)(size) for size in sizes]
    plan = plan_packs(sizes, costs, num_ranks, capacity)
    assert members(plan) == list(range(len(sizes)))
    assert len(plan) == num_ranks
    assert len({len(packs) for packs in plan}) == 1
    for packs in plan:
        for pack in packs:
            assert sum(sizes[i] for i in pack) <= capacity or len(pack) == 1
            assert pack == sorted(pack)
    num_tight = int(best_fit_decreasing(np.array(sizes, np.int64), capacity).max()) + 1 if sizes else 0
    assert len(plan[0]) == -(-num_tight // num_ranks), "no more than the fewest, rounded up to the ranks"
    assert plan == plan_packs(sizes, costs, num_ranks, capacity)


def test_packs_of_equal_rows_and_unequal_cost_are_spread_over_the_ranks():
    # Two packs of one sequence of 8, two of eight sequences of 1: all full, the former dearer.
    sizes = [8, 8] + [1] * 16
    costs = [SequenceCost(1.0, 1.0)(size) for size in sizes]
    costs_RM = costs_of(plan_packs(sizes, costs, 2, 8), costs)
    assert costs_RM.tolist() == [[72.0, 16.0], [72.0, 16.0]]


@settings(deadline=None)
@given(SIZES.filter(len))
def test_best_fit_leaves_no_two_packs_that_would_fit_together(sizes: list[int]):
    pack_of = best_fit_decreasing(np.array(sizes, np.int64), 50)
    filled = sorted(np.bincount(pack_of, sizes).tolist())
    assert len(filled) == 1 or filled[0] + filled[1] > 50


def test_best_fit_takes_the_fullest_pack_that_has_room():
    assert best_fit_decreasing(np.array([6, 7, 3, 4]), 10).tolist() == [1, 0, 0, 1]


def test_fit_counts_rows_and_cost_alike():
    assert fit(np.ones(4, np.int64), np.array([10.0, 1, 1, 1]), 2, 10).tolist() == [0, 1, 1, 1]  # pyright: ignore
    assert fit(np.ones(4, np.int64), np.ones(4), 2, 10).tolist() == [0, 1, 0, 1]  # pyright: ignore


def test_fit_says_where_a_sequence_finds_no_room():
    rows = np.array([6, 6, 6], np.int64)
    assert fit(rows, rows.astype(float), 2, 10) is None
    assert fit(rows, rows.astype(float), 3, 10) is not None


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_packs_are_dealt_in_rounds_of_similar_cost(num_ranks: int, num_rounds: int, seed: int):
    costs = np.random.default_rng(seed).exponential(size=num_ranks * num_rounds)
    rank_of = deal(costs, num_ranks)
    assert np.bincount(rank_of, minlength=num_ranks).tolist() == [num_rounds] * num_ranks
    widest = np.ptp(np.sort(costs).reshape(num_rounds, num_ranks), axis=1).max()
    assert np.ptp(np.bincount(rank_of, costs)) <= widest + 1e-9
