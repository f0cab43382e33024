"""pass@k, majority@k and intervals, against counting every choice."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hostile_responses import HOSTILE

from moerl.diagnostics.scores import final_answer, interval, majority_at_k, pass_at_k, powers_up_to


@pytest.mark.parametrize(("n", "c", "k"), [(1, 0, 1), (4, 1, 2), (5, 2, 3), (6, 3, 3), (7, 7, 2), (8, 1, 8), (6, 0, 4)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_response(n: int, c: int, k: int):
    choices = [any(i < c for i in chosen) for chosen in combinations(range(n), k)]
    assert pass_at_k(n, c, k) == pytest.approx(np.mean(choices))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0)])
def test_more_than_there_is_is_refused(n: int, c: int, k: int):
    with pytest.raises(ValueError, match="expected 1 <= k <= n"):
        pass_at_k(n, c, k)


def test_a_majority_is_counted_by_answers_and_ties_are_shared():
    answers, right = ["5", "5", "6", "7"], [True, True, False, False]
    assert majority_at_k(answers, right, 4) == 1.0
    assert majority_at_k(["5", "6"], [True, False], 2) == 0.5
    assert majority_at_k(["6", "6", "5"], [False, False, True], 3) == 0.0
    # All choices of three, counted: {5,5,6}, {5,5,7}: right; {5,6,7} twice: a third.
    assert majority_at_k(answers, right, 3) == pytest.approx((1 + 1 + 2 / 3) / 4, abs=0.05)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so \\boxed{1} or \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("2 apples and 3 make\n#### 1,300", "1300"),
        ("a\nParis\n", "Paris"),
        ("", ""),
    ],
)
def test_the_answer_of_a_response_is_its_last_one(response: str, answer: str):
    assert final_answer(response) == answer


def test_hostile_responses_have_answers_that_a_vote_counts():
    answers = [final_answer(response) for response in HOSTILE.values()]
    assert majority_at_k(answers, [False] * len(answers), 3) == 0.0


def test_an_interval_of_a_mean_is_about_twice_its_standard_error_and_the_same_each_time():
    scores = np.random.default_rng(0).random(400) < 0.3
    low, high = interval(scores.astype(float))
    error = scores.std() / 20
    assert low == pytest.approx(scores.mean() - 1.96 * error, abs=error / 3)
    assert high == pytest.approx(scores.mean() + 1.96 * error, abs=error / 3)
    assert interval(scores.astype(float)) == (low, high)


def test_powers_end_with_the_number_itself():
    assert powers_up_to(6) == [1, 2, 4, 6]
    assert powers_up_to(8) == [1, 2, 4, 8]
