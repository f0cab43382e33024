"""Steps of the matrix of layouts, which run in its ranks, and limits of a layout's distance from one process.

Every sample has rows without captured routing (the trainer's own router decides there), and every third one was drawn
from the full vocabulary. Updates are plain SGD: a rounding error of a gradient stays one in the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tiny_moe
import torch

from moerl.config.schema import OptimizerConfig

LENGTHS = (5, 30, 17, 41, 9, 24, 33, 12)
STEPS = (101, 102, 103, 104, 105)
UNCAPTURED = 0.25
SGD = OptimizerConfig(
    lr=0.05,
    min_lr_ratio=1.0,
    schedule="constant",
    warmup_steps=0,
    beta1=0.0,
    beta2=0.95,
    eps=1e-8,
    weight_decay=0.01,
    clip_grad=1.0,
)


@dataclass(frozen=True)
class Case:
    """A layout of so many processes, and what else differs from the plain trainer.

    sizes: those of `ParallelConfig`; data follows. recompute, sharding: as in `ModelOptions` and `MegatronTrainer`.
    """

    processes: int
    sizes: dict[str, int] = field(default_factory=dict)
    recompute: str = "none"
    sharding: str = "off"

    @property
    def phases(self) -> int:
        return 1 if self.recompute == "none" else 2

    @property
    def name(self) -> str:
        short = {
            "tensor": "TP",
            "pipeline": "PP",
            "virtual_pipeline": "VPP",
            "context": "CP",
            "expert": "EP",
            "expert_tensor": "ETP",
        }
        one_replica = self.sizes.get("tensor", 1) * self.sizes.get("pipeline", 1) * self.sizes.get("context", 1)
        parts = [f"{short[name]}{size}" for name, size in self.sizes.items()]
        parts += [f"DP{self.processes // one_replica}"] if self.processes > one_replica else []
        parts += [self.recompute] if self.recompute != "none" else []
        parts += [f"sharded-{self.sharding}"] if self.sharding != "off" else []
        return "-".join(parts)


@contextlib.contextmanager
def sgd() -> Iterator[None]:
    """Within it trainers are built with Megatron's SGD, which moerl does not offer; its distributed optimizer asks for
    Adam alone because of how it writes checkpoints."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    real = optimizer.OptimizerConfig

    def config(**values: Any) -> Any:
        return real(**(values | {"optimizer": "sgd", "sgd_momentum": 0.0}))

    with (
        mock.patch.object(optimizer, "OptimizerConfig", config),
        mock.patch.object(distrib_optimizer, "Adam", torch.optim.Optimizer),
    ):
        yield


def build(layout: Any, path: Path, case: Case, *, adam: bool = False, **options: Any) -> Any:
    """A trainer for the case; with SGD unless `adam`."""
    options = {"recompute": case.recompute, "sharding": case.sharding, **options}
    if adam:
        return tiny_moe.build(layout, path, **options)
    with sgd():
        return tiny_moe.build(layout, path, optimizer=SGD, **options)


def make_samples(seed: int, lengths: Sequence[int] = LENGTHS) -> list[Any]:
    return tiny_moe.make_samples(seed, lengths, uncaptured=UNCAPTURED)


def step(trainer: Any, samples: Sequence[Any], **options: Any) -> dict[str, Any]:
    """One step on this rank's shares; `options` as in `tiny_moe.policy_loss`."""
    batches, denominator = tiny_moe.shares(trainer, samples, uncaptured="live")
    loss = tiny_moe.policy_loss(trainer, batches, denominator, **options)
    return facts(trainer, batches, trainer.step(batches, loss, enforce=True), denominator)


def facts(trainer: Any, batches: Sequence[Any], report: Any, denominator: float) -> dict[str, Any]:
    """Returns a rank's facts about a step; `total` combines the facts of all ranks."""
    rows = report.rows if tiny_moe.speaks(trainer) else []
    differing = tiny_moe.row_table(trainer, batches, [row.layers_differing_T for row in report.rows])
    return {
        "logprobs": tiny_moe.row_table(trainer, batches, [row.logprobs_T for row in report.rows]),
        "loss": sum(float(row.losses_T.double().sum()) for row in rows) / denominator,
        "clipped": sum(int(row.clipped_T.sum()) for row in rows if row.clipped_T is not None),
        "differing": int(differing[:, 2].sum()),
        "grad_norm": report.update.grad_norm,
        "verified": report.rows_verified,
        "load": report.expert_load_LE.numpy(),
    }


@dataclass(frozen=True)
class Total:
    """One step of all ranks. logprobs: by sample, in the order of its tokens. Counts are sums over ranks."""

    logprobs: dict[int, np.ndarray]
    loss: float
    clipped: int
    differing: int
    grad_norms: list[float]
    verified: int
    load: np.ndarray


def total(ranks: Sequence[dict[str, Any]]) -> Total:
    return Total(
        logprobs=tiny_moe.gathered([rank["logprobs"] for rank in ranks]),
        loss=sum(rank["loss"] for rank in ranks),
        clipped=sum(rank["clipped"] for rank in ranks),
        differing=sum(rank["differing"] for rank in ranks),
        grad_norms=[rank["grad_norm"] for rank in ranks],
        verified=sum(rank["verified"] for rank in ranks),
        load=np.sum([rank["load"] for rank in ranks], axis=0),
    )


@dataclass(frozen=True)
class Errors:
    """Distance from one process, the largest over the steps. logprob: nats, per token. loss: in units of the mean
    absolute advantage. grad_norm: relative."""

    logprob: float
    loss: float
    grad_norm: float

    def __str__(self) -> str:
        return f"{self.logprob:.1e} | {self.loss:.1e} | {self.grad_norm:.1e}"


def errors(found: Sequence[Total], expected: Sequence[Total], advantages: Sequence[float]) -> Errors:
    """Errors of steps; `advantages` is the mean absolute advantage of each."""
    pairs = list(zip(found, expected, strict=True))
    norms = [abs(norm / b.grad_norms[0] - 1) for a, b in pairs for norm in a.grad_norms]
    return Errors(
        logprob=max(tiny_moe.largest_difference(a.logprobs, b.logprobs) for a, b in pairs),
        loss=max(abs(a.loss - b.loss) / scale for (a, b), scale in zip(pairs, advantages, strict=True)),
        grad_norm=max(norms),
    )


def mean_advantage(samples: Sequence[Any]) -> float:
    """Mean absolute advantage of the trained tokens."""
    values = [np.abs(sample.advantages[sample.trajectory.sampled]) for sample in samples]
    return float(np.concatenate(values).mean())


def by_step(ranks: Sequence[list[dict[str, Any]]]) -> list[Total]:
    """The steps of all ranks, from what each rank returned."""
    return [total(step) for step in zip(*ranks, strict=True)]


def assert_close(found: Sequence[Total], expected: Sequence[Total], advantages: Sequence[float]) -> Errors:
    """The limits that every layout keeps."""
    seen = errors(found, expected, advantages)
    assert seen.logprob <= 1e-5
    assert seen.loss <= 1e-6
    assert seen.grad_norm <= 1e-4
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.load, b.load)
        assert a.differing == b.differing > 0
    return seen
