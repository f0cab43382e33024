"""Scores of tokens for the rollouts that are trained: asked for as they come, while others are sampled. Runs in the
controller."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moerl.contract.scoring import TokenScorer
from moerl.contract.trajectory import Trajectory
from moerl.errors import closing
from moerl.orchestration.outcome import RolloutOutcome

_Scores = dict[str, Future[NDArray[np.float32]]]


class Scoring:
    """Scorers of a run by name. Threads that collect share it.

    A score that fails ends the run: no batch is trained without it, and a run that goes on asks for it again.
    """

    def __init__(self, scorers: Mapping[str, TokenScorer]) -> None:
        self._scorers = scorers

    def start(self) -> None:
        """Waits until all scorers can score. Raises `ScoreError` if one never will."""
        for scorer in self._scorers.values():
            scorer.start()

    def of(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Returns the trajectories with their scores; waits for them. Raises `ScoreError`."""
        return [_scored(trajectory, scores) for trajectory, scores in [(t, self._ask(t)) for t in trajectories]]

    def outcomes(self, outcomes: Generator[RolloutOutcome]) -> Generator[RolloutOutcome]:
        """Yields outcomes in their order, their trajectories with scores; sampling waits for none. If the caller stops,
        scores that are due are cancelled.

        Raises:
            ScoreError: a scorer failed.
        """
        if not self._scorers:
            yield from outcomes
            return
        pending: deque[_Pending] = deque()
        try:
            with closing(outcomes):
                for outcome in outcomes:
                    pending.append(_Pending(outcome, [self._ask(each) for each in outcome.trajectories]))
                    while pending and pending[0].is_done:
                        yield pending.popleft().outcome_with_scores()
                while pending:
                    yield pending.popleft().outcome_with_scores()
        finally:
            for each in pending:
                each.cancel()

    def close(self) -> None:
        """Ends all scorers."""
        for scorer in self._scorers.values():
            scorer.close()

    def _ask(self, trajectory: Trajectory) -> _Scores:
        return {name: scorer.submit(trajectory) for name, scorer in self._scorers.items()}


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """An outcome whose scores were asked for."""

    outcome: RolloutOutcome
    scores: Sequence[_Scores]

    @property
    def is_done(self) -> bool:
        return all(future.done() for scores in self.scores for future in scores.values())

    def outcome_with_scores(self) -> RolloutOutcome:
        """Waits for the scores; returns the outcome with them."""
        pairs = zip(self.outcome.trajectories, self.scores, strict=True)
        return replace(self.outcome, trajectories=tuple(_scored(trajectory, scores) for trajectory, scores in pairs))

    def cancel(self) -> None:
        for scores in self.scores:
            for future in scores.values():
                future.cancel()


def _scored(trajectory: Trajectory, scores: _Scores) -> Trajectory:
    found = {name: future.result() for name, future in scores.items()}
    return trajectory.with_scores({**trajectory.scores, **found}) if found else trajectory
