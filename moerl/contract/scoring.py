"""Port between a run and scorers of tokens. Torch-free."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moerl.contract.trajectory import Trajectory


class TokenScorer(Protocol):
    """Source of a number for each sampled token of a trajectory, such as its log-prob under a teacher.

    Several threads may call `submit`; the others belong to the thread that opened the scorer.
    """

    def start(self) -> None:
        """Waits until the scorer can score. Raises `ScoreError` if it never will."""

    def submit(self, trajectory: Trajectory) -> Future[NDArray[np.float32]]:
        """Asks for the scores of a trajectory; returns at once.

        Returns:
            A future of float32 [S], 0 on tokens that were not sampled. It raises `ScoreError` if there are none.
        """
        ...

    def close(self) -> None:
        """Ends the scorer's threads and processes; futures that are not done raise. A second call does nothing."""
