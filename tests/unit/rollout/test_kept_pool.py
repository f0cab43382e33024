from __future__ import annotations

import numpy as np

from moerl.rollout.kept_pool import KeptPool


def _sets(rng: np.random.Generator, count: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    sizes = rng.integers(0, longest, count)
    return rng.integers(0, 1000, int(sizes.sum())).astype(np.int32), sizes


def test_sets_come_back_in_the_order_asked_for():
    pool = KeptPool()
    starts = pool.append(np.array([4, 9, 7, 1, 2], np.int32), np.array([2, 0, 3]))
    assert pool.take(starts, np.array([2, 0, 3])).tolist() == [4, 9, 7, 1, 2]
    assert pool.take(starts[[2, 1, 0]], np.array([3, 0, 2])).tolist() == [7, 1, 2, 4, 9]
    assert pool.take(starts[:0], np.zeros(0, np.int64)).tolist() == []


def test_the_pool_grows_and_forgets_without_mixing_sets_up():
    rng, pool = np.random.default_rng(0), KeptPool()
    ids, sizes = _sets(rng, 500, 400)
    starts = pool.append(ids, sizes)
    more_ids, more_sizes = _sets(rng, 500, 400)
    more_starts = pool.append(more_ids, more_sizes)
    before = pool.num_used
    expected = pool.take(more_starts[::3], more_sizes[::3])
    moved = pool.keep_only(more_starts[::3], more_sizes[::3])
    assert pool.num_used == more_sizes[::3].sum() < before
    assert np.array_equal(pool.take(moved, more_sizes[::3]), expected)
    assert np.array_equal(ids[: sizes[0]], ids[starts[0] : starts[0] + sizes[0]])
