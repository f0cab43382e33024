"""A training step of four layers of Qwen3-30B-A3B in bfloat16 on one GPU: utilisation, and what replay and masks cost.

`python bench/trainer_gpu.py [--pairs N] [--json FILE]`. Needs an NVIDIA GPU with 80 GiB or more and Transformer Engine,
whose attention takes packed sequences. Utilisation is `step_flops` / step time / peak: operations that the model itself
needs, forward once and backward twice that, by the dense bfloat16 peak of the GPU. The weights are random; pairs,
intervals and baselines are those of `bench/trainer.py`. `bench/gpu_check.py` runs it with few pairs.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from _measure import count, count_results, paired_ratio, ratio_results, seconds
from _ranks import as_only_rank
from _report import Result, report
from _samples import Sizes, long_tailed_lengths, make_samples, with_routes, write_model
from _steps import make_step, make_trainer, natural_routes, num_rows, num_trained, shares, step_flops

from moerl.contract.batch import TrainSample
from moerl.contract.parallel import RankCoordinates
from moerl.contract.shares import routing_bytes
from moerl.errors import ConfigError, MoerlError

SIZES = Sizes(
    hidden=2048,
    layers=4,
    heads=32,
    key_value_heads=4,
    head_dim=128,
    experts=128,
    experts_per_token=8,
    expert_width=768,
    vocab=151936,
)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained. row_budget: rows of a microbatch. mean_length: of trajectories. goals: whether results are held
    against them; few pairs tell too little. pairs: of steps, per ratio. steps: that are timed by themselves."""

    sizes: Sizes
    row_budget: int
    mean_length: int
    pairs: int
    goals: bool = True
    num_microbatches: int = 4
    steps: int = 5


SLICE = Workload(SIZES, row_budget=8192, mean_length=2000, pairs=40)
PEAK_FLOPS = {"H100 80GB HBM3": 989.4e12, "H200": 989.4e12, "A100": 312e12}
"""Dense bfloat16 operations per second, from the data sheets (SXM), by a part of the device's name."""
REPLAY_GOAL = 1.01
MASK_GOAL = 1.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=SLICE.pairs, help="pairs of steps per ratio")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the results here")
    options = parser.parse_args()
    try:
        _refuse_other_machines()
        peak = peak_flops()
    except MoerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(run(replace(SLICE, pairs=options.pairs), "cuda", peak), options.json)
    return 0


def run(workload: Workload, device: str, peak: float | None) -> list[Result]:
    """All measurements; this process is the rank. peak: operations per second of the device; None where that is
    unknown, which leaves the utilisation out."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(workload.sizes, Path(folder), dtype=torch.bfloat16, device=device)
        if device == "cuda":
            # The trainer needs the memory.
            torch.cuda.empty_cache()
        return as_only_rank(_measure, model, workload, peak)


def _refuse_other_machines() -> None:
    """Raises `ConfigError` where there is no GPU, or Transformer Engine is not installed."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "bench/trainer_gpu.py needs a GPU", seen="none", remedy="run bench/trainer.py, which needs none"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "bench/trainer_gpu.py needs Transformer Engine for attention over packed sequences",
            seen="transformer_engine is not installed",
            remedy="install the transformer-engine release that fits the CUDA version",
        )


def peak_flops(peaks: Mapping[str, float] = PEAK_FLOPS) -> float:
    """Peak of this machine's GPU.

    Raises:
        ConfigError: it is not a known one.
    """
    name = torch.cuda.get_device_name()
    for part, peak in peaks.items():
        if part in name:
            return peak
    raise ConfigError(
        "the peak of this GPU is not known, and so neither is the utilisation",
        seen=name,
        expected=f"one of {', '.join(peaks)}",
        remedy="add its dense bfloat16 peak to PEAK_FLOPS in bench/trainer_gpu.py",
    )


def _measure(layout: RankCoordinates, model: Path, workload: Workload, peak: float | None) -> list[Result]:
    sizes, budget = workload.sizes, workload.row_budget
    trainer = make_trainer(layout, model, sizes, "bfloat16")
    num_drawn = int(0.97 * budget * workload.num_microbatches)
    lengths = long_tailed_lengths(num_drawn, mean=workload.mean_length, longest=budget - 2, seed=3)
    drawn = make_samples(sizes, lengths, seed=4)
    samples = with_routes(drawn, natural_routes(trainer, drawn, budget))
    trained = num_trained(samples)
    packed, unrouted = (shares(trainer, samples, budget, replay=replay) for replay in (True, False))
    both = make_step(trainer, packed, trained)
    no_replay = make_step(trainer, unrouted, trained)
    no_mask = make_step(trainer, packed, trained, mask=False)
    both()
    taken = [seconds(both)[0] for _ in range(workload.steps)]
    replay, masks = (paired_ratio(both, baseline, workload.pairs) for baseline in (no_replay, no_mask))
    memory = _peak_memory()
    on = count(both)
    return [
        *_step_results(workload, samples, taken, peak),
        *memory,
        *ratio_results("replay on / off", replay, REPLAY_GOAL if workload.goals else None),
        *count_results("replay on / off", on, count(no_replay)),
        Result("replay: routing rows of a step", routing_bytes(packed), unit="bytes"),
        *ratio_results("masks on / off", masks, MASK_GOAL if workload.goals else None),
        *count_results("masks on / off", on, count(no_mask)),
    ]


def _step_results(
    workload: Workload, samples: Sequence[TrainSample], taken: Sequence[float], peak: float | None
) -> list[Result]:
    step, spread = statistics.median(taken), max(taken) - min(taken)
    used = step_flops(workload.sizes, samples) / step
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    results = [
        Result(f"step on {where}", step, unit="s", spread=spread),
        Result("rate", num_rows(samples) / step, unit="tokens/s"),
        Result("model operations", used / 1e12, unit="TFLOP/s"),
    ]
    if peak is not None:
        results.append(Result(f"utilisation of {peak / 1e12:.4g} TFLOP/s", used / peak, unit="ratio"))
    return results


def _peak_memory() -> list[Result]:
    if not torch.cuda.is_available():
        return []
    return [Result("peak memory", torch.cuda.max_memory_allocated() / 2**30, unit="GiB")]


if __name__ == "__main__":
    sys.exit(main())
