"""Journals of finished groups that are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from factories import SPEC, make_trajectory

from moerl.buffer.journal import FinishedGroup, Journal


def group(number: int, count: int = 2) -> FinishedGroup:
    rng = np.random.default_rng(number)
    made = [replace(make_trajectory(rng), rewards={"reward": float(i), "accuracy": 0.0}) for i in range(count)]
    return FinishedGroup(number, made, {f"rl/{number}/9": "routing_rows"})


def written(folder: Path, *numbers: int, step: int = 0) -> Journal:
    """A journal that has these groups, still open."""
    journal = Journal(folder, SPEC)
    journal.begin(step)
    for number in numbers:
        journal.append(group(number))
    return journal
