"""Rewards that need nothing but the response and a column of its row. Run in the process of a reward.

Each maker here takes the keys of its kind (`moerl.tasks.rewards.section`), once, and returns the function that is
called with rows and responses. If a row has no usable answer, the function raises: such a response has no reward.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

Score = Callable[[Mapping[str, Any], str], float]

_FENCE = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def exact(*, column: str, answer_pattern: str | None, pattern: str | None, ignore_case: bool) -> Score:
    """Makes a reward of 1 if the response's answer is the row's, else 0."""

    def same(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    def score(row: Mapping[str, Any], response: str) -> float:
        answer = _answer(row, column, answer_pattern)
        given = response if pattern is None else _last_group(pattern, response)
        return float(given is not None and same(given) == same(answer))

    return score


def regex(*, pattern: str) -> Score:
    """Makes a reward of 1 if the pattern is found, else 0."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda _, response: float(compiled.search(response) is not None)


def math(*, column: str, answer_pattern: str | None) -> Score:
    """Makes a reward of 1 if math-verify finds the two answers equal, else 0, also if it cannot read the response."""
    # Seconds to import, and only in the process of such a reward.
    import math_verify

    # It warns at every call that its time limit is off.
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # The first call loads a grammar and parts of sympy. No response is to spend its time on that.
    sample = math_verify.parse("\\boxed{\\frac{x}{2} + 1}", parsing_timeout=0)
    math_verify.verify(sample, math_verify.parse("1", parsing_timeout=0), timeout_seconds=None)

    def score(row: Mapping[str, Any], response: str) -> float:
        answer = _answer(row, column, answer_pattern)
        # The time limit is that of the process, which reports it: after the library's own the answer would be wrong.
        gold = math_verify.parse(answer if "\\boxed" in answer else f"\\boxed{{{answer}}}", parsing_timeout=0)
        if not gold:
            raise ValueError(f"math-verify reads no answer in column {column!r}: {answer[:80]!r}")
        return float(math_verify.verify(gold, math_verify.parse(response, parsing_timeout=0), timeout_seconds=None))

    return score


def json_schema(*, schema: Mapping[str, Any] | None, column: str | None) -> Score:
    """Makes a reward of 1 if the response, or the last fenced block in it, meets the schema, else 0."""
    # A tenth of a second to import, and only in the process of such a reward.
    from moerl.tasks.rewards.schemas import validator

    shared = None if schema is None else validator(schema)

    def score(row: Mapping[str, Any], response: str) -> float:
        checks = shared
        if checks is None:
            found = row[column or ""]
            checks = validator(json.loads(found) if isinstance(found, str) else found)
        try:
            value = json.loads(last_block(response))
        except ValueError:
            return 0.0
        return float(checks.is_valid(value))

    return score


def reasoning(*, dataset: str, size: int, options: Mapping[str, Any]) -> Score:
    """Makes a reward of the own score of one of reasoning-gym's sets, from 0 to 1; some evaluate answers as Python. A
    row has the `seed` of a set and the `index` of the problem: the problem itself may hold what no process can be
    sent."""
    # Seconds to import, and only in the process of such a reward.
    import reasoning_gym

    sets: dict[int, Any] = {}

    def score(row: Mapping[str, Any], response: str) -> float:
        seed = row["seed"]
        if seed not in sets:
            sets[seed] = reasoning_gym.create_dataset(dataset, seed=seed, size=size, **options)
        return float(sets[seed].score_answer(response, sets[seed][row["index"]]))

    return score


def last_block(response: str) -> str:
    """Returns the last fenced block of a response; all of the response if it has none."""
    blocks = _FENCE.findall(response)
    return blocks[-1] if blocks else response


def _answer(row: Mapping[str, Any], column: str, pattern: str | None) -> str:
    if row.get(column) is None:
        raise ValueError(f"no column {column!r} in the row, or nothing in it")
    value = row[column]
    text = value if isinstance(value, str) else json.dumps(value)
    found = text if pattern is None else _last_group(pattern, text)
    if found is None or not found.strip():
        raise ValueError(f"no answer in column {column!r}: {text[:80]!r}")
    return found.strip()


def _last_group(pattern: str, text: str) -> str | None:
    found = re.findall(pattern, text, re.MULTILINE)
    return found[-1] if found else None
