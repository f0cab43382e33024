"""One checked trajectory: what travels from a rollout engine to the trainer.

Pure data: numpy only, no torch. Built by engine adapters (any process), checked once at construction
(`moerl.contract.invariants`), read-only afterwards. Its fields are described in `moerl.contract.fields`, whose names
are offered here as well.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from moerl.contract.fields import MAX_KEPT_IDS as MAX_KEPT_IDS
from moerl.contract.fields import TURN_REWARDS as TURN_REWARDS
from moerl.contract.fields import FinishReason as FinishReason
from moerl.contract.fields import KeptSets as KeptSets
from moerl.contract.fields import Lineage as Lineage
from moerl.contract.fields import ModelSpec as ModelSpec
from moerl.contract.fields import SamplingParams as SamplingParams
from moerl.contract.fields import TrajectoryFields
from moerl.contract.fields import Turn as Turn
from moerl.contract.fields import TurnKind as TurnKind
from moerl.contract.invariants import check_rewards, check_scores, check_trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory(TrajectoryFields):
    """One trajectory, checked. Construction raises `ContractError` if any invariant is broken."""

    def __post_init__(self) -> None:
        check_trajectory(self)
        for value in _all_fields(self):
            _freeze(value)

    def with_rewards(self, rewards: dict[str, float]) -> Trajectory:
        """Returns the same trajectory with these rewards instead of its own. Only the rewards are checked: the rest
        was.

        Raises:
            ContractError: a name is not text, a reward is not a finite number, or there are too many.
        """
        check_rewards(rewards)
        rewarded = copy.copy(self)  # runs no `__post_init__`; the arrays are shared, and read-only
        object.__setattr__(rewarded, "rewards", rewards)
        return rewarded

    def with_scores(self, scores: dict[str, NDArray[np.float32]]) -> Trajectory:
        """Returns the same trajectory with these side scores instead of its own. Only the scores are checked: the rest
        was.

        Raises:
            ContractError: a name is not text, a score is not a finite float32 [S], or there are too many.
        """
        check_scores(scores, len(self))
        scored = copy.copy(self)
        object.__setattr__(scored, "scores", scores)
        _freeze(scores)
        return scored


_all_fields = attrgetter(*(each.name for each in fields(TrajectoryFields)))


def _freeze(value: object) -> None:
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    elif isinstance(value, KeptSets):
        _freeze(value.offsets)
        _freeze(value.ids)
    elif isinstance(value, dict):
        for item in value.values():
            _freeze(item)
