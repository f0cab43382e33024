"""Optimizer state in host memory against a resident one, and weights that rest in host memory. A check of
`gpu_check.py`, and what `offload.py` measures.

Two trainers of the same model in bfloat16 take the same steps; one has all state in host memory. Their weights must be
equal bit for bit. Updates alone are then timed in pairs, over gradients that stay: the difference is the copies.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _gpu_checks import Findings
from _gpu_models import SIZES, write_checkpoint
from _measure import paired_ratio
from _ranks import as_only_rank
from _report import Result
from _samples import long_tailed_lengths, make_samples
from _steps import OPTIMIZER, make_step, num_trained, shares

from moerl.contract.parallel import RankCoordinates
from moerl.models.description import read_model
from moerl.trainer.model import ModelOptions
from moerl.trainer.optimizer import StateOptions
from moerl.trainer.trainer import MegatronTrainer

ROWS = {"cuda": 4096, "cpu": 128}
ROW_BUDGET = {"cuda": 1024, "cpu": 96}
PAIRS = {"cuda": 10, "cpu": 6}
STEPS = 3
LEARNING_RATE = 1e-3


def check(device: str) -> Findings:
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), device)
        return as_only_rank(_measure, Path(folder), device)


def _measure(layout: RankCoordinates, model: Path, device: str) -> Findings:
    spec, budget = SIZES[device].spec, ROW_BUDGET[device]
    description, options = replace(read_model(model), spec=spec), OPTIMIZER.model_copy(update={"lr": LEARNING_RATE})
    trainers = [
        MegatronTrainer(description, layout, ModelOptions(dtype="bfloat16"), options, 1000, StateOptions("on", share))
        for share in (0.0, 1.0)
    ]
    samples = make_samples(spec, long_tailed_lengths(ROWS[device], budget // 4, budget - 2, seed=3), seed=4)
    peaks = []
    for trainer in trainers:
        step = make_step(trainer, shares(trainer, samples, budget, replay=False), num_trained(samples))
        for _ in range(STEPS):
            step()
        peaks.append(_peak_bytes(_update_of(trainer), device))
    resident, offloaded = trainers
    ratios = paired_ratio(_update_of(offloaded), _update_of(resident), PAIRS[device])
    differing = sum(
        int((mine != theirs).sum())
        for mine, theirs in zip(offloaded.shards().values(), resident.shards().values(), strict=True)
    )
    assert offloaded.optimizer is not None
    weights = sum(shard.nbytes for shard in resident.shards().values())
    results = [
        Result("weights that differ from those of a resident state", differing, "== 0", differing == 0, "numbers"),
        Result("weights", weights / 2**20, unit="MiB"),
        Result("optimizer state in host memory", offloaded.optimizer.host_bytes / 2**20, unit="MiB"),
        Result("update, resident", ratios.wall.seconds[1], unit="s"),
        Result("update, state in host memory", ratios.wall.seconds[0], unit="s"),
        Result("state in host memory / resident, time of an update", ratios.wall.median, unit="ratio"),
        Result("the same, CPU time", ratios.cpu.median, unit="ratio"),
        *_times_of_rest(resident),
    ]
    if device == "cuda":
        names = ("resident", "state in host memory")
        results += [
            Result(f"peak of an update, {name}", peak / 2**20, unit="MiB")
            for name, peak in zip(names, peaks, strict=True)
        ]
    return Findings(results)


def _update_of(trainer: MegatronTrainer) -> Callable[[], Any]:
    assert trainer.optimizer is not None
    return trainer.optimizer.update


def _peak_bytes(update: Callable[[], Any], device: str) -> int:
    """Memory of the device that an update takes beyond what was there before it; 0 on a CPU."""
    if device != "cuda":
        update()
        return 0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    update()
    return torch.cuda.max_memory_allocated() - before


def _times_of_rest(trainer: MegatronTrainer) -> list[Result]:
    """Seconds in which weights and gradients leave the device, and weights are back; the second of two times, when
    host memory is there."""
    seconds = (0.0, 0.0)
    for _ in range(2):
        begin = time.perf_counter()
        trainer.rest()
        middle = time.perf_counter()
        trainer.shards()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = middle - begin, time.perf_counter() - middle
    return [Result("weights to host memory", seconds[0], unit="s"), Result("weights back", seconds[1], unit="s")]
