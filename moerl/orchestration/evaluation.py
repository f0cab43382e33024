"""Greedy evaluation of the engine's current weights. Runs on the rank that hosts the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moerl.contract.ports import WorkedTask
from moerl.orchestration.rollouts import GREEDY, Collector


@dataclass(frozen=True, slots=True)
class Evaluation:
    """num_problems: answers that were admitted. accuracy: share of them that solve their problem.

    length_mean: sampled tokens per response. rewards: means by name.
    """

    num_problems: int
    accuracy: float
    length_mean: float
    rewards: dict[str, float]


def evaluate(collector: Collector, split: str, count: int, *, version: int, worked: bool = False) -> Evaluation:
    """Solves the first `count` problems of a split greedily.

    Args:
        version: policy version the engine holds.
        worked: make the model show its work, by starting each response with the task's `work_prefix`.
    """
    prompts = collector.task.prompts(split, count)
    prefixes = {}
    if worked:
        assert isinstance(collector.task, WorkedTask)
        prefixes = {prompt.prompt_id: collector.task.work_prefix(prompt) for prompt in prompts}
    run = f"evaluation-{split}-{version:06d}{'-worked' if worked else ''}"
    requests = collector.requests(prompts, run=run, count=1, sampling=GREEDY, prefixes=prefixes)
    purpose = f"evaluation on {split} problems"
    trajectories = collector.collect(prompts, requests, purpose, trainer_version=version, prefixes=prefixes)
    names = sorted({name for trajectory in trajectories for name in trajectory.rewards})
    rewards = {name: float(np.mean([t.rewards[name] for t in trajectories if name in t.rewards])) for name in names}
    return Evaluation(
        num_problems=len(trajectories),
        accuracy=rewards.get("accuracy", float("nan")),
        length_mean=float(np.mean([t.num_sampled for t in trajectories])),
        rewards=rewards,
    )
