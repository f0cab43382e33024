"""From prompts to checked, rewarded trajectories. Runs in the controller."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moerl.buffer.turns import TurnMemory
from moerl.config.rollouts import EpisodeConfig, RolloutConfig
from moerl.config.schema import EvaluationConfig
from moerl.contract.disk import write_parquet
from moerl.contract.episodes import EpisodeTask
from moerl.contract.files import writing
from moerl.contract.layers import LayerSelection
from moerl.contract.ports import Prompt, RolloutEngine, RolloutRecord, RolloutRequest, Task
from moerl.contract.quarantine import Quarantine
from moerl.contract.reasons import Reason
from moerl.contract.routing import rollout_key
from moerl.contract.spans import ReadableSpan, is_of_episode, spans_of
from moerl.contract.tokenizer import Tokenizer, encode_checked
from moerl.contract.trajectory import Lineage, SamplingParams, Trajectory
from moerl.episodes.session import Texts
from moerl.errors import ContractError, MoerlError, RewardError, closing
from moerl.orchestration.chat import ChatWriter
from moerl.orchestration.outcome import RolloutOutcome
from moerl.orchestration.played import EpisodeGate
from moerl.orchestration.scoring import Scoring
from moerl.telemetry.metrics import failed_reward_metric


def unwatched(done: int, total: int, tokens: int) -> None:
    """Takes the place of `Collector.watch` if nobody watches."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """An admitted trajectory whose rewards were asked for, and the record that it was made of."""

    record: RolloutRecord
    trajectory: Trajectory
    rewards: Future[dict[str, float]]


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """Plan of evaluations: what is sampled, and the folder of the tables."""

    folder: Path | None = None
    """Folder for tables of evaluations; None = no tables are written."""
    samples: int = 0
    """Sampled responses to each held-out problem, besides the greedy one."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Distribution of these samples."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Collector of responses: asks an engine, checks every answer by the contract, and has it rewarded."""

    engine: RolloutEngine
    """Engine that answers requests."""
    task: Task
    """Task of the prompts; it rewards responses."""
    tokenizer: Tokenizer
    """Tokenizer of the model; one thread at a time uses it."""
    quarantine: Quarantine
    """Check of answers by the contract; keeps those that are refused."""
    max_new_tokens: int
    """Sampled tokens of a response, at most."""
    layers: LayerSelection
    """Columns of the engine's expert ids that are the model's MoE layers, by the engine's handshake."""
    ends: tuple[int, ...]
    """Ids that end a response (`moerl.orchestration.ends`)."""
    notify: Callable[[str], None]
    """Callback with a line for people about refused answers."""
    watch: Callable[[int, int, int], None] = unwatched
    """Callback at the start and after each outcome: numbers of outcomes, of requests, and of sampled tokens."""
    evaluations: EvaluationPlan = field(default_factory=EvaluationPlan)
    """Plan by which `moerl.orchestration.evaluation` samples and keeps tables."""
    chat_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Variables of the chat template, for conversations in episodes."""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    """Limits of episodes, and what becomes of those that reach one or fail."""
    scoring: Scoring = field(default_factory=lambda: Scoring({}))
    """Scorers of the rollouts that are trained; whoever trains them passes `outcomes` through."""
    # Tokenizers may be borrowed by one thread at a time.
    _decoding: threading.Lock = field(default_factory=threading.Lock)
    _counts: Counter[str] = field(default_factory=Counter[str])
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def requests(
        self, prompts: Sequence[Prompt], *, run: str, count: int, sampling: SamplingParams
    ) -> list[RolloutRequest]:
        """Makes `count` requests per prompt.

        Args:
            run: name of this use of the prompts (for example ``rl-000012``); part of every rollout id.
            sampling: distribution; its seed is mixed with each rollout id.
        """
        requests = []
        for prompt in prompts:
            prompt_ids = tuple(self._encode(prompt.text + prompt.prefix))
            for number in range(count):
                rollout_id = f"{run}/{prompt.prompt_id}/{number}"
                seed = rollout_key(f"{sampling.seed}/{rollout_id}") >> 1
                requests.append(
                    RolloutRequest(
                        lineage=Lineage(rollout_id, prompt.prompt_id, group_id=f"{run}/{prompt.prompt_id}"),
                        prompt_ids=prompt_ids,
                        sampling=replace(sampling, seed=seed),
                        max_new_tokens=self.max_new_tokens,
                        stop_ids=self.ends,
                    )
                )
        return requests

    def collect(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[RolloutRequest],
        purpose: str,
        *,
        trainer_version: int,
        with_filtered: bool = True,
    ) -> list[Trajectory]:
        """Returns admitted trajectories with their rewards, in the order of the answers.

        Args:
            purpose: name of the responses in errors and messages.
            with_filtered: keep also what the configuration leaves out of training, as evaluations do.

        Raises:
            MoerlError: no answer was admitted, or too many were refused.
        """
        admitted: list[Trajectory] = []
        num_admitted, num_refused, num_tokens, first = 0, 0, 0, ""
        self.watch(0, len(requests), 0)
        with closing(self.outcomes(prompts, requests, lambda: trainer_version)) as outcomes:
            for outcome in outcomes:
                if not outcome.trajectories or (outcome.filtered and not with_filtered):
                    text = outcome.filtered if outcome.refusal is None else outcome.refusal.text
                    num_refused, first = num_refused + 1, first or text
                else:
                    num_admitted += 1
                    admitted += outcome.trajectories
                    num_tokens += outcome.num_sampled
                self.watch(num_admitted + num_refused, len(requests), num_tokens)
        self.tell_refused(purpose, num_refused, len(requests), first)
        return admitted

    def tell_refused(self, purpose: str, num_refused: int, num_asked: int, first: str) -> None:
        """Says how many of the responses were refused, and the first cause.

        Raises:
            MoerlError: all responses were refused.
        """
        cause, folder = f"; the first: {first}", self.quarantine.folder
        if num_refused >= num_asked:
            raise MoerlError(
                f"{purpose}: no response was admitted",
                seen=f"{num_refused} of {num_asked} refused{cause}",
                expected="at least one",
                remedy=f"correct the cause; what was refused is in {folder}",
            )
        if num_refused:
            self.notify(f"{purpose}: {num_refused} of {num_asked} responses refused{cause}; kept in {folder}")

    def outcomes(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[RolloutRequest],
        version: Callable[[], int],
        turns: TurnMemory | None = None,
    ) -> Generator[RolloutOutcome]:
        """Yields the outcome of each request: of refused answers at once, of all others in the order of their answers;
        of episodes in the order in which they end.

        Sampling waits for no reward: rewards are asked for when an answer comes, and collected in the order of the
        answers once they are done. Answers that break the contract, and answers whose reward fails, go to quarantine.
        If the caller stops, rewards that are still due are cancelled. Calls may overlap.

        Args:
            version: returns the trainer's version; called for each answer and each reward.
            turns: turns of episodes that are known, and the keeper of others; None = none are known or kept.

        Raises:
            MoerlError: too many answers were refused.
        """
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        ids = [request.lineage.rollout_id for request in requests]
        self.quarantine.expect(ids)
        if isinstance(self.task, EpisodeTask):
            with closing(ChatWriter(self.tokenizer, self.chat_options)) as writer:
                texts = Texts(self._encode, self._decode, writer.write)
                gate = EpisodeGate(self.engine, self.quarantine, self.layers, texts, self.episode, self._count)
                yield from gate.outcomes(self.task, by_id, requests, version, turns)
        else:
            yield from self._responses(by_id, requests, version)
        self.quarantine.forget(ids)

    def _responses(
        self, prompts: Mapping[str, Prompt], requests: Sequence[RolloutRequest], version: Callable[[], int]
    ) -> Generator[RolloutOutcome]:
        """Yields the outcomes of single responses. prompts: by id."""
        pending: deque[_Pending] = deque()
        try:
            for answer in self.engine.generate(requests):
                checked = self._checked(answer, version())
                if isinstance(checked, RolloutOutcome):
                    yield checked
                    continue
                record, trajectory = checked
                prompt = prompts[trajectory.lineage.prompt_id]
                response = prompt.prefix + self.response(trajectory)
                rewards = self.task.reward(prompt, response, trajectory.finish_reason)
                pending.append(_Pending(record, trajectory, rewards))
                while pending and pending[0].rewards.done():
                    yield self._rewarded(pending.popleft(), version())
            while pending:
                yield self._rewarded(pending.popleft(), version())
        finally:
            for each in pending:
                each.rewards.cancel()

    def _checked(self, answer: RolloutRecord, version: int) -> RolloutOutcome | tuple[RolloutRecord, Trajectory]:
        """Checks an answer by the contract; returns the record and its trajectory, or the outcome of a refusal."""
        try:
            if answer.refusal is not None:
                raise answer.refusal
            record = self.layers.of(answer)
        except ContractError as error:
            self.quarantine.refuse(answer, error, trainer_version=version)
            return self._refused(answer)
        trajectory = self.quarantine.admit(record, trainer_version=version)
        if trajectory is None:
            return self._refused(record)
        return record, trajectory

    def _refused(self, record: RolloutRecord) -> RolloutOutcome:
        name: object = record.rollout_id
        return RolloutOutcome(name if type(name) is str else "", refusal=self.quarantine.refusal_of(name))

    def _rewarded(self, pending: _Pending, version: int) -> RolloutOutcome:
        """Waits for the rewards of a trajectory; returns its outcome."""
        try:
            trajectory = pending.trajectory.with_rewards(pending.rewards.result())
        except RewardError as error:
            self._count(failed_reward_metric(error.reward))
            why = ": ".join(filter(None, (error.what, error.seen)))
            failed = ContractError(Reason.REWARD_FAILED, field="rewards", seen=why, expected="finite rewards")
            self.quarantine.withdraw(pending.record, failed, trainer_version=version)
            return self._refused(pending.record)
        except ContractError as error:
            self.quarantine.withdraw(pending.record, error, trainer_version=version)
            return self._refused(pending.record)
        return RolloutOutcome(pending.record.rollout_id, (trajectory,))

    def _count(self, metric: str) -> None:
        with self._counting:
            self._counts[metric] += 1

    def take_counts(self) -> dict[str, float]:
        """Returns, by metric, how often rewards failed, and episodes failed or reached a limit, since the last call."""
        with self._counting:
            found = {metric: float(count) for metric, count in self._counts.items()}
            self._counts.clear()
        return found

    def prompt(self, trajectory: Trajectory) -> str:
        """Returns the text of the tokens before the first sampled one, as the model saw it."""
        ids = trajectory.token_ids[: int(trajectory.sampled.argmax())].tolist()
        return self._decode(ids)

    def response(self, trajectory: Trajectory) -> str:
        """Returns the text behind the prompt, without the token that ended it; of an episode with what its environment
        wrote between turns."""
        ids = trajectory.token_ids[int(trajectory.sampled.argmax()) :].tolist()
        return self._decode(ids[:-1] if ids and ids[-1] in self.ends else ids)

    def dump(self, path: Path, trajectories: Sequence[Trajectory]) -> None:
        """Writes trajectories with their texts as a Parquet file. Raises as `write_parquet` does."""
        texts, prompts = map(self.response, trajectories), map(self.prompt, trajectories)
        with writing(path):
            write_parquet(path, trajectories, texts=[*texts], prompts=[*prompts], spans=self.spans(trajectories))

    def spans(self, trajectories: Sequence[Trajectory]) -> list[list[ReadableSpan]] | None:
        """Returns the spans of each trajectory, with their texts; None unless one is of an episode in several turns."""
        if not any(map(is_of_episode, trajectories)):
            return None
        return [[*spans_of(trajectory, self._decode, self.ends)] for trajectory in trajectories]

    def _encode(self, text: str) -> list[int]:
        with self._decoding:
            return encode_checked(self.tokenizer, text)

    def _decode(self, ids: Sequence[int]) -> str:
        with self._decoding:
            return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def sampling_params(config: RolloutConfig, seed: int) -> SamplingParams:
    """Returns the sampling distribution of training rollouts."""
    return SamplingParams(config.temperature, config.top_p, config.top_k, config.min_p, seed)


def evaluation_sampling(asked: EvaluationConfig, rollout: RolloutConfig, seed: int) -> SamplingParams:
    """Returns the sampling distribution of the samples of an evaluation."""
    top_k = rollout.top_k if asked.top_k is None else asked.top_k
    return SamplingParams(asked.temperature, asked.top_p, top_k, seed=seed)


GREEDY = SamplingParams(temperature=0.0)


def in_request_order(trajectories: Sequence[Trajectory], requests: Sequence[RolloutRequest]) -> list[Trajectory]:
    """Sorts trajectories in the order of their requests, so that training does not depend on which finished first;
    those of an episode stay in their order."""
    order = {request.lineage.rollout_id: i for i, request in enumerate(requests)}
    return sorted(trajectories, key=lambda trajectory: order[trajectory.lineage.episode])
