"""Samples to pack, of a given length: ``from packing_samples import sample, text``."""

from __future__ import annotations

from typing import Any

import numpy as np
from factories import make_trajectory

from moerl.contract.batch import TextSample, TrainSample


def sample(num_tokens: int = 8, rollout_id: str = "rollout-0", **changes: Any) -> TrainSample:
    rng = np.random.default_rng(num_tokens)
    trajectory = make_trajectory(rng, num_prompt=2, num_sampled=num_tokens - 2, rollout_id=rollout_id, **changes)
    return TrainSample(trajectory, np.ones(num_tokens, np.float32) * trajectory.sampled)


def text(num_tokens: int) -> TextSample:
    loss_mask = np.arange(num_tokens) >= max(1, num_tokens // 2)
    return TextSample(np.arange(10, 10 + num_tokens, dtype=np.int32), loss_mask)
