"""transformers in float32 on a CPU as the `ReferenceJudge` of an engine's answers. Runs in `moerl conformance`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from moerl.models.description import ModelDescription
from moerl.rollout.conformance.answer_checks import as_trajectory
from moerl.rollout.conformance.subject import Answer, Ask, Judged
from moerl.rollout.replay import TransformersReplay


class TransformersJudge:
    """The model of a Hugging Face directory, with the experts of the answers that it judges.

    Args:
        model: its `spec` is that of the engine under test.

    Raises:
        EngineError: the model's routers are unknown or do not match the spec.
    """

    def __init__(self, model: ModelDescription) -> None:
        self._spec = model.spec
        self._replay = TransformersReplay(model, dtype=torch.float32, device=torch.device("cpu"))

    def judge(self, ask: Ask, answer: Answer) -> Judged:
        trajectory = as_trajectory(ask, _comparable(answer), self._spec)
        replayed = self._replay.replay(trajectory)
        return Judged(replayed.own_ids, replayed.logprobs[trajectory.sampled])


def _comparable(answer: Answer) -> Answer:
    """Sorts kept ids, limits log-probs to 0 and sets versions to 0: other checks look at these, and faults in them must
    not keep an answer from being compared."""
    ordered = None if answer.kept_sets is None else tuple(np.sort(ids) for ids in answer.kept_sets)
    versions = np.zeros(len(answer.token_ids), np.int32)
    logs = (None if part is None else np.minimum(part, 0.0) for part in (answer.logprobs, answer.kept_logmass))
    logprobs, kept_logmass = logs
    return replace(answer, kept_sets=ordered, versions=versions, logprobs=logprobs, kept_logmass=kept_logmass)
