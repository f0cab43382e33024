"""A training step of four layers of Qwen3-30B-A3B in bfloat16 on one GPU: utilisation, and what replay and masks cost.

`python bench/trainer_gpu.py [--pairs N] [--json FILE]`. Needs an NVIDIA GPU with 80 GiB or more and Transformer Engine,
whose attention takes packed sequences. Utilisation is `step_flops` / step time / peak: operations that the model itself
needs, forward once and backward twice that, by the dense bfloat16 peak of the GPU. The weights are random; pairs,
intervals and baselines are those of `bench/trainer.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from _measure import count, count_results, paired_ratio, ratio_results, seconds
from _ranks import on_ranks
from _report import Result, report
from _samples import Sizes, long_tailed_lengths, make_samples, with_routes, write_model
from _steps import make_step, make_trainer, natural_routes, num_rows, num_trained, shares, step_flops

from moerl.contract.parallel import ParallelDims, RankCoordinates
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
ROW_BUDGET = 8192
NUM_MICROBATCHES = 4
PEAK_FLOPS = {"H100 80GB HBM3": 989.4e12, "H200": 989.4e12, "A100": 312e12}
"""Dense bfloat16 operations per second, from the data sheets (SXM), by a part of the device's name."""
REPLAY_GOAL = 1.01
MASK_GOAL = 1.05
STEPS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps per ratio")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the results here")
    options = parser.parse_args()
    try:
        peak = _peak_flops()
    except MoerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(SIZES, Path(folder), dtype=torch.bfloat16, device="cuda")
        # The ranks need the memory.
        torch.cuda.empty_cache()
        results = on_ranks(ParallelDims(), _measure, model, options.pairs, peak)[0]
    report(results, options.json)
    return 0


def _peak_flops() -> float:
    """Peak of this machine's GPU.

    Raises:
        ConfigError: there is no GPU, it is not a known one, or Transformer Engine is not installed.
    """
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
    name = torch.cuda.get_device_name()
    for part, peak in PEAK_FLOPS.items():
        if part in name:
            return peak
    raise ConfigError(
        "the peak of this GPU is not known, and so neither is the utilisation",
        seen=name,
        expected=f"one of {', '.join(PEAK_FLOPS)}",
        remedy="add its dense bfloat16 peak to PEAK_FLOPS in bench/trainer_gpu.py",
    )


def _measure(layout: RankCoordinates, model: Path, pairs: int, peak: float) -> list[Result]:
    trainer = make_trainer(layout, model, SIZES, "bfloat16")
    lengths = long_tailed_lengths(int(0.97 * ROW_BUDGET * NUM_MICROBATCHES), mean=2000, longest=ROW_BUDGET - 2, seed=3)
    drawn = make_samples(SIZES, lengths, seed=4)
    samples = with_routes(drawn, natural_routes(trainer, drawn, ROW_BUDGET))
    trained = num_trained(samples)
    packed, unrouted = (shares(trainer, samples, ROW_BUDGET, replay=replay) for replay in (True, False))
    both = make_step(trainer, packed, trained)
    no_replay = make_step(trainer, unrouted, trained)
    no_mask = make_step(trainer, packed, trained, mask=False)
    both()
    taken = [seconds(both)[0] for _ in range(STEPS)]
    step, spread = statistics.median(taken), max(taken) - min(taken)
    used = step_flops(SIZES, samples) / step
    replay, masks = paired_ratio(both, no_replay, pairs), paired_ratio(both, no_mask, pairs)
    peak_gibibytes = torch.cuda.max_memory_allocated() / 2**30
    on = count(both)
    return [
        Result(f"step on {torch.cuda.get_device_name()}", step, unit="s", spread=spread),
        Result("rate", num_rows(samples) / step, unit="tokens/s"),
        Result("model operations", used / 1e12, unit="TFLOP/s"),
        Result(f"utilisation of {peak / 1e12:.4g} TFLOP/s", used / peak, unit="ratio"),
        Result("peak memory", peak_gibibytes, unit="GiB"),
        *ratio_results("replay on / off", replay, REPLAY_GOAL),
        *count_results("replay on / off", on, count(no_replay)),
        Result("replay: routing rows of a step", routing_bytes(packed), unit="bytes"),
        *ratio_results("masks on / off", masks, MASK_GOAL),
        *count_results("masks on / off", on, count(no_mask)),
    ]


if __name__ == "__main__":
    sys.exit(main())
