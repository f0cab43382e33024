"""Scores of dumped rollouts by a model: what a scorer is asked, and what it answers.

Torch-free: scorers live where their models do (`moerl.orchestration.rescoring`). Shape
legend: T = sampled tokens of a rollout, F = temperature factors, P = values of top-p, S, L, K as in the data contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.dumps.rollout import DumpedRollout


@dataclass(frozen=True, slots=True)
class Question:
    """Scores that a scorer is asked for.

    factors: log-probs at the dump's temperatures times each of these. top_ps: also log-probs inside of the sets that a
    top-p filter with each of these would have kept.
    """

    factors: tuple[float, ...] = (1.0,)
    top_ps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """One rollout under the model. Log-probs are those of the sampled tokens, in nats.

    kept_TF: float64, inside of the listed kept set, over the vocabulary where none is listed or the token is not in it.
    full_TF: float64, over the vocabulary. rebuilt_TP: float64, inside of the smallest set that holds top-p of the mass
        and the token. mass_T, least_T: float64, probability of the listed kept set and of its least likely member, at
        the first factor; 1 and 0 if none is listed. least_T is None if the scorer does not know it.
    own_ids: int16 [S - 1, L, K], what the routers chose by themselves, on the hidden states of this pass.
    margins: float32 [S - 1, L], score of the last expert they chose less that of the next one.
    """

    kept_TF: NDArray[np.float64]
    full_TF: NDArray[np.float64]
    rebuilt_TP: NDArray[np.float64]
    mass_T: NDArray[np.float64]
    least_T: NDArray[np.float64] | None
    own_ids: NDArray[np.int16]
    margins: NDArray[np.float32]


class RolloutScorer(Protocol):
    """A model that scores rollouts.

    name: of it, for people. version: policy version of its weights, None where nobody said. num_moe_layers,
    experts_per_token, num_experts: of the model. offers_top_ps: it answers `Question.top_ps`.
    """

    name: str
    version: int | None
    num_moe_layers: int
    experts_per_token: int
    num_experts: int
    offers_top_ps: bool

    def score(self, rollouts: Sequence[DumpedRollout], question: Question) -> list[Scored]:
        """Scores rollouts with the experts that each brings, where it has some, in rows where `routed` is True.

        Routes must be whole: int32 [S - 1, L, K], in range, distinct in each row.
        """
        ...
