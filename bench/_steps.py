"""Tools of the trainer benchmarks: a trainer, its batches and its steps, and the routes of the model itself.

Runs in trainer ranks. Shape legend: S = tokens of a trajectory, T = packed rows, L = MoE layers, E = experts,
K = experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _measure import Step
from _samples import Sizes
from numpy.typing import NDArray
from torch import Tensor

from moerl.batching.cost import sequence_flops
from moerl.batching.packing import PackOptions, pack_for_ranks
from moerl.batching.rows import Padding, build_microbatch, trajectory_rows
from moerl.config.load import load_config
from moerl.config.schema import OptimizerConfig
from moerl.contract.batch import BatchTotals, Microbatch, TrainSample
from moerl.contract.parallel import RankCoordinates
from moerl.contract.shares import cut_share
from moerl.contract.trajectory import ModelSpec
from moerl.models.description import read_model
from moerl.trainer.losses import PolicyGradientLoss, Scorer
from moerl.trainer.model import ModelOptions
from moerl.trainer.trainer import MegatronTrainer

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


_GRPO = load_config(["recipe=laptop"], command="train").algorithm


def make_trainer(layout: RankCoordinates, model: Path, spec: ModelSpec, dtype: str = "float32") -> MegatronTrainer:
    return MegatronTrainer(
        replace(read_model(model), spec=spec), layout, ModelOptions(dtype=dtype), OPTIMIZER, total_steps=1000
    )


def shares(trainer: MegatronTrainer, samples: Sequence[TrainSample], budget: int, *, replay: bool) -> list[Microbatch]:
    """This rank's shares of the samples, packed for its layout."""
    layout = trainer.layout
    options = PackOptions(budget, Padding.of(layout.dims), layout.dims.microbatch_multiple)
    ranks = pack_for_ranks(samples, layout.dims.data, options, replay=replay)
    return [cut_share(batch, trainer.layout) for batch in ranks[layout.data_rank]]


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


def make_step(
    trainer: MegatronTrainer,
    batches: Sequence[Microbatch],
    num_trained: float,
    *,
    mask: bool = True,
    prove: bool = True,
) -> Step:
    """One optimizer step of GRPO over this rank's shares; replays routing if they have it."""
    loss = policy_loss(trainer, batches, num_trained, mask=mask)
    enforce = batches[0].expert_ids is not None
    return lambda: trainer.step(batches, loss, enforce=enforce, prove=prove)


def policy_loss(
    trainer: MegatronTrainer, batches: Sequence[Microbatch], num_trained: float, *, mask: bool = True
) -> PolicyGradientLoss:
    """GRPO's loss over this rank's shares."""
    # GRPO reads no number of sequences.
    totals = BatchTotals(num_trained, float("nan"))
    return PolicyGradientLoss(Scorer(batches, keep_mask=mask), _GRPO, totals, trainer.layout)


def num_trained(samples: Sequence[TrainSample]) -> float:
    return float(sum(int(sample.trajectory.sampled.sum()) for sample in samples))


def num_rows(samples: Sequence[TrainSample]) -> int:
    """Rows that are not padding: what tokens/s counts."""
    return sum(len(sample.trajectory) - 1 for sample in samples)


def step_flops(sizes: Sizes, samples: Sequence[TrainSample]) -> float:
    """Operations of a step that the model itself needs: three times `sequence_flops` of every sequence.

    Forward once and backward twice that; recompute, padding, router and optimizer are not counted.
    """
    cost = sequence_flops(sizes.described)
    return 3 * sum(cost(len(sample.trajectory) - 1) for sample in samples)


def natural_routes(trainer: MegatronTrainer, samples: Sequence[TrainSample], budget: int) -> list[NDArray[np.integer]]:
    """The experts that the model chooses for every row of every sample, [S - 1, L, K] each; one process."""
    from megatron.core.transformer.moe.router import TopKRouter

    batches = shares(trainer, samples, budget, replay=False)
    routers = [module for chunk in trainer.model.chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
    maps: list[list[Tensor]] = [[] for _ in routers]

    def listen(calls: list[Tensor]) -> Callable[[Any, Any, Any], None]:
        return lambda module, args, output: calls.append(output[1].cpu())

    handles = [router.register_forward_hook(listen(calls)) for router, calls in zip(routers, maps, strict=True)]
    loss = Scorer(batches, keep_mask=False)
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
