"""A training step of four layers of Qwen3-30B-A3B: utilisation, and what replay and masks cost. A check of
`gpu_check.py`.

`bench/trainer_gpu.py` with few pairs, and therefore without its goals: an interval of few pairs tells too little.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import trainer_gpu
from _gpu_checks import CannotRunError, Findings
from _gpu_models import SIZES
from trainer_gpu import Workload

from moerl.errors import ConfigError

PAIRS = 5
MIN_GIB = 75.0
"""Of GPU memory: 3 billion parameters with gradients, master weights and moments take 54."""
TINY = Workload(SIZES["cpu"], row_budget=48, mean_length=20, pairs=1, goals=False, num_microbatches=1, steps=1)


def check(device: str) -> Findings:
    if device == "cpu":
        return Findings(trainer_gpu.run(TINY, device, None), ["utilisation and peak memory: of GPUs alone"])
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    if memory < MIN_GIB:
        raise CannotRunError(f"needs {MIN_GIB:g} GiB of GPU memory, and this one has {memory:.0f}")
    peak, left_out = None, []
    try:
        peak = trainer_gpu.peak_flops()
    except ConfigError as unknown:
        left_out.append(f"utilisation: {unknown}")
    return Findings(trainer_gpu.run(replace(trainer_gpu.SLICE, pairs=PAIRS, goals=False), device, peak), left_out)
