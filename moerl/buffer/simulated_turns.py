"""Episodes of a simulation: their turns, and functions that draw them. Pure; any process."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """A turn of an episode; the response to a prompt is an episode of one turn."""

    num_tokens: int
    """Sampled tokens, at least 1."""
    num_observed: int = 0
    """Tokens that the environment writes behind them."""
    environment_seconds: float = 0.0
    """Seconds that the environment takes."""


Draw = Callable[[], Sequence[SimulatedTurn]]
"""Draws an episode, of at least one turn."""


def drawn_from(episodes: Sequence[Sequence[SimulatedTurn]], seed: int) -> Draw:
    """Returns a function that draws from measured episodes, each equally likely."""
    generator, values = random.Random(seed), list(episodes)
    return lambda: generator.choice(values)


def in_turns(
    length: Callable[[], int], num_turns: int, num_observed: int, environment_seconds: float, seed: int
) -> Draw:
    """Returns a function that draws the tokens of an episode, and cuts them into equal turns.

    Args:
        num_turns: of an episode; fewer if it has fewer tokens.
        num_observed: tokens that the environment writes between two turns.
        environment_seconds: mean of the time that it takes, exponentially distributed.
    """
    generator = random.Random(seed)

    def draw() -> Sequence[SimulatedTurn]:
        num_tokens = length()
        count = min(num_turns, num_tokens)
        ends = [num_tokens * number // count for number in range(count + 1)]
        turns = [SimulatedTurn(end - start) for start, end in itertools.pairwise(ends)]
        for number in range(count - 1):
            seconds = generator.expovariate(1.0) * environment_seconds
            turns[number] = SimulatedTurn(turns[number].num_tokens, num_observed, seconds)
        return turns

    return draw


def long_tailed(mean: float, longest: int, seed: int) -> Callable[[], int]:
    """Returns a function that draws log-normal lengths of about this mean, cut off at `longest`; their logarithms have
    a deviation of 1."""
    generator = random.Random(seed)
    return lambda: min(longest, max(1, round(generator.lognormvariate(math.log(mean) - 0.5, 1.0))))
