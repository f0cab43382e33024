"""Outcomes of episodes: played on the engine, admitted whole or refused whole. Runs in the controller."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from moerl.buffer.turns import TurnMemory
from moerl.config.rollouts import EpisodeConfig
from moerl.contract.episodes import EpisodeTask
from moerl.contract.layers import LayerSelection
from moerl.contract.ports import Prompt, RolloutEngine, RolloutRecord, RolloutRequest, StreamingEngine
from moerl.contract.quarantine import Quarantine
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import Trajectory
from moerl.episodes.play import Episode, PlayedEpisode, play
from moerl.episodes.remembering import RememberingStream
from moerl.episodes.session import Texts
from moerl.errors import ContractError, closing
from moerl.orchestration.outcome import RolloutOutcome
from moerl.telemetry.metrics import failed_reward_metric


@dataclass(frozen=True, slots=True)
class EpisodeGate:
    """Plays episodes of a task; every turn is checked by the contract before the environment sees it."""

    engine: RolloutEngine
    """A `StreamingEngine`."""
    quarantine: Quarantine
    """Check of whole trajectories; keeps the episodes that are refused."""
    layers: LayerSelection
    """Columns of the engine's expert ids that are the model's MoE layers."""
    texts: Texts
    """Tokenizer of the model."""
    rules: EpisodeConfig
    """Limits, and what becomes of episodes that reach one or fail."""
    count: Callable[[str], None]
    """Callback with the name of a metric that counts failures."""

    def outcomes(
        self,
        task: EpisodeTask,
        prompts: Mapping[str, Prompt],
        requests: Sequence[RolloutRequest],
        version: Callable[[], int],
        turns: TurnMemory | None = None,
    ) -> Generator[RolloutOutcome]:
        """Yields the outcome of one episode per request, in the order in which they end.

        Args:
            prompts: by id. version, turns: as in `Collector.outcomes`.
        """
        assert isinstance(self.engine, StreamingEngine)
        episodes = [
            Episode(request, partial(task.play, prompt), prompt.prefix)
            for request in requests
            for prompt in (prompts[request.lineage.prompt_id],)
        ]
        stream = self.engine.stream()
        remembering = None if turns is None or not task.repeatable else RememberingStream(stream, turns)

        def check(answer: RolloutRecord) -> Trajectory:
            if answer.refusal is not None:
                raise answer.refusal
            if remembering is not None and remembering.is_known(answer):
                return self.quarantine.read(answer, trainer_version=version())
            turn = self.quarantine.read(self.layers.of(answer), trainer_version=version())
            if remembering is not None:
                remembering.keep(turn)
            return turn

        seconds, stream = task.turn_seconds, remembering or stream
        with closing(play(episodes, stream, check, self.texts, turn_seconds=seconds, limits=self.rules)) as played:
            for episode in played:
                yield self._admitted(episode, version())

    def _admitted(self, episode: PlayedEpisode, version: int) -> RolloutOutcome:
        name, records, error = episode.rollout_id, episode.records, episode.error
        if episode.failed_reward is not None:
            self.count(failed_reward_metric(episode.failed_reward))
        has_failed = error is not None and error.reason is Reason.EPISODE_FAILED
        filtered = ""
        if episode.stopped_by and (error is None or has_failed):
            self.count("episode/limited")
            if self.rules.when_limited == "refuse":
                error = _limited(episode.stopped_by, getattr(self.rules, episode.stopped_by))
            elif self.rules.when_limited == "filter":
                filtered = str(Reason.EPISODE_LIMITED)
        if has_failed:
            self.count("episode/failed")
            if not filtered and error is episode.error and self.rules.when_failed == "filter":
                filtered = str(Reason.EPISODE_FAILED)
            if filtered:
                return RolloutOutcome(name, filtered=filtered)
        if error is not None:
            self.quarantine.refuse_episode(name, records, error, trainer_version=version)
            trajectories = None
        else:
            trajectories = self.quarantine.admit_episode(name, records, trainer_version=version)
        if trajectories is None:
            return RolloutOutcome(name, refusal=self.quarantine.refusal_of(name))
        return RolloutOutcome(name, tuple(trajectories), filtered=filtered)


def _limited(limit: str, value: float) -> ContractError:
    return ContractError(
        Reason.EPISODE_LIMITED,
        field="episode",
        seen=f"another turn after episode.{limit} was reached",
        expected=f"an end within {value:g}",
        remedy=f"raise episode.{limit}, or set episode.when_limited=train or filter",
    )
