"""Outcomes of episodes: played on the engine, admitted whole or refused whole. Runs in the controller."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from moerl.contract.episodes import EpisodeTask
from moerl.contract.layers import LayerSelection
from moerl.contract.ports import Prompt, RolloutEngine, RolloutRecord, RolloutRequest, StreamingEngine
from moerl.contract.quarantine import Quarantine
from moerl.contract.trajectory import Trajectory
from moerl.episodes.play import Episode, PlayedEpisode, Texts, play
from moerl.errors import closing
from moerl.orchestration.outcome import RolloutOutcome


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
    count_failed_reward: Callable[[str], None]
    """Callback with the name of a reward that failed."""

    def outcomes(
        self,
        task: EpisodeTask,
        prompts: Mapping[str, Prompt],
        requests: Sequence[RolloutRequest],
        version: Callable[[], int],
        prefixes: Mapping[str, str],
    ) -> Generator[RolloutOutcome]:
        """Yields the outcome of one episode per request, in the order in which they end.

        Args:
            prompts: by id. version, prefixes: as in `Collector.outcomes`.
        """
        assert isinstance(self.engine, StreamingEngine)
        episodes = [
            Episode(request, partial(task.play, prompts[prompt_id]), prefixes.get(prompt_id, ""))
            for request in requests
            for prompt_id in (request.lineage.prompt_id,)
        ]
        stream = self.engine.stream()

        def check(answer: RolloutRecord) -> Trajectory:
            if answer.refusal is not None:
                raise answer.refusal
            return self.quarantine.read(self.layers.of(answer), trainer_version=version())

        with closing(play(episodes, stream, check, self.texts, turn_seconds=task.turn_seconds)) as played:
            for episode in played:
                yield self._admitted(episode, version())

    def _admitted(self, episode: PlayedEpisode, version: int) -> RolloutOutcome:
        name, records = episode.rollout_id, episode.records
        if episode.failed_reward is not None:
            self.count_failed_reward(episode.failed_reward)
        if episode.error is not None:
            self.quarantine.refuse_episode(name, records, episode.error, trainer_version=version)
            trajectories = None
        else:
            trajectories = self.quarantine.admit_episode(name, records, trainer_version=version)
        if trajectories is None:
            return RolloutOutcome(name, refusal=self.quarantine.refusal_of(name))
        return RolloutOutcome(name, tuple(trajectories))
