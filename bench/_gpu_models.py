"""Models of the checks of `gpu_check.py`, and how far log-probs in bfloat16 may be apart.

Results in bfloat16 are compared with those of transformers in bfloat16: the same weights, tokens and
experts, once in bfloat16 and once in float32. Ours may be `APART_LIMIT` times as far from float32 on average as
transformers in bfloat16 is; two correct implementations round in other places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from _report import Result
from _samples import Sizes, write_model
from numpy.typing import NDArray

from moerl.contract.trajectory import Trajectory
from moerl.models.description import ModelDescription, read_model
from moerl.rollout.replay import Replayed, TransformersReplay

APART_LIMIT = 2.0
_INITIALIZER_RANGE = 0.1
"""Larger than usual, so that experts and tokens are chosen by more than rounding."""
SIZES = {
    "cuda": Sizes(
        hidden=512,
        layers=4,
        heads=8,
        key_value_heads=2,
        head_dim=64,
        experts=32,
        experts_per_token=4,
        expert_width=256,
        vocab=8192,
    ),
    "cpu": Sizes(
        hidden=64,
        layers=2,
        heads=4,
        key_value_heads=2,
        head_dim=16,
        experts=8,
        experts_per_token=2,
        expert_width=32,
        vocab=128,
    ),
}
"""By the type of the device."""


def write_checkpoint(folder: Path, device: str) -> ModelDescription:
    """A model with random weights in bfloat16, which float32 has, too."""
    write_model(SIZES[device], folder, dtype=torch.bfloat16, device="cpu", initializer_range=_INITIALIZER_RANGE)
    return read_checkpoint(folder, device)


def read_checkpoint(folder: Path, device: str) -> ModelDescription:
    """Reads the model that `write_checkpoint` wrote."""
    return replace(read_model(folder), spec=SIZES[device].spec)


def replays(
    model: ModelDescription, trajectories: Sequence[Trajectory], dtype: torch.dtype, device: str
) -> list[Replayed]:
    """Replays the trajectories with transformers, with their recorded experts and kept sets."""
    judge = TransformersReplay(model, dtype=dtype, device=torch.device(device))
    return [judge.replay(trajectory) for trajectory in trajectories]


def sampled_logprobs(
    trajectories: Sequence[Trajectory], logprobs: Sequence[NDArray[np.floating]]
) -> NDArray[np.float64]:
    """Returns the log-probs of the sampled tokens of all trajectories; `logprobs` has one value per token of each."""
    rows = [each[t.sampled].astype(np.float64) for t, each in zip(trajectories, logprobs, strict=True)]
    return np.concatenate(rows)


def apart_results(
    name: str,
    ours: NDArray[np.float64],
    theirs: NDArray[np.float64],
    exact: NDArray[np.float64],
    *,
    exact_in: str = "float32",
) -> list[Result]:
    """Log-probs in bfloat16, ours and of transformers, against those of transformers in `exact_in`."""
    mine, other = np.abs(ours - exact), np.abs(theirs - exact)
    ratio = float(mine.mean() / other.mean())
    return [
        Result(f"{name}: sampled tokens", len(exact), unit="tokens"),
        Result(f"{name}: mean distance to {exact_in}", float(mine.mean()), unit="nats"),
        Result(f"{name}: largest distance to {exact_in}", float(mine.max()), unit="nats"),
        Result(f"transformers in bfloat16: mean distance to {exact_in}", float(other.mean()), unit="nats"),
        Result(f"transformers in bfloat16: largest distance to {exact_in}", float(other.max()), unit="nats"),
        Result(
            f"{name} / transformers in bfloat16: mean distance to {exact_in}",
            ratio,
            f"<= {APART_LIMIT:g}",
            ratio <= APART_LIMIT,
            "ratio",
        ),
    ]


def same_experts(trajectories: Sequence[Trajectory], replayed: Sequence[Replayed]) -> float:
    """Share of (token, layer) in which the recorded experts are those that transformers would have chosen."""
    pairs = zip(trajectories, replayed, strict=True)
    same = [np.sort(t.expert_ids.astype(np.int64), -1) == np.sort(r.own_ids, -1) for t, r in pairs]
    return float(np.concatenate([each.all(-1).ravel() for each in same]).mean())
