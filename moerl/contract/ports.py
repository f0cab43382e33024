"""The ports of the loop: small protocols that close the runtime circle without imports between siblings.

Engines, tasks, scorers and weight sinks implement these; `moerl/orchestration` wires them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moerl.contract.trajectory import FinishReason, Lineage, ModelSpec, SamplingParams, Trajectory
from moerl.contract.weight_update import WeightUpdate
from moerl.errors import ContractError, WeightSyncError


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One rollout asked of an engine."""

    lineage: Lineage
    """Ids of the rollout; its trajectory carries them."""
    prompt_ids: tuple[int, ...]
    """Token ids, at least one."""
    sampling: SamplingParams
    """Parameters for all tokens of the response."""
    max_new_tokens: int
    """>= 1."""
    stop_ids: tuple[int, ...] = ()
    """Token ids; sampling one of these ends the rollout, and it stays in the trajectory."""
    known_rows: int = 0
    """First inputs whose experts the answer leaves out: their rows are zeros and not routed. Fewer than the prompt has
    tokens."""


class ReportedLayers(StrEnum):
    """Decoder layers of which an engine reports expert ids: all (ids of dense layers mean nothing), or the MoE layers
    alone."""

    ALL = "all"
    MOE = "moe"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's handshake."""

    engine_id: str
    """Name of the engine, for records and messages."""
    spec: ModelSpec
    """The engine's model facts."""
    policy_version: int
    """Version of the weights; -1 before any sync."""
    reported_layers: ReportedLayers
    """Decoder layers that the columns of its expert ids stand for."""
    layer_numbers: tuple[int, ...]
    """Number of the decoder layer of each column, from 0, dense layers counted."""


@dataclass(slots=True)
class SamplingCosts:
    """Costs of weight updates for sampling, and what prefix caches spared, summed up since the engine was made. Sampled
    tokens are never thrown away."""

    interrupted: int = 0
    """Rollouts in progress when an update came."""
    recomputed_tokens: int = 0
    """Tokens whose keys and values were computed again."""
    stalled_seconds: float = 0.0
    """Seconds without sampling because of updates."""
    asked_tokens: int = 0
    """Tokens that servers were sent to go on behind: prompts, earlier turns, and what an interrupted request had."""
    cached_tokens: int = 0
    """Tokens of these whose keys and values were in a server's prefix cache."""


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """Record of an engine adapter before the contract has checked it."""

    rollout_id: str
    """Rollout that the record answers."""
    engine_id: str
    """Engine or server that sampled it."""
    policy_version: int
    """Weight version that the adapter states, for the report of a refusal; not checked."""
    values: Mapping[str, Any]
    """`Trajectory` field values by name; with a refusal, the answer as it arrived, for the quarantine."""
    refusal: ContractError | None = None
    """Reason for which the answer could not be read, else None."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples trajectories and reports the routing and kept set of every token."""

    def handshake(self) -> EngineInfo: ...

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[RolloutRecord]:
        """Yields one record per request, in the order in which they finish."""
        ...

    def abort(self, rollout_ids: Collection[str] | None = None) -> None:
        """Finishes the named requests (all when None) with what they have; reason `abort`."""

    def close(self) -> None: ...


class RolloutStream(Protocol):
    """Requests that are sampled together though they come one after another; an iterator over lists of records.

    One thread iterates it, and may have to: an engine in the same process samples there. Each request yields one
    record; that of a rollout aborted before its first token has the refusal `nothing_sampled`.
    """

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Adds requests, from any thread. An empty sequence has the iterator yield, if only an empty list.

        Raises:
            EngineError: a request is refused, or the engine has no weights.
        """

    def end(self) -> None:
        """Says, from any thread, that no more requests will come: the iterator ends behind the last record."""

    def __iter__(self) -> Iterator[list[RolloutRecord]]:
        """Yields the records that have come since the last time; may be none."""
        ...

    def close(self) -> None:
        """Gives up the requests that are not answered. Called by the thread that iterates."""


@runtime_checkable
class StreamingEngine(RolloutEngine, Protocol):
    """An engine whose requests may come while others are sampled: the turns of episodes."""

    def stream(self) -> RolloutStream: ...


class WeightSink(Protocol):
    """Receiver of updates of HF-named weights: an engine, which the controller begins and ends, or a sender's way to an
    engine.

    Every sender has a sink and calls it from one thread. The first sender's sink ends after the sinks of all other
    senders. A sender's sink that only carries buckets does nothing at begin and end.
    """

    def begin_update(self, update: WeightUpdate) -> None:
        """Opens an update, and forgets one that was never ended. An engine that does not hold the tensors which the
        update's kind requires raises `WeightSyncError`, here or at the first of the calls below."""

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Takes in one bucket. The sender overwrites its tensors after the call returns. Raises `WeightSyncError` for a
        tensor that the update does not list, or that came before."""

    def end_update(self) -> None:
        """Puts the new version into use. Raises `WeightSyncError` if a tensor of the update's list is missing; the old
        version stays then."""

    def abandon_update(self) -> None:
        """Forgets what was received, in place of `end_update`; the old version stays. Does nothing without an
        update."""


UpdateDone = Callable[[Exception | None], None]
"""Callback: called with None when an engine holds an update, checked if that was asked for; else with an error."""


def update_overdue(seconds: float) -> WeightSyncError:
    """Returns the error of an update that an engine did not put into use, and about which it sent nothing for so many
    seconds."""
    return WeightSyncError(
        "weight update: the engine has not taken the weights",
        seen=f"{seconds:g} s without a sign of it",
        expected="every step within weights.step_seconds",
        remedy="see to the engine (logs/engine.log), and resume the run",
    )


@runtime_checkable
class CheckedSink(WeightSink, Protocol):
    """A sink that can report the tensors it holds, so that an update can be checked."""

    def held_dtypes(self) -> Mapping[str, str]:
        """Returns names of dtypes (float32, bfloat16) by checkpoint name: what each tensor is cast to when it is
        received.

        Called before an update whose end is followed by `verify` or `abandon_update`.
        """
        ...

    def verify(self, sent: Mapping[str, int]) -> None:
        """Compares `moerl.kernels.checksum` of the tensors in use with those of what was sent, by checkpoint name.

        An engine, or one server of it, whose tensors differ serves nothing until a whole update of it has passed.

        Raises:
            WeightSyncError: names the tensors that differ, if nothing is left that serves.
        """


@runtime_checkable
class Sleeper(Protocol):
    """An engine on the trainer's devices."""

    def sleep(self) -> None:
        """Gives the engine's memory to the trainer until the next update of all weights; nothing is sampled until
        then."""


class PolicyEngine(StreamingEngine, CheckedSink, Protocol):
    """An engine whose weights are replaced while it is in use, and which can report the tensors it holds."""

    @property
    def costs(self) -> SamplingCosts: ...


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages that a model's own template turns into the text of a prompt; plain JSON data."""

    messages: tuple[Mapping[str, Any], ...]
    """Each with `role` and `content`, and whatever else the template knows."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of tools for the template."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem of a task."""

    prompt_id: str
    """Id of the prompt, as in `Lineage`."""
    text: str
    """Text that the model continues; empty if it is still to be written from `chat`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Data for its reward (the answer, metadata)."""
    chat: Chat | None = None
    """Messages that the text is written from; None without any."""
    source: str = ""
    """Name of the set that the prompt is of; empty if there is only one."""
    prefix: str = ""
    """Text behind `text` that counts as the start of the response; empty if the model begins it."""


class Task(Protocol):
    """Prompts and their rewards. A class that names this one as its base inherits the methods that have a body.

    `split` is one of train, dev (looked at while tuning) and heldout (only for final numbers); they are disjoint.
    """

    open_vocabulary: bool = True
    """True if the texts may hold any character, False if those of `tokenizer_texts` are all."""

    def size(self, split: str) -> int:
        """Returns the number of prompts of a split."""
        ...

    def prompts(self, split: str, count: int) -> list[Prompt]:
        """Returns the first `count` prompts of a split; deterministic."""
        ...

    def reward(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Future[dict[str, float]]:
        """Asks for the named rewards of a response, and returns at once: sampling goes on meanwhile.

        `reward` is the one trained on, `accuracy` (0 or 1) the one reported. The future raises `RewardError` if this
        response has no reward, `ConfigError` if none can have one. Cancel the future if nobody wants it any more.
        """
        ...

    def place(self, prompt: Prompt) -> str:
        """Returns the origin of a prompt for messages: a line of a file, or the prompt's id."""
        return prompt.prompt_id

    def tokenizer_texts(self, count: int) -> list[str]:
        """Returns the texts of the first `count` training prompts, on which a tokenizer for a new model is trained."""
        return [prompt.text for prompt in self.prompts("train", min(count, self.size("train")))]

    def check(self, *, num_demonstrations: int) -> None:
        """Looks at the data once, before a run starts and torch is loaded.

        Args:
            num_demonstrations: training prompts that a cold start will ask demonstrations for; 0 without a cold start.

        Raises:
            ConfigError: A demonstration is missing, or there are no prompts.
        """
        return

    def try_rewards(self) -> None:
        """Asks for the rewards of one response, before a run starts and torch is loaded.

        Raises:
            ConfigError: A reward fails.
        """
        return

    def notes(self) -> list[str]:
        """Returns notes for the user about the data: sizes, prompts that were left out. One line each."""
        return []

    def close(self) -> None:
        """Ends the processes that the task has started."""
        return


@runtime_checkable
class DemonstrationTask(Task, Protocol):
    """A task that can write demonstrations, for a supervised cold start."""

    def demonstrations(self, prompts: Sequence[Prompt], seed: int) -> list[str]:
        """Returns one response text per prompt (without the end-of-sequence token)."""
        ...


@runtime_checkable
class ChatTask(Task, Protocol):
    """A task that may have prompts of messages, which the model's tokenizer turns into text."""

    @property
    def has_chats(self) -> bool:
        """True if any prompt is made of messages."""
        ...

    def write_prompts(self, write: Callable[[Prompt], Prompt | None]) -> None:
        """Replaces every prompt by what `write` returns for it, once; drops prompts for which it returns None.

        Raises:
            ConfigError: as `write` does, with the place of the prompt.
        """


@runtime_checkable
class WorkedTask(Task, Protocol):
    """A task whose responses may or may not show their work."""

    def work_prefix(self, prompt: Prompt) -> str:
        """Returns text that, put at the start of a response, makes the model show its work; the honest baseline of a
        cold start that only sometimes does."""
        ...


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
