"""A training step of four layers of Qwen3-30B-A3B, with 128 experts and with the 16 of a rank of EP = 8. Two checks of
`gpu_check.py`: utilisation, memory, calls, the profile, what replay and masks cost, a plain step in the same process.

`bench/trainer_gpu.py` with few pairs; goals are compared with the medians (`_gpu_goals.py`), not against intervals.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import trainer_gpu
from _gpu_checks import CannotRunError, Findings, keep
from _gpu_models import SIZES
from trainer_gpu import SLICES, Measured, Workload

from moerl.errors import ConfigError

PAIRS = {128: 6, 16: 6}
MIN_GIB = {128: 75.0, 16: 30.0}
"""GiB of GPU memory that a slice needs, by its number of experts. Its parameters with gradients, master weights and
moments take 54 with 128 experts (3 billion parameters), 18 with 16 experts."""
TINY = Workload(
    SIZES["cpu"], row_budget=48, mean_length=20, pairs=1, utilisation_goal=0.0, goals=False, num_microbatches=1, steps=1
)


def check_128(device: str) -> Findings:
    return _check(device, 128)


def check_16(device: str) -> Findings:
    return _check(device, 16)


def _check(device: str, num_experts: int) -> Findings:
    if device == "cpu":
        return _run(TINY, device, None, ["utilisation and peak memory: of GPUs alone"])
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    if memory < MIN_GIB[num_experts]:
        raise CannotRunError(f"needs {MIN_GIB[num_experts]:g} GiB of GPU memory, and this one has {memory:.0f}")
    peak, left_out = None, []
    try:
        peak = trainer_gpu.peak_flops()
    except ConfigError as unknown:
        left_out.append(f"utilisation: {unknown}")
    return _run(replace(SLICES[num_experts], pairs=PAIRS[num_experts], goals=False), device, peak, left_out)


def _run(workload: Workload, device: str, peak: float | None, left_out: list[str]) -> Findings:
    def findings(measured: Measured) -> Findings:
        return Findings(measured.results, left_out + measured.left_out, {"profile": measured.table})

    return findings(trainer_gpu.run(workload, device, peak, lambda measured: keep(findings(measured))))
