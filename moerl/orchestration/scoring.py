"""Scores of tokens for the rollouts that are trained: asked for as they come, while others are sampled. Runs in the
controller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moerl.contract.ports import TokenScorer
from moerl.contract.tokenizer import Tokenizer
from moerl.contract.trajectory import Trajectory
from moerl.errors import ConfigError, closing, undoing
from moerl.orchestration.outcome import RolloutOutcome
from moerl.scorers.section import ScorerSection

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
        asked = [self._ask(trajectory) for trajectory in trajectories]
        return [_scored(trajectory, scores) for trajectory, scores in zip(trajectories, asked, strict=True)]

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


def open_scorers(
    sections: Mapping[str, ScorerSection],
    logs: Path,
    tokenizer: Tokenizer,
    read_tokenizer: Callable[[Path, str], Tokenizer],
) -> Scoring:
    """Starts the scorers of a configuration, and waits for none of them; the caller has to close them.

    Args:
        sections: section of each scorer, by its name.
        logs: folder for the logs of their processes.
        tokenizer: tokenizer of the run.
        read_tokenizer: reads the tokenizer of a directory, which a key names.

    Raises:
        ConfigError: the tokens of a scorer's model have other ids.
    """
    own, opened = tokenizer.get_vocab().items(), dict[str, TokenScorer]()
    for name, section in sections.items():
        if section.tokenizer is not None:
            key = f"scorers.{name}.path"
            theirs = read_tokenizer(section.tokenizer, key).get_vocab().items()
            if other := sorted(own - theirs):
                raise ConfigError(
                    f"{key}: its tokenizer is not that of the run",
                    seen=f"{len(other)} tokens with another id or none, first {other[0][0]!r}, here {other[0][1]}",
                    expected="every token of the run under the same id",
                    remedy="take a model with the tokenizer of the one that is trained",
                )
    with undoing(lambda: [scorer.close() for scorer in opened.values()]):
        for name, section in sections.items():
            opened[name] = section.open(f"scorers.{name}", logs / f"scorer-{name}.log")
    return Scoring(opened)
