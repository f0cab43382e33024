"""Optimizer state in host memory: the digits of a resident one, through checkpoints and skipped updates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tiny_moe
from ranks import Ranks
from replay_steps import make_batches, step

SHARES = (0.0, 0.5, 1.0)
MANY_PIECES = 2**13


@dataclass(frozen=True)
class Run:
    """Results of a trainer: gradient norms by step, its weights at the end, and bytes of its state in host memory."""

    norms: list[float]
    weights: dict[str, np.ndarray]
    host_bytes: int


def train(trainer: Any, *seeds: int) -> Run:
    norms = []
    for seed in seeds:
        batches = tiny_moe.mine(trainer, [make_batches(seed)] * trainer.layout.dims.data)
        norms.append(step(trainer, batches).update.grad_norm)
    return Run(norms, tiny_moe.exported(trainer), trainer.optimizer.host_bytes)


def train_and_go_on(layout: Any, path: Path, folder: Path, options: dict[str, Any]) -> list[tuple[Run, Run]]:
    """By share: two steps, and two more from the checkpoint that the share before wrote after the first two.

    The trainer that goes on has been elsewhere.
    """
    with mock.patch("moerl.trainer.offload.PIECE_ELEMENTS", MANY_PIECES):
        trainers = [tiny_moe.build(layout, path, offload=share, **options) for share in SHARES]
        first = [train(trainer, 11, 12) for trainer in trainers]
        written = [
            tiny_moe.save(trainer, folder / str(share), "0-rl-000002")
            for share, trainer in zip(SHARES, trainers, strict=True)
        ]
        later = []
        for number, trainer in enumerate(trainers):
            train(trainer, 7)
            trainer.restore(written[number - 1])
            later.append(train(trainer, 13, 14))
    return list(zip(first, later, strict=True))


def check_digits(results: list[list[tuple[Run, Run]]]) -> None:
    for resident, *offloaded in results:
        for each in offloaded:
            for expected, found in zip(resident, each, strict=True):
                assert found.norms == expected.norms
                assert tiny_moe.largest_difference(found.weights, expected.weights) == 0.0
        half, whole = (each[0].host_bytes for each in offloaded)
        assert resident[0].host_bytes == 0
        assert whole / 2 <= half < 0.75 * whole


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_in_host_memory_gives_the_digits_of_a_resident_one_and_goes_on_from_each_other(
    dtype: str, untied: Path, tmp_path: Path, one_process: Ranks
) -> None:
    results = one_process.run(train_and_go_on, untied, tmp_path, {"dtype": dtype, "sharding": "on"})
    check_digits(results)
    # Moments, and masters of weights in 16 bits.
    total = sum(weight.size for weight in results[0][0][0].weights.values())
    assert results[0][2][0].host_bytes >= total * (12 if dtype == "bfloat16" else 8)


@pytest.mark.distributed
@pytest.mark.parametrize("sharding", ["on", "overlap"])
@pytest.mark.parametrize("expert", [1, 2])
def test_two_ranks_have_the_digits_of_a_resident_state(
    expert: int, sharding: str, untied: Path, tmp_path: Path, two_processes: Ranks
) -> None:
    options = {"dtype": "bfloat16", "sharding": sharding}
    check_digits(two_processes.run(train_and_go_on, untied, tmp_path, options, expert=expert))
