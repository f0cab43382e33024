"""Training steps with replay, and the refusal of one: ``from replay_steps import refusal_of``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe

from moerl.contract.batch import Microbatch
from moerl.errors import ReplayError

LENGTHS = (21, 21, 12, 30)


def make_batches(seed: int) -> list[Microbatch]:
    return tiny_moe.pack(tiny_moe.make_samples(seed, LENGTHS), token_budget=48)[0]


def step(trainer: Any, batches: list[Microbatch]) -> Any:
    loss = tiny_moe.policy_loss(trainer, batches, tiny_moe.num_trained(batches))
    return trainer.step(batches, loss, enforce=True)


def assert_same_weights(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert tiny_moe.largest_difference(left, right) == 0.0


def refusal_of(layout: Any, path: Path, batches: list[Microbatch], recompute: str, sabotage: Any = None) -> str:
    """The refusal of a step over `batches`, after which neither weights nor the next step differ from a fresh
    trainer's."""
    trainer = tiny_moe.build(layout, path, recompute=recompute)
    untouched = tiny_moe.exported(trainer)
    restore = sabotage(trainer) if sabotage else None
    with pytest.raises(ReplayError) as caught:
        step(trainer, batches)
    assert_same_weights(tiny_moe.exported(trainer), untouched)
    if restore:
        restore()
    fresh = tiny_moe.build(layout, path, recompute=recompute)
    for each in (trainer, fresh):
        step(each, make_batches(12))
    assert_same_weights(tiny_moe.exported(trainer), tiny_moe.exported(fresh))
    assert tiny_moe.largest_difference(tiny_moe.exported(fresh), untouched) > 1e-3
    return str(caught.value)
