"""A training step of four layers of Qwen3-30B-A3B in bfloat16 on one GPU: utilisation, what replay and masks cost, and
how much a plain step takes.

`python bench/trainer_gpu.py [--experts 128|16] [--pairs N] [--json FILE]`. Needs an NVIDIA GPU with 80 GiB or more and
Transformer Engine, whose attention takes packed sequences. With 16 experts, of which a token takes 8 as well, the one
rank has the load of a rank of eight that share 128 experts (EP = 8). Utilisation is `step_flops` / step time / peak:
operations that the model itself needs, forward once and backward twice that, by the dense bfloat16 peak of the GPU. The
weights are random; pairs, intervals and baselines are those of `bench/trainer.py`, the plain step is that of
`bench/_plain.py`. `bench/gpu_check.py` runs it with few pairs.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from _gpu_profile import count_calls
from _measure import Step, paired_ratio, ratio_results, seconds
from _plain import PlainTrainer
from _ranks import as_only_rank
from _report import Result, report
from _samples import Sizes, long_tailed_lengths, make_samples, with_routes, write_model
from _steps import OPTIMIZER, make_step, make_trainer, natural_routes, num_rows, num_trained, shares, step_flops

from moerl.contract.batch import Microbatch, TrainSample
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


SIZES_16 = replace(SIZES, experts=16)
"""The load of one rank of EP = 8."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the batches of its steps."""

    sizes: Sizes
    row_budget: int
    """Rows of a microbatch."""
    mean_length: int
    """Rows of a trajectory, on average."""
    pairs: int
    """Pairs of steps for the ratio of replay; half as many for those of masks and of the plain step."""
    utilisation_goal: float
    """Least share of the peak."""
    goals: bool = True
    """True if results have goals; False for few pairs, whose ratios are too uncertain."""
    num_microbatches: int = 4
    steps: int = 5
    """Steps that are timed by themselves."""
    plain_gib: float = 0.0
    """Least memory of the GPU for a plain trainer in addition to ours."""


SLICES = {
    128: Workload(SIZES, row_budget=8192, mean_length=2000, pairs=40, utilisation_goal=0.22, plain_gib=130),
    16: Workload(SIZES_16, row_budget=8192, mean_length=2000, pairs=40, utilisation_goal=0.30, plain_gib=60),
}
"""By the number of experts."""
PEAK_FLOPS = {"H100 80GB HBM3": 989.4e12, "H200": 989.4e12, "A100": 312e12}
"""Dense bfloat16 operations per second, from the data sheets (SXM), by a part of the device's name."""
REPLAY_GOAL = 1.005
MASK_GOAL = 0.75
PLAIN_GOAL = 1.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of a workload."""

    results: list[Result]
    left_out: list[str]
    """The parts that could not run, each with its reason."""
    table: str
    """The profile of a step with replay, proof and masks."""


Keep = Callable[[Measured], None]
"""Gets what is measured so far, after each part."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, choices=sorted(SLICES), default=128, help="experts of each layer")
    parser.add_argument("--pairs", type=int, default=SLICES[128].pairs, help="pairs of steps per ratio")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the results here")
    options = parser.parse_args()
    try:
        _refuse_other_machines()
        peak = peak_flops()
    except MoerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    measured = run(replace(SLICES[options.experts], pairs=options.pairs), "cuda", peak, lambda measured: None)
    report(measured.results, options.json)
    print(*(f"not run: {part}" for part in measured.left_out), measured.table, sep="\n")
    return 0


def run(workload: Workload, device: str, peak: float | None, keep: Keep) -> Measured:
    """Takes all measurements; this process is the rank.

    Args:
        peak: operations per second of the device; None if that is unknown, which leaves the utilisation out.
        keep: called after each part; the last call gets what is returned.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(workload.sizes, Path(folder), dtype=torch.bfloat16, device=device)
        if device == "cuda":
            # The trainer needs the memory.
            torch.cuda.empty_cache()
        return as_only_rank(_measure, model, workload, peak, device, keep)


def _refuse_other_machines() -> None:
    """Raises `ConfigError` if there is no GPU, or Transformer Engine is not installed."""
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


def _measure(
    layout: RankCoordinates, model: Path, workload: Workload, peak: float | None, device: str, keep: Keep
) -> Measured:
    sizes, budget = workload.sizes, workload.row_budget
    trainer = make_trainer(layout, model, sizes.spec, "bfloat16")
    num_drawn = int(0.97 * budget * workload.num_microbatches)
    lengths = long_tailed_lengths(num_drawn, mean=workload.mean_length, longest=budget - 2, seed=3)
    drawn = make_samples(sizes.spec, lengths, seed=4)
    samples = with_routes(drawn, natural_routes(trainer, drawn, budget))
    trained = num_trained(samples)
    packed, unrouted = (shares(trainer, samples, budget, replay=replay) for replay in (True, False))
    both = make_step(trainer, packed, trained)
    no_replay = make_step(trainer, unrouted, trained)
    no_mask = make_step(trainer, packed, trained, mask=False)
    found = Measured([], [], "")

    def add(results: Sequence[Result], left_out: Sequence[str] = (), table: str = "") -> None:
        nonlocal found
        found = Measured([*found.results, *results], [*found.left_out, *left_out], table or found.table)
        keep(found)

    both()
    taken = [seconds(both)[0] for _ in range(workload.steps)]
    add([*_step_results(workload, samples, taken, peak), *_peak_memory()])
    routing = Result("replay: routing rows of a step", routing_bytes(packed), unit="bytes")
    goals = (REPLAY_GOAL, MASK_GOAL, PLAIN_GOAL) if workload.goals else (None,) * 3
    few = max(1, workload.pairs // 2)
    add([routing, *ratio_results("replay on / off", paired_ratio(both, no_replay, workload.pairs), goals[0])])
    # Before the masks, so that it is not what a time limit cuts off.
    add(*_against_plain(model, workload, both, packed, few, goals[2]))
    add(ratio_results("masks on / off", paired_ratio(both, no_mask, few), goals[1]))
    calls = count_calls(both, device)
    add([*calls.results("a step"), *count_calls(no_replay, device).results("a step without replay")], (), calls.table)
    return found


def _against_plain(
    model: Path, workload: Workload, ours: Step, packed: Sequence[Microbatch], num_pairs: int, goal: float | None
) -> tuple[list[Result], list[str]]:
    """Our step with replay, proof and masks by a plain one over the same rows, both trainers in memory; or why not."""
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        if memory < workload.plain_gib:
            needed = f"needs {workload.plain_gib:g} GiB of GPU memory beside ours, and this one has {memory:.0f}"
            return [], [f"plain step: {needed}"]
    plain = PlainTrainer(model, OPTIMIZER).make_step(packed)
    worst = max(plain())
    loss = Result("plain: largest loss of a microbatch", worst, "finite", math.isfinite(worst), "nats")
    ratio = paired_ratio(ours, plain, num_pairs)
    return [loss, *ratio_results("ours / plain", ratio, goal)], []


def _step_results(
    workload: Workload, samples: Sequence[TrainSample], taken: Sequence[float], peak: float | None
) -> list[Result]:
    step, spread = statistics.median(taken), max(taken) - min(taken)
    used = step_flops(workload.sizes, samples) / step
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    results = [
        Result(f"step on {device}", step, unit="s", spread=spread),
        Result("rate", num_rows(samples) / step, unit="tokens/s"),
        Result("model operations", used / 1e12, unit="TFLOP/s"),
    ]
    if peak is not None:
        share, goal = used / peak, workload.utilisation_goal
        name = f"utilisation of {peak / 1e12:.4g} TFLOP/s"
        claim = f">= {goal:g}" if workload.goals else ""
        results.append(Result(name, share, claim, not workload.goals or share >= goal, "ratio"))
    return results


def _peak_memory() -> list[Result]:
    if not torch.cuda.is_available():
        return []
    return [Result("peak memory", torch.cuda.max_memory_allocated() / 2**30, unit="GiB")]


if __name__ == "__main__":
    sys.exit(main())
