"""Scores of an evaluation: pass@k, majority@k and their intervals, from the worth of each response. Pure; numpy."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
"""Draws of problems for an interval, and of responses for a majority."""

_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the chance that at least one of k responses is right, without bias: ``1 - C(n - c, k) / C(n, k)``.

    Chen et al. 2021, arXiv:2107.03374. num_samples: n >= k. num_correct: c of them.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"k = {k}, {num_correct} of {num_samples} right; expected 1 <= k <= n, 0 <= c <= n")
    if num_samples - num_correct < k:
        return 1.0
    wrong = np.arange(num_samples - num_correct + 1, num_samples + 1)
    return float(1.0 - np.prod(1.0 - k / wrong))


def final_answer(response: str) -> str:
    """Returns the answer that a vote counts: the last ``\\boxed{...}``, else the last number, else the last line."""
    boxed = _BOXED.findall(response)
    if boxed:
        return "".join(str(boxed[-1]).split())
    numbers = _NUMBER.findall(response)
    if numbers:
        return str(numbers[-1]).replace(",", "")
    return response.strip().rpartition("\n")[2].strip()


def majority_at_k(answers: Sequence[str], correct: Sequence[bool], k: int, seed: int = 0) -> float:
    """Returns the chance that the answer most of k responses give is right.

    k of them are drawn without repetition, `RESAMPLES` times, or all of them once if k is their number; ties are shared
    evenly. An answer is as right as the responses that give it.

    Args:
        answers: of each response, as `final_answer` has them. correct: whether it is right.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"k = {k}; expected 1 to {len(answers)}")
    names, index = np.unique(np.array(answers, dtype=object).astype(str), return_inverse=True)
    right = np.bincount(index, np.asarray(correct, float), len(names)) / np.bincount(index, minlength=len(names))
    rng = np.random.default_rng(seed)
    draws = 1 if k == len(answers) else RESAMPLES
    total = 0.0
    for _ in range(draws):
        votes = np.bincount(index[rng.permutation(len(answers))[:k]], minlength=len(names))
        total += right[votes == votes.max()].mean()
    return float(total / draws)


def interval(scores: Sequence[float] | NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """Returns a 95 % interval of the mean: percentiles of the means of problems drawn with repetition (bootstrap)."""
    values = np.asarray(scores, float)
    rng = np.random.default_rng(seed)
    means = [values[rng.integers(0, len(values), len(values))].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def powers_up_to(most: int) -> list[int]:
    """Returns 1, 2, 4, ... and `most` itself."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    return powers if most in powers else [*powers, most]
