"""From prompts to checked, rewarded trajectories. Runs on the rank that hosts the embedded engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from moerl.algorithms.policy import Algorithm, RewardedBatch
from moerl.config.schema import RolloutConfig
from moerl.contract.batch import TrainSample
from moerl.contract.layers import LayerSelection
from moerl.contract.ports import Prompt, RolloutEngine, RolloutRecord, RolloutRequest, Task
from moerl.contract.quarantine import Quarantine
from moerl.contract.reasons import Reason
from moerl.contract.routing import rollout_key
from moerl.contract.trajectory import FinishReason, Lineage, SamplingParams, Trajectory
from moerl.errors import ContractError, MoerlError, RewardError
from moerl.orchestration.tokenizer import encode_checked


def _unwatched(done: int, total: int, tokens: int) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """An admitted trajectory whose rewards were asked for, and the record it was made of."""

    record: RolloutRecord
    trajectory: Trajectory
    rewards: Future[dict[str, float]]


@dataclass(frozen=True, slots=True)
class Collector:
    """Asks an engine for responses, passes every answer through the contract, and has it rewarded.

    layers: which columns of the engine's expert ids are the model's MoE layers, by its handshake.
    ends: ids that end a response (`moerl.orchestration.ends`). say: where refused answers are told of.
    watch: told after each admitted answer how many came, of how many, and the tokens sampled in them.
    """

    engine: RolloutEngine
    task: Task
    tokenizer: PreTrainedTokenizerBase
    quarantine: Quarantine
    max_new_tokens: int
    layers: LayerSelection
    ends: tuple[int, ...]
    say: Callable[[str], None]
    watch: Callable[[int, int, int], None] = _unwatched

    def requests(
        self, prompts: Sequence[Prompt], *, run: str, count: int, sampling: SamplingParams, prefixes: Mapping[str, str]
    ) -> list[RolloutRequest]:
        """`count` requests per prompt.

        Args:
            run: names this use of the prompts (for example ``rl-000012``); part of every rollout id.
            sampling: its seed is mixed with each rollout id.
            prefixes: text by prompt id that is put at the start of the response, as part of the prompt.
        """
        requests = []
        for prompt in prompts:
            text = prompt.text + prefixes.get(prompt.prompt_id, "")
            prompt_ids = tuple(encode_checked(self.tokenizer, text))
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
        prefixes: Mapping[str, str],
        may_be_empty: bool = False,
    ) -> list[Trajectory]:
        """Admitted trajectories with their rewards, in the order in which they finished.

        Sampling waits for no reward: each is asked for when its answer comes, and taken in that order once it is done.
        Answers that break the contract, and those whose reward fails, go to quarantine, and the first cause is told.

        Args:
            purpose: what the responses are for, as errors call it.
            may_be_empty: go on also where all were refused.

        Raises:
            MoerlError: not one was admitted, or too many were refused.
        """
        quarantine, before = self.quarantine, self.quarantine.num_refused
        admitted: list[Trajectory] = []
        num_tokens = 0
        self.watch(0, len(requests), 0)
        with closing(self._rewarded(prompts, requests, trainer_version, prefixes)) as trajectories:
            for trajectory in trajectories:
                admitted.append(trajectory)
                num_tokens += trajectory.num_sampled
                self.watch(len(admitted) + quarantine.num_refused - before, len(requests), num_tokens)
        refused = quarantine.num_refused - before
        cause = f"; the first: {quarantine.first_refusal}" if refused else ""
        if not admitted and not may_be_empty:
            raise MoerlError(
                f"{purpose}: no response was admitted",
                seen=f"{refused} of {len(requests)} refused{cause}",
                expected="at least one",
                remedy=f"correct the cause; what was refused is in {quarantine.folder}",
            )
        if refused:
            self.say(f"{purpose}: {refused} of {len(requests)} responses refused{cause}; kept in {quarantine.folder}")
        return admitted

    def _rewarded(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[RolloutRequest],
        trainer_version: int,
        prefixes: Mapping[str, str],
    ) -> Generator[Trajectory]:
        """Trajectories in the order in which they finished. Rewards that nobody will take are cancelled."""
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        pending: deque[_Pending] = deque()
        try:
            for record, trajectory in self._admitted(requests, trainer_version):
                prompt = by_id[trajectory.lineage.prompt_id]
                response = prefixes.get(prompt.prompt_id, "") + self.response(trajectory)
                rewards = self.task.reward(prompt, response, trajectory.finish_reason)
                pending.append(_Pending(record, trajectory, rewards))
                while pending and pending[0].rewards.done():
                    yield from self._with_rewards(pending.popleft(), trainer_version)
            while pending:
                yield from self._with_rewards(pending.popleft(), trainer_version)
        finally:
            for each in pending:
                each.rewards.cancel()

    def _with_rewards(self, pending: _Pending, trainer_version: int) -> Iterator[Trajectory]:
        """Waits for the rewards; yields nothing where they failed and the record went to quarantine."""
        try:
            rewards = pending.rewards.result()
        except RewardError as error:
            why = ": ".join(filter(None, (error.what, error.seen)))
            failed = ContractError(Reason.REWARD_FAILED, field="rewards", seen=why, expected="finite rewards")
            self.quarantine.withdraw(pending.record, failed, trainer_version=trainer_version)
        else:
            yield pending.trajectory.with_rewards(rewards)

    def _admitted(
        self, requests: Sequence[RolloutRequest], trainer_version: int
    ) -> Iterator[tuple[RolloutRecord, Trajectory]]:
        """What the engine samples, as it was answered and as it was checked."""
        self.quarantine.expect(request.lineage.rollout_id for request in requests)
        for answer in self.engine.generate(requests):
            try:
                if answer.refusal is not None:
                    raise answer.refusal
                record = self.layers.of(answer)
            except ContractError as error:
                self.quarantine.refuse(answer, error, trainer_version=trainer_version)
                continue
            trajectory = self.quarantine.admit(record, trainer_version=trainer_version)
            if trajectory is not None:
                yield record, trajectory
        self.quarantine.forget(request.lineage.rollout_id for request in requests)

    def prompt(self, trajectory: Trajectory) -> str:
        """The text of the tokens before the first sampled one, as the model saw it."""
        ids = trajectory.token_ids[: int(trajectory.sampled.argmax())].tolist()
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def response(self, trajectory: Trajectory) -> str:
        """The sampled text, without the token that ended it."""
        ids = trajectory.token_ids[trajectory.sampled].tolist()
        if ids and ids[-1] in self.ends:
            ids.pop()
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def sampling_params(config: RolloutConfig, seed: int) -> SamplingParams:
    """The sampling distribution of training rollouts."""
    return SamplingParams(config.temperature, config.top_p, config.top_k, config.min_p, seed)


GREEDY = SamplingParams(temperature=0.0)


def in_request_order(trajectories: Sequence[Trajectory], requests: Sequence[RolloutRequest]) -> list[Trajectory]:
    """Sorted as they were asked for, so that what follows does not depend on who finished first."""
    order = {request.lineage.rollout_id: i for i, request in enumerate(requests)}
    return sorted(trajectories, key=lambda trajectory: order[trajectory.lineage.rollout_id])


def with_advantages(trajectories: Sequence[Trajectory], algorithm: Algorithm) -> list[TrainSample]:
    """Advantages of each trajectory within its group, on its sampled tokens."""
    groups = {group: i for i, group in enumerate(dict.fromkeys(t.lineage.group_id for t in trajectories))}
    batch = RewardedBatch(
        rewards_B=torch.tensor([t.rewards["reward"] for t in trajectories], dtype=torch.float32),
        group_index_B=torch.tensor([groups[t.lineage.group_id] for t in trajectories]),
        num_tokens_B=torch.tensor([t.num_sampled for t in trajectories]),
        truncated_B=torch.tensor([t.finish_reason is FinishReason.LENGTH for t in trajectories]),
    )
    advantages_B = algorithm.compute_advantages(batch).tolist()
    return [
        TrainSample(trajectory, np.where(trajectory.sampled, np.float32(advantage), np.float32(0.0)))
        for trajectory, advantage in zip(trajectories, advantages_B, strict=True)
    ]
