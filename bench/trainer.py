"""A training step in every layout: time, tokens per second, memory, and what packing, replay and masks cost.

`python bench/trainer.py [--pairs N] [--json FILE]`. A Qwen3-MoE of 8 layers and 32 experts and trajectories of
long-tailed lengths, float32, one thread per process, gloo. The recorded routes are those of the model, so replay moves
no work between experts. All layouts share the cores of one machine: with more processes than cores, tokens per second
show what a layout costs, not how it scales.

Pairs alternate in one process in the order ABBA; a ratio is the median over pairs, its spread the width of the 95%
bootstrap interval, and a goal is compared with its upper end, in CPU time: one thread that never waits, so other
load of the machine counts less. Wall time is listed, too. Baselines: the same step with sequences padded to the
longest of their microbatch (same row budget), with routers that choose for themselves and batches without routing
rows, with Keep Routing unproved, and with scores over the full vocabulary.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from _measure import count, count_results, paired_ratio, ratio_results, seconds
from _ranks import on_ranks
from _report import Result, report
from _samples import Sizes, long_tailed_lengths, make_samples, with_routes, write_model
from _steps import make_step, make_trainer, natural_routes, num_rows, num_trained, padded, shares

from moerl.contract.batch import TrainSample
from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.contract.shares import own_routing_bytes, routing_bytes

SIZES = Sizes(
    hidden=256,
    layers=8,
    heads=4,
    key_value_heads=2,
    head_dim=64,
    experts=32,
    experts_per_token=4,
    expert_width=128,
    vocab=8192,
)
ROW_BUDGET = 512
NUM_MICROBATCHES = 4
LAYOUTS: dict[str, dict[str, int]] = {
    "one process": {},
    "DP2": {"data": 2},
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "EP2": {"expert": 2, "data": 2},
    "CP2": {"context": 2},
    "TP2xEP2": {"tensor": 2, "expert": 2, "data": 2},
}
GOAL = 1.05
LAYOUT_STEPS = 3


@dataclass(frozen=True, slots=True)
class Workload:
    """Model and samples for every rank."""

    model: Path
    samples: list[TrainSample]


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's steps: wall times, peak resident memory and how much it grew from before the model was built, and
    routing rows that reached the rank by those it cannot do without."""

    seconds: list[float]
    peak_bytes: int
    grown_bytes: int
    routing_bytes: int
    routing_over_own: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24, help="pairs of steps per ratio")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the results here")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        workload = _workload(Path(folder))
        results = [
            Result(f"{' '.join(sys.argv)}: {_machine()}", os.cpu_count() or 1, unit="cores"),
            *_layouts(workload),
            *on_ranks(ParallelDims(), _pairs, workload, options.pairs)[0],
        ]
    spread = os.getloadavg()[0] - load
    results.append(Result("load of the machine before (spread: change)", load, unit="processes", spread=spread))
    report(results, options.json)


def _workload(folder: Path) -> Workload:
    lengths = long_tailed_lengths(int(0.97 * ROW_BUDGET * NUM_MICROBATCHES), mean=100, longest=ROW_BUDGET - 2, seed=3)
    samples = make_samples(SIZES.spec, lengths, seed=4)
    model = write_model(SIZES, folder, dtype=torch.float32, device="cpu")
    routes = on_ranks(ParallelDims(), _routes, Workload(model, samples))[0]
    return Workload(model, with_routes(samples, routes))


def _routes(layout: RankCoordinates, workload: Workload) -> list[object]:
    return list(natural_routes(make_trainer(layout, workload.model, SIZES.spec), workload.samples, ROW_BUDGET))


# --- layouts ---------------------------------------------------------------------------------------------------------


def _layouts(workload: Workload) -> list[Result]:
    results = []
    base = 0.0
    for name, parallel in LAYOUTS.items():
        ranks = on_ranks(ParallelDims(**parallel), _layout_steps, workload, False)
        step = statistics.median(ranks[0].seconds)
        base = base or step
        results += _layout_results(f"{name}, {len(ranks)} processes", ranks, num_rows(workload.samples))
        results.append(Result(f"{name}: step / one process", step / base, unit="ratio"))
    dense = on_ranks(ParallelDims(), _layout_steps, workload, True)
    # The share of a rank is defined for packed rows.
    return [*results, *_layout_results("one process, padded", dense, num_rows(workload.samples))[:-1]]


def _layout_results(name: str, ranks: Sequence[RankStep], rows: int) -> list[Result]:
    taken = ranks[0].seconds
    step, spread = statistics.median(taken), max(taken) - min(taken)
    peaks = [rank.peak_bytes / 2**20 for rank in ranks]
    own = max(rank.routing_over_own for rank in ranks)
    grown = max(rank.grown_bytes for rank in ranks) / 2**20
    return [
        Result(f"{name}: step", step, unit="s", spread=spread),
        Result(f"{name}: rate", rows / step, unit="tokens/s", spread=rows / min(taken) - rows / max(taken)),
        Result(f"{name}: peak memory of a rank", max(peaks), unit="MiB", spread=max(peaks) - min(peaks)),
        Result(f"{name}: of that since before the model", grown, unit="MiB"),
        Result(f"{name}: routing of a rank / its own", own, "<= 1.1", own <= 1.1, "ratio"),
    ]


def _layout_steps(layout: RankCoordinates, workload: Workload, dense: bool) -> RankStep:
    before = _peak_bytes()
    trainer = make_trainer(layout, workload.model, SIZES.spec)
    batches = (
        padded(workload.samples, ROW_BUDGET) if dense else shares(trainer, workload.samples, ROW_BUDGET, replay=True)
    )
    step = make_step(trainer, batches, num_trained(workload.samples))
    step()
    taken = []
    for _ in range(LAYOUT_STEPS):
        dist.barrier()
        taken.append(seconds(step)[0])
    peak, received = _peak_bytes(), routing_bytes(batches)
    return RankStep(taken, peak, peak - before, received, received / own_routing_bytes(batches, trainer.layout))


# --- pairs -----------------------------------------------------------------------------------------------------------


def _pairs(layout: RankCoordinates, workload: Workload, pairs: int) -> list[Result]:
    trainer = make_trainer(layout, workload.model, SIZES.spec)
    samples, trained = workload.samples, num_trained(workload.samples)
    packed = shares(trainer, samples, ROW_BUDGET, replay=True)
    unrouted = shares(trainer, samples, ROW_BUDGET, replay=False)
    dense = padded(samples, ROW_BUDGET)
    both = make_step(trainer, packed, trained)
    no_replay = make_step(trainer, unrouted, trained)
    no_proof = make_step(trainer, packed, trained, prove=False)
    no_mask = make_step(trainer, packed, trained, mask=False)
    packing = paired_ratio(make_step(trainer, dense, trained), both, max(4, pairs // 4))
    on, off = count(both), count(no_replay)
    return [
        *ratio_results(f"padded ({sum(batch.num_rows for batch in dense)} rows) / packed", packing, None),
        *ratio_results("replay on / off", paired_ratio(both, no_replay, pairs), GOAL),
        *count_results("replay on / off", on, off),
        Result("replay: routing rows of a step", routing_bytes(packed), unit="bytes"),
        *ratio_results("proof every step / off", paired_ratio(both, no_proof, pairs), GOAL),
        *count_results("proof every step / off", on, count(no_proof)),
        *ratio_results("masks on / off", paired_ratio(both, no_mask, pairs), GOAL),
        *count_results("masks on / off", on, count(no_mask)),
    ]


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _machine() -> str:
    """Processor and system."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {platform.platform()}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
