"""Rewards by kind, each called as its process calls it."""

from __future__ import annotations

import json

import pytest

from moerl.tasks.rewards import builtin


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("3/4", "So it is \\boxed{0.75}.", 1.0),
        ("\\frac{1}{2}", "The answer is $\\frac{2}{4}$", 1.0),
        ("12+1=13\n#### 1,300", "It is 1300", 1.0),
        ("x^2+1", "\\boxed{1 + x^2}", 1.0),
        ("5", "\\boxed{6}", 0.0),
        ("5", "no idea", 0.0),
    ],
)
def test_math_compares_values_and_not_spelling(answer: str, response: str, reward: float):
    pattern = "#### (.+)" if "####" in answer else None
    assert builtin.math(column="answer", answer_pattern=pattern)({"answer": answer}, response) == reward


@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": "no number"}, {"answer": "#### "}])
def test_a_row_without_an_answer_fails_and_is_no_reward_of_zero(row: dict[str, str]):
    with pytest.raises(ValueError, match=r"no answer in column|no column 'answer'"):
        builtin.exact(column="answer", answer_pattern="#### (.+)", pattern=None, ignore_case=False)(row, "5")


def test_exact_takes_the_last_match_and_may_ignore_capitals():
    row = {"answer": "Paris"}
    plain = {"column": "answer", "answer_pattern": None}
    assert builtin.exact(**plain, pattern=None, ignore_case=False)(row, " Paris\n") == 1.0
    assert builtin.exact(**plain, pattern=None, ignore_case=False)(row, "paris") == 0.0
    last = builtin.exact(**plain, pattern="A: (.*)", ignore_case=True)
    assert (last(row, "A: Rome\nA: PARIS"), last(row, "A: Paris\nA: Rome"), last(row, "Paris")) == (1.0, 0.0, 0.0)
    assert builtin.exact(**plain, pattern=None, ignore_case=False)({"answer": 5}, "5") == 1.0


def test_regex_looks_across_lines():
    score = builtin.regex(pattern="<think>.+</think>")
    assert (score({}, "<think>a\nb</think> 5"), score({}, "5")) == (1.0, 0.0)


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ('{"a": 1}', 1.0),
        ('Here:\n```json\n{"a": 2}\n```\nDone.', 1.0),
        ('{"a": "1"}', 0.0),
        ('{"b": 1}', 0.0),
        ("{a: 1}", 0.0),
    ],
)
def test_json_must_meet_the_schema(response: str, reward: float):
    assert builtin.json_schema(schema=SCHEMA, column=None)({}, response) == reward
    row = {"schema": json.dumps(SCHEMA)}
    assert builtin.json_schema(schema=None, column="schema")(row, response) == reward
