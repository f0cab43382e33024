"""Scorers of the checkpoints that `moerl diagnose` is given, the devices of their weights and their arithmetic.

Runs in the process of `moerl diagnose`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from moerl.diagnostics.checkpoints import HuggingFaceCheckpoint
from moerl.diagnostics.scoring import RolloutScorer
from moerl.machine.memory import host_bytes, total_parameters
from moerl.machine.scoring_memory import plan_scoring
from moerl.models.description import ModelDescription
from moerl.offline.rescoring import LoadedModels, TransformersScorer
from moerl.offline.trainer_scorer import TrainerScorer, lone_trainer
from moerl.telemetry.progress import ProgressDisplay
from moerl.trainer import platform
from moerl.trainer.model import DTYPES

_FINER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


@dataclass(slots=True)
class _Shown:
    """Callback that shows how many rollouts are scored, and, between calls of a scorer, the search for causes."""

    progress: ProgressDisplay
    number: int = 0

    def __call__(self, done: int, total: int, tokens: int) -> None:
        if done == 0:
            self.number += 1
            self.progress.begin_part(f"scores {self.number}, rollouts")
        self.progress.within(done, total, tokens)
        if done == total:
            self.progress.begin_part("causes")


class Models:
    """Scorers of the named checkpoints. Plans on which device weights are kept, and shows the plan.

    Args:
        checkpoints: checkpoints to score with, each with the description of its model; rounding is that of the first.
        backend: library that computes log-probs: hf = transformers, trainer = Megatron.
        dtype: dtype of weights and arithmetic, as the trainer names it.
        longest: tokens of the longest rollout.
    """

    def __init__(
        self,
        checkpoints: Sequence[tuple[HuggingFaceCheckpoint, ModelDescription]],
        backend: Literal["hf", "trainer"],
        dtype: str,
        longest: int,
        progress: ProgressDisplay,
    ) -> None:
        self._checkpoints, self._backend, self._dtype = checkpoints, backend, dtype
        model, device, host = checkpoints[0][1], platform.device(), host_bytes()
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host
        if backend == "trainer":
            free -= total_parameters(model) * DTYPES[dtype].itemsize  # its own copy
        plan = plan_scoring(
            model,
            element_bytes=DTYPES[dtype].itemsize,
            num_models=len(checkpoints),
            longest=longest,
            host_bytes=host if device.type == "cuda" else free,
            device_bytes=free if device.type == "cuda" else None,
        )
        progress.note(plan.text(dtype))
        rest = torch.device("cpu") if plan.is_streamed else device
        self._models = LoadedModels(DTYPES[dtype], rest, device, plan.held, _Shown(progress))

    def _of(self, number: int, dtype: torch.dtype) -> TransformersScorer:
        """Makes a scorer of a checkpoint in this arithmetic. number: index in the checkpoints."""
        checkpoint, model = self._checkpoints[number]
        return TransformersScorer(self._models, model, dtype=dtype, name=_name(checkpoint), version=checkpoint.version)

    def finer(self) -> TransformersScorer:
        """Makes a scorer of the first checkpoint in an arithmetic of twice as many bits."""
        return self._of(0, _FINER[self._models.dtype])

    def half(self) -> TransformersScorer | None:
        """Makes a scorer of the first checkpoint in 16 bits; returns None if weights have no more."""
        return self._of(0, torch.bfloat16) if self._models.dtype is torch.float32 else None

    @contextlib.contextmanager
    def scorers(self) -> Iterator[list[RolloutScorer]]:
        """Yields a scorer for each checkpoint, by the backend."""
        if self._backend == "hf":
            yield [self._of(number, DTYPES[self._dtype]) for number in range(len(self._checkpoints))]
            return
        [(checkpoint, model)] = self._checkpoints
        with lone_trainer(model, self._dtype) as trainer:
            yield [TrainerScorer(trainer, model.spec, name=_name(checkpoint), version=checkpoint.version)]


def _name(checkpoint: HuggingFaceCheckpoint) -> str:
    return checkpoint.folder.name if checkpoint.version is None else f"version {checkpoint.version}"
