"""What the trainer benchmarks share: a trainer and its batches, steps in turns, and counts of what a step does.

Runs in trainer ranks. Shape legend: S = tokens of a trajectory, T = packed rows, L = MoE layers, E = experts,
K = experts per token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _samples import Sizes
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from moerl.algorithms.grpo import GRPO
from moerl.buffer.cost import sequence_flops
from moerl.buffer.packing import PackOptions, pack_for_ranks
from moerl.buffer.rows import Padding, build_microbatch, trajectory_rows
from moerl.config.schema import OptimizerConfig
from moerl.contract.batch import Microbatch, TrainSample
from moerl.contract.shares import cut_share
from moerl.trainer.layout import Layout
from moerl.trainer.losses import PolicyGradientLoss, Scorer
from moerl.trainer.model import ModelOptions
from moerl.trainer.trainer import MegatronTrainer

Step = Callable[[], object]

# A learning rate that moves nothing: the routes that were recorded stay those of the model.
OPTIMIZER = OptimizerConfig(
    lr=1e-12,
    min_lr_ratio=1.0,
    schedule="constant",
    warmup_steps=0,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    weight_decay=0.0,
    clip_grad=1.0,
)


def make_trainer(where: Layout, model: Path, sizes: Sizes, dtype: str = "float32") -> MegatronTrainer:
    return MegatronTrainer(model, sizes.spec, where, ModelOptions(dtype=dtype), OPTIMIZER, total_steps=1000)


def shares(trainer: MegatronTrainer, samples: Sequence[TrainSample], budget: int, *, replay: bool) -> list[Microbatch]:
    """This rank's shares of the samples, packed for its layout."""
    where = trainer.where
    options = PackOptions(budget, Padding.of(where.tensor, where.context), where.microbatch_multiple)
    ranks = pack_for_ranks(samples, where.data, options, replay=replay)
    return [cut_share(batch, trainer.place) for batch in ranks[where.data_rank]]


def padded(samples: Sequence[TrainSample], budget: int) -> list[Microbatch]:
    """The same samples in order of arrival, every sequence padded to the longest of its microbatch: the baseline.

    A microbatch takes the next samples as long as their padded rows fit into the budget, routes and kept sets included.
    """
    groups: list[list[int]] = [[]]
    longest = 0
    for index, sample in enumerate(samples):
        longest = max(longest, len(sample.trajectory) - 1)
        if groups[-1] and longest * (len(groups[-1]) + 1) > budget:
            groups.append([])
            longest = len(sample.trajectory) - 1
        groups[-1].append(index)
    batches = []
    for group in groups:
        rows = [trajectory_rows(samples[index], index, replay=True) for index in group]
        width = max(len(each) for each in rows)
        batches.append(build_microbatch(rows, Padding(sequence=width), samples[0].trajectory.spec))
    return batches


def make_step(trainer: MegatronTrainer, batches: Sequence[Microbatch], num_trained: float, *, mask: bool = True) -> Step:
    """One optimizer step of GRPO over this rank's shares; replays routing where they have it."""
    loss = PolicyGradientLoss(Scorer(batches, trainer.shard, keep_mask=mask), GRPO(), num_trained)
    enforce = batches[0].expert_ids is not None
    return lambda: trainer.step(batches, loss, enforce=enforce)


def num_trained(samples: Sequence[TrainSample]) -> float:
    return float(sum(int(sample.trajectory.sampled.sum()) for sample in samples))


def num_rows(samples: Sequence[TrainSample]) -> int:
    """Rows that are not padding: what tokens/s counts."""
    return sum(len(sample.trajectory) - 1 for sample in samples)


def step_flops(sizes: Sizes, samples: Sequence[TrainSample]) -> float:
    """Operations of a step that the model itself needs: three times `sequence_flops` of every sequence.

    Forward once and backward twice that; recompute, padding, router and optimizer are not counted.
    """
    cost = sequence_flops(sizes.flop_sizes)
    return 3 * sum(cost(len(sample.trajectory) - 1) for sample in samples)


# --- routes ----------------------------------------------------------------------------------------------------------


def natural_routes(
    trainer: MegatronTrainer, samples: Sequence[TrainSample], budget: int
) -> list[NDArray[np.integer]]:
    """The experts that the model chooses for every row of every sample, [S - 1, L, K] each; one process."""
    from megatron.core.transformer.moe.router import TopKRouter

    batches = shares(trainer, samples, budget, replay=False)
    routers = [module for chunk in trainer.model.chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
    maps: list[list[Tensor]] = [[] for _ in routers]

    def listen(calls: list[Tensor]) -> Callable[[Any, Any, Any], None]:
        return lambda module, args, output: calls.append(output[1].cpu())

    handles = [router.register_forward_hook(listen(calls)) for router, calls in zip(routers, maps, strict=True)]
    loss = Scorer(batches, trainer.shard, keep_mask=False)
    trainer.score(batches, loss, enforce=False)
    for handle in handles:
        handle.remove()
    routes: dict[int, NDArray[np.integer]] = {}
    for index, batch in enumerate(batches):
        map_TLE = torch.stack([calls[index] for calls in maps], dim=1)
        ids_TLK = map_TLE.nonzero()[:, 2].view(*map_TLE.shape[:2], -1).numpy()
        for sample in np.unique(batch.sample_index[~batch.is_pad]).tolist():
            routes[sample] = ids_TLK[(batch.sample_index == sample) & ~batch.is_pad]
    return [routes[index] for index in range(len(samples))]


# --- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ratio:
    """One step's time by another's, over pairs of neighbours in time.

    median: of the ratios of all pairs. low, high: bounds of its 95% bootstrap interval. cpu: median ratio of CPU time.
    seconds: median of each of the two, first the numerator's. num_pairs: how many.
    """

    median: float
    low: float
    high: float
    cpu: float
    seconds: tuple[float, float]
    num_pairs: int


def paired_ratio(step: Step, baseline: Step, num_pairs: int) -> Ratio:
    """Times both in the order ABBA: steady drift of the machine cancels, a disturbance spoils one pair, not the median.

    Both run twice before, untimed.
    """
    for function in (step, baseline, step, baseline):
        function()
    wall, cpu = [], []
    for pair in range(num_pairs):
        order = (step, baseline) if pair % 2 == 0 else (baseline, step)
        first, second = (seconds(function) for function in order)
        mine, theirs = (first, second) if pair % 2 == 0 else (second, first)
        wall.append((mine[0], theirs[0]))
        cpu.append(mine[1] / theirs[1])
    wall_N2 = np.array(wall)
    ratios_N = wall_N2[:, 0] / wall_N2[:, 1]
    low, high = bootstrap_interval(ratios_N)
    medians = np.median(wall_N2, axis=0).tolist()
    return Ratio(float(np.median(ratios_N)), low, high, statistics.median(cpu), (medians[0], medians[1]), num_pairs)


def bootstrap_interval(values_N: NDArray[np.floating], num_resamples: int = 10_000) -> tuple[float, float]:
    """The 95% percentile interval of the median under resampling with replacement (Efron 1979); a fixed seed."""
    draws = np.random.default_rng(0).choice(values_N, (num_resamples, len(values_N)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return float(low), float(high)


def seconds(function: Step) -> tuple[float, float]:
    """Wall time, and CPU time of this process."""
    _finish()
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    _finish()
    return time.perf_counter() - wall, time.process_time() - cpu


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- counts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counts:
    """What one step does: torch operations called, bytes of their outputs, and floating-point operations of products.

    Views count as operations without bytes of their own.
    """

    calls: int
    output_bytes: int
    flops: int


class _Counter(TorchDispatchMode):
    """Counts every operation below autograd, the backward pass and the optimizer included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.output_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        if not func.is_view:
            outputs = out if isinstance(out, tuple | list) else (out,)
            self.output_bytes += sum(each.nbytes for each in outputs if isinstance(each, Tensor))
        return out


def count(step: Step) -> Counts:
    """Counts of one call."""
    with FlopCounterMode(display=False) as products:
        step()
    with _Counter() as counter:
        step()
    return Counts(counter.calls, counter.output_bytes, products.get_total_flops())
