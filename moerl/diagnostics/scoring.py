"""Scores of dumped rollouts by a model: the questions to a scorer, and its answers.

Torch-free: scorers need torch and are elsewhere (`moerl.offline.rescoring`). Shape legend: T = sampled tokens of
a rollout, F = temperature factors, P = values of top-p, S, L, K as in the data contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moerl.contract.fields import ModelSpec
from moerl.diagnostics.dumps.rollout import DumpedRollout


@dataclass(frozen=True, slots=True)
class Question:
    """Scores that a scorer is asked for."""

    factors: tuple[float, ...] = (1.0,)
    """Log-probs at the dump's temperatures times each of these."""
    top_ps: tuple[float, ...] = ()
    """Also log-probs inside of the sets that a top-p filter with each of these would have kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """One rollout under the model. Log-probs are those of the sampled tokens, in nats."""

    kept_TF: NDArray[np.float64]
    """float64, inside of the listed kept set; over the vocabulary if none is listed or the token is not in it."""
    full_TF: NDArray[np.float64]
    """float64, over the vocabulary."""
    rebuilt_TP: NDArray[np.float64]
    """float64, inside of the smallest set that holds top-p of the mass and the token."""
    mass_T: NDArray[np.float64]
    """float64, probability of the listed kept set at the first factor; 1 if none is listed."""
    least_T: NDArray[np.float64] | None
    """float64, probability of the least likely member of that set; 0 if none is listed. None if the scorer does not
    know it."""
    own_ids: NDArray[np.int16]
    """int16 [S - 1, L, K], the routers' own choice on the hidden states of this pass."""
    margins: NDArray[np.float32] | None
    """float32 [S - 1, L], score of the last expert of `own_ids` less that of the next one; None if the scorer does not
    know them."""


class RolloutScorer(Protocol):
    """A model that scores rollouts."""

    name: str
    """For people."""
    version: int | None
    """Policy version of its weights; None if nobody said."""
    spec: ModelSpec
    """Sizes of the model, L and K among them."""
    offers_top_ps: bool
    """True if it answers `Question.top_ps`."""

    def score(self, rollouts: Sequence[DumpedRollout], question: Question) -> list[Scored]:
        """Returns the scores of rollouts: with the experts that a rollout brings, if any, in rows where `routed` is
        True.

        Routes must be whole: int32 [S - 1, L, K], in range, distinct in each row.
        """
        ...
