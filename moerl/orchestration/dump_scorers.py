"""Scorers of the checkpoints that `moerl diagnose` is given: where weights are, and in which arithmetic each computes.

Runs in its process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from moerl.config.memory import total_parameters
from moerl.config.scoring_memory import plan_scoring
from moerl.diagnostics.checkpoints import HuggingFaceCheckpoint
from moerl.diagnostics.scoring import RolloutScorer
from moerl.errors import closing
from moerl.models.description import ModelDescription
from moerl.orchestration.rescoring import HeldModels, TransformersScorer
from moerl.orchestration.trainer_scorer import TrainerScorer
from moerl.telemetry.progress import ProgressDisplay
from moerl.trainer import platform
from moerl.trainer.model import DTYPES

_FINER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """How rollouts are scored. dtype: of weights and arithmetic, as the trainer names it."""

    backend: Literal["hf", "trainer"]
    dtype: str


@dataclass(slots=True)
class _Shown:
    """Shows how far scores are, and that causes are looked for between them."""

    progress: ProgressDisplay
    number: int = 0

    def __call__(self, done: int, total: int, tokens: int) -> None:
        if done == 0:
            self.number += 1
            self.progress.begin_part(f"scores {self.number}, rollouts")
        self.progress.within(done, total, tokens)
        if done == total:
            self.progress.begin_part("causes")


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """Scorers of the named checkpoints, newest first."""

    held: HeldModels
    checkpoints: Sequence[HuggingFaceCheckpoint]
    described: Sequence[ModelDescription]
    options: ScoringOptions

    @classmethod
    def planned(
        cls,
        checkpoints: Sequence[HuggingFaceCheckpoint],
        described: Sequence[ModelDescription],
        options: ScoringOptions,
        longest: int,
        progress: ProgressDisplay,
    ) -> Models:
        """Plans where weights rest, and says it. longest: tokens of the longest rollout."""
        device, dtype = platform.device(), options.dtype
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host
        if options.backend == "trainer":
            free -= total_parameters(described[0]) * DTYPES[dtype].itemsize  # its own copy
        plan = plan_scoring(
            described[0],
            element_bytes=DTYPES[dtype].itemsize,
            num_models=len(checkpoints),
            longest=longest,
            host_bytes=host if device.type == "cuda" else free,
            device_bytes=free if device.type == "cuda" else None,
        )
        progress.note(plan.text(dtype))
        rest = torch.device("cpu") if plan.is_streamed else device
        held = HeldModels(DTYPES[dtype], rest, device, plan.held, _Shown(progress))
        return cls(held, checkpoints, described, options)

    def of(self, number: int, dtype: torch.dtype) -> TransformersScorer:
        """A scorer of a checkpoint in this arithmetic."""
        checkpoint = self.checkpoints[number]
        return TransformersScorer(
            self.held,
            self.described[number],
            dtype=dtype,
            name=_name(checkpoint),
            version=checkpoint.version,
        )

    def finer(self) -> TransformersScorer:
        """A scorer of the first checkpoint in an arithmetic of twice as many bits."""
        return self.of(0, _FINER[self.held.dtype])

    def half(self) -> TransformersScorer | None:
        """A scorer of the first checkpoint in 16 bits, if weights have more."""
        return self.of(0, torch.bfloat16) if self.held.dtype is torch.float32 else None

    @contextlib.contextmanager
    def scorers(self) -> Iterator[list[RolloutScorer]]:
        """One for each checkpoint."""
        dtype = self.options.dtype
        if self.options.backend == "hf":
            yield [self.of(number, DTYPES[dtype]) for number in range(len(self.checkpoints))]
            return
        (checkpoint,), (model,) = self.checkpoints, self.described
        with closing(TrainerScorer(model, dtype=dtype, name=_name(checkpoint), version=checkpoint.version)) as trainer:
            yield [trainer]


def _name(checkpoint: HuggingFaceCheckpoint) -> str:
    return checkpoint.folder.name if checkpoint.version is None else f"version {checkpoint.version}"
