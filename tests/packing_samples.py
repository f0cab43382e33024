"""Samples to pack, of a given length: ``from packing_samples import sample, text``."""

from __future__ import annotations

from dataclasses import replace
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


def fork_of(session: TrainSample, other: TrainSample) -> TrainSample:
    """`other` with the first tokens and routes of a session, as many as its prompt has: a fork behind them."""
    num_prompt = int(other.trajectory.sampled.argmax())
    assert num_prompt <= len(session.trajectory), "a prompt that the session has"
    parent = session.trajectory.lineage.rollout_id
    lineage = replace(other.trajectory.lineage, parent_rollout_id=parent, fork_at=num_prompt)
    return _beginning_with(session, replace(other, trajectory=replace(other.trajectory, lineage=lineage)), num_prompt)


def with_prompt_of(first: TrainSample, other: TrainSample) -> TrainSample:
    """`other` with the prompt of `first`, tokens and routing: as if both were sampled of one prompt computed once."""
    num_prompt = int(first.trajectory.sampled.argmax())
    assert int(other.trajectory.sampled.argmax()) == num_prompt, "prompts of one length"
    return _beginning_with(first, other, num_prompt)


def _beginning_with(first: TrainSample, other: TrainSample, num_prompt: int) -> TrainSample:
    arrays = {"token_ids": num_prompt, "expert_ids": num_prompt - 1, "routed": num_prompt - 1}
    changes = {
        name: np.concatenate([getattr(first.trajectory, name)[:end], getattr(other.trajectory, name)[end:]])
        for name, end in arrays.items()
    }
    return replace(other, trajectory=replace(other.trajectory, **changes))
