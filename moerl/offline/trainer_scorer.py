"""Scores of dumped rollouts by the Megatron trainer itself, for `moerl diagnose --backend trainer`.

One process, no optimizer. The trainer gets trajectories of the data contract, so every rollout is checked; recorded
routing is enforced, and proved, by the same hooks as in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moerl.batching.packing import PackOptions, pack_trajectories
from moerl.contract.batch import Microbatch, TrainSample
from moerl.contract.fields import FinishReason, KeptSets, Lineage, ModelSpec, SamplingParams, Turn, TurnKind
from moerl.contract.parallel import ParallelDims
from moerl.contract.trajectory import Trajectory
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.scoring import Question, Scored
from moerl.errors import ending
from moerl.models.description import ModelDescription
from moerl.trainer import groups
from moerl.trainer.losses import Scorer
from moerl.trainer.model import ModelOptions
from moerl.trainer.trainer import MegatronTrainer

MICROBATCH_TOKENS = 8192
_LISTED = SamplingParams(top_p=0.5)
"""Sampling of tokens with a listed kept set: the contract wants sampling that lists sets; scores do not depend on
it."""


@contextmanager
def lone_trainer(model: ModelDescription, dtype: str) -> Iterator[MegatronTrainer]:
    """Yields a trainer in this process alone, whose process groups end with the context. dtype: of weights and
    arithmetic, as the trainer names it."""
    layout = groups.start(rank=0, rendezvous="", dims=ParallelDims(), seed=0)
    with ending(groups.stop):
        yield MegatronTrainer(model, layout, ModelOptions(dtype=dtype), None)


class TrainerScorer:
    """`moerl.diagnostics.scoring.RolloutScorer` on the trainer.

    Args:
        trainer: one from `lone_trainer`.
        spec, name, version: as in `RolloutScorer`.
    """

    offers_top_ps = False

    def __init__(self, trainer: MegatronTrainer, spec: ModelSpec, *, name: str, version: int | None) -> None:
        self._trainer, self.spec, self.name, self.version = trainer, spec, name, version

    def score(self, rollouts: Sequence[DumpedRollout], question: Question) -> list[Scored]:
        """Scores as `RolloutScorer` says; without margins; `own_ids` come from a pass with free routers.

        Raises:
            ContractError: a rollout breaks the data contract. ReplayError: recorded routing was not enforced.
        """
        assert not question.top_ps
        own = self._own_ids(rollouts)
        by_factor = [self._logprobs([self._trajectory(r, factor) for r in rollouts]) for factor in question.factors]
        scored = list[Scored]()
        for index, own_ids in enumerate(own):
            kept_TF = np.stack([kept[index] for kept, _ in by_factor], 1)
            full_TF = np.stack([full[index] for _, full in by_factor], 1)
            mass_T = np.exp(np.minimum(0.0, full_TF[:, 0] - kept_TF[:, 0]))
            scored.append(Scored(kept_TF, full_TF, np.zeros((len(kept_TF), 0)), mass_T, None, own_ids, None))
        return scored

    def _logprobs(
        self, trajectories: Sequence[Trajectory]
    ) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
        """Returns log-probs of the sampled tokens of each trajectory, inside of kept sets and over the vocabulary."""
        batches = pack_alone(trajectories)
        enforce = any(trajectory.routed.any() for trajectory in trajectories)
        scorer = Scorer(batches, keep_mask=True, with_full=True)
        rows = self._trainer.score(batches, scorer, enforce=enforce, in_sets=True)

        def of_sampled(logprobs: Iterable[Tensor | None]) -> list[NDArray[np.float64]]:
            found = by_sample(batches, [each.double().numpy() for each in logprobs if each is not None])
            return [each[t.sampled[1:]] for each, t in zip(found, trajectories, strict=True)]

        return of_sampled(row.logprobs_T for row in rows), of_sampled(row.full_logprobs_T for row in rows)

    def _own_ids(self, rollouts: Sequence[DumpedRollout]) -> list[NDArray[np.int16]]:
        free = [self._trajectory(replace(rollout, expert_ids=None, routed=None), 1.0) for rollout in rollouts]
        batches = pack_alone(free)
        _, recorded = self._trainer.score_and_record(batches, Scorer(batches, keep_mask=True), in_sets=True)
        ids = [batch.expert_ids.astype(np.int16) for batch in recorded.batches if batch.expert_ids is not None]
        return by_sample(recorded.batches, ids)

    def _trajectory(self, rollout: DumpedRollout, factor: float) -> Trajectory:
        """Makes a trajectory to score a rollout with; the scores do not depend on its log-probs."""
        num_tokens, spec = len(rollout), self.spec
        kept, listed = _held_sets(rollout)
        shape = (num_tokens - 1, spec.num_moe_layers, spec.experts_per_token)
        routed = np.zeros(num_tokens - 1, bool)
        expert_ids = np.zeros(shape, spec.expert_dtype)
        if rollout.expert_ids is not None:
            routed = rollout.routed_rows.copy()
            expert_ids = np.where(routed[:, None, None], rollout.expert_ids, 0).astype(spec.expert_dtype)
        return Trajectory(
            spec=spec,
            lineage=Lineage(rollout.name, rollout.name, rollout.name),
            turns=tuple(_turns(rollout, listed, factor)),
            token_ids=rollout.token_ids.copy(),
            sampled=rollout.sampled.copy(),
            rollout_logprobs=np.nan_to_num(np.minimum(rollout.rollout_logprobs, 0.0)) * rollout.sampled,
            kept_logmass=np.zeros(num_tokens, np.float32),
            policy_versions=np.where(rollout.sampled, 0, -1).astype(np.int32),
            expert_ids=expert_ids,
            routed=routed,
            kept=kept,
            truncated=listed,
            finish_reason=FinishReason.STOP,
        )


def pack_alone(trajectories: Sequence[Trajectory]) -> list[Microbatch]:
    """Packs trajectories for a trainer that is alone, in one process."""
    samples = [TrainSample(t, np.zeros(len(t), np.float32)) for t in trajectories]
    return pack_trajectories(samples, PackOptions(MICROBATCH_TOKENS), replay=True, uncaptured="live")


def by_sample[T: np.generic](batches: Sequence[Microbatch], values: Sequence[NDArray[T]]) -> list[NDArray[T]]:
    """Returns the rows of each sample, in the order of the samples, of values that microbatches have for their rows."""
    found = dict[int, NDArray[T]]()
    for batch, rows in zip(batches, values, strict=True):
        for index in np.unique(batch.sample_index[~batch.is_pad]).tolist():
            found[index] = rows[(batch.sample_index == index) & ~batch.is_pad]
    return [found[index] for index in sorted(found)]


def _held_sets(rollout: DumpedRollout) -> tuple[KeptSets, NDArray[np.bool_]]:
    """Returns the kept sets that contain their token, ascending and without repeats, and bool [S]: True for tokens that
    have one."""
    listed, rows = np.zeros(len(rollout), bool), [np.zeros(0, np.int32)] * len(rollout)
    if rollout.kept is not None:
        offsets = rollout.kept.offsets
        for token in np.flatnonzero(rollout.sampled).tolist():
            ids = np.unique(rollout.kept.ids[offsets[token] : offsets[token + 1]])
            if rollout.token_ids[token] in ids:
                listed[token], rows[token] = True, ids.astype(np.int32)
    sizes = [len(row) for row in rows]
    return KeptSets(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), np.concatenate(rows)), listed


def _turns(rollout: DumpedRollout, listed: NDArray[np.bool_], factor: float) -> Iterator[Turn]:
    """Yields the spans of tokens that were sampled alike."""
    temperatures = rollout.temperatures
    changes = (rollout.sampled[1:] != rollout.sampled[:-1]) | (listed[1:] != listed[:-1])
    changes |= rollout.sampled[1:] & (temperatures[1:] != temperatures[:-1])
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(rollout)]
    for start, end in pairwise(bounds):
        if not rollout.sampled[start]:
            yield Turn(start, end, TurnKind.PROMPT if start == 0 else TurnKind.OBSERVATION)
            continue
        plain = _LISTED if listed[start] else SamplingParams()
        heat = max(float(temperatures[start]) * factor, 1e-4)
        yield Turn(start, end, TurnKind.SAMPLED, replace(plain, temperature=heat))
