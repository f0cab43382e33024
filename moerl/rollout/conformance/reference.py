"""transformers in float32 on a CPU as the `Judge` of an engine's answers. In the process of `moerl conformance`."""

from __future__ import annotations

import torch

from moerl.models.description import ModelDescription
from moerl.rollout.conformance.answer_checks import as_trajectory
from moerl.rollout.conformance.subject import Answer, Ask, Judged
from moerl.rollout.replay import TransformersReplay


class TransformersJudge:
    """The model of a Hugging Face directory, told which experts to use.

    Args:
        model: its `spec` is that of the engine under test.

    Raises:
        EngineError: the model's routers are unknown or do not match the spec.
    """

    def __init__(self, model: ModelDescription) -> None:
        self._spec = model.spec
        self._replay = TransformersReplay(model, dtype=torch.float32, device=torch.device("cpu"))

    def judge(self, ask: Ask, answer: Answer) -> Judged:
        trajectory = as_trajectory(ask, answer, self._spec)
        replayed = self._replay.replay(trajectory)
        return Judged(replayed.own_ids, replayed.logprobs[trajectory.sampled])
