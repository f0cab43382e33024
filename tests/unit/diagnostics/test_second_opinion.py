from __future__ import annotations

import numpy as np
import pytest
from factories import make_trajectory

from moerl.diagnostics.second_opinion import compare_logprobs, compare_routing, print_opinions

RNG = np.random.default_rng(0)


def test_every_pair_is_compared_on_the_sampled_tokens_alone() -> None:
    trajectory = make_trajectory(RNG, num_prompt=3, num_sampled=4, rollout_id="a")
    engine = trajectory.rollout_logprobs
    other = engine + np.array([9, 9, 9, 0.1, -0.4, 0.1, 0.2])
    opinion = compare_logprobs(trajectory, {"engine": engine, "other": other, "third": engine.copy()})
    assert (opinion.rollout_id, opinion.num_sampled, opinion.worst_token) == ("a", 4, 4)
    assert list(opinion.differences) == [("engine", "other"), ("engine", "third"), ("other", "third")]
    one = opinion.differences["engine", "other"]
    assert (one.largest, one.mean, one.worst_token) == (pytest.approx(0.4), pytest.approx(0.2), 4)
    assert opinion.differences["engine", "third"].largest == 0.0
    assert opinion.within(0.41)
    assert not opinion.within(0.39)


@pytest.mark.parametrize("values", [(np.nan, 0.0), (-np.inf, 0.0), (-np.inf, -np.inf)])
def test_a_log_prob_that_is_not_finite_is_outside_every_tolerance(values: tuple[float, float]) -> None:
    trajectory = make_trajectory(RNG, num_prompt=3, num_sampled=4)
    one, other = np.zeros(7), np.zeros(7)
    one[5], other[5] = values
    opinion = compare_logprobs(trajectory, {"engine": one, "other": other})
    assert not opinion.within(1e9)
    assert opinion.worst_token == 5


def test_routing_is_compared_as_sets_over_the_captured_rows() -> None:
    first, second = make_trajectory(RNG), make_trajectory(RNG, num_sampled=9, unrouted=[4, 5])
    naturals = [t.expert_ids.astype(np.int64)[..., ::-1].copy() for t in (first, second)]
    naturals[1][4:6] = 7
    # One of two experts is another one, in one of sixteen rows.
    naturals[0][2, 1, 0] = min(set(range(8)) - set(first.expert_ids[2, 1].tolist()))
    layers = compare_routing([first, second], naturals)
    assert (layers.num_rows, layers.num_live) == (7 + 9, 2)
    np.testing.assert_allclose(layers.differing_L, [0, 1 / 16, 0])
    np.testing.assert_allclose(layers.jaccard_L, [1, (15 + 1 / 3) / 16, 1])


def test_trajectories_outside_are_named_whole_and_marked(capsys: pytest.CaptureFixture[str]) -> None:
    name = "rl-000123/a-task-with-a-long-name-train-123456/" + "7" * 60
    good = make_trajectory(RNG)
    bad = make_trajectory(RNG, rollout_id=name)
    off = bad.rollout_logprobs - 0.1
    opinions = [
        compare_logprobs(good, {"engine": good.rollout_logprobs, "transformers": good.rollout_logprobs}),
        compare_logprobs(bad, {"engine": bad.rollout_logprobs, "transformers": off}),
    ]
    layers = compare_routing([good, bad], [t.expert_ids.astype(np.int64) for t in (good, bad)])
    print_opinions(opinions, layers, 1e-4)
    text = capsys.readouterr().out
    [row] = [line for line in text.splitlines() if "OUTSIDE" in line]
    assert name in row
    assert "1.00e-01 / 1.00e-01" in row
    assert "engine against transformers: largest difference 1.00e-01 nats" in text
    assert text.splitlines()[-2:] == ["outside the tolerance of 0.0001 nats: 1 of 2 trajectories", f"  {name}"]
    print_opinions(opinions[:1], layers, 1e-4)
    assert capsys.readouterr().out.splitlines()[-1] == "all 1 trajectories within the tolerance of 0.0001 nats"
