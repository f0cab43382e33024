"""The ports of the loop: small protocols that close the runtime circle without imports between siblings.

Engines, tasks and weight sinks implement these; `moerl/orchestration` wires them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from moerl.contract.trajectory import FinishReason, Lineage, ModelSpec, SamplingParams
from moerl.errors import ContractError, WeightSyncError


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One rollout asked of an engine.

    prompt_ids: token ids, at least one. max_new_tokens: >= 1.
    stop_ids: sampling one of these ends the rollout; it stays in the trajectory.
    """

    lineage: Lineage
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()


class ReportedLayers(StrEnum):
    """Decoder layers of which an engine reports expert ids: all (ids of dense layers mean nothing), or the MoE layers
    alone."""

    ALL = "all"
    MOE = "moe"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's handshake.

    policy_version: -1 before any sync. reported_layers, layer_numbers: which layers the columns of its expert ids are;
    the number is that of the decoder layer, from 0, dense layers counted. captures_*: what its trajectories carry.
    """

    engine_id: str
    spec: ModelSpec
    policy_version: int
    reported_layers: ReportedLayers
    layer_numbers: tuple[int, ...]
    captures_routing: bool = True
    captures_kept_sets: bool = True


@dataclass(slots=True)
class InterruptCosts:
    """Costs of weight updates for sampling, summed up since the engine was made. Sampled tokens are never thrown away.

    interrupted: rollouts under way when an update began. recomputed_tokens: tokens whose keys and values were computed
    again. stalled_seconds: between the last token of the old weights and the first that the new ones could sample.
    """

    interrupted: int = 0
    recomputed_tokens: int = 0
    stalled_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """Record of an engine adapter before the contract has checked it: `Trajectory` field values by name.

    refusal: why an answer could not be read, else None; with a refusal, `values` is what arrived, for the quarantine.
    """

    rollout_id: str
    engine_id: str
    policy_version: int
    values: Mapping[str, Any]
    refusal: ContractError | None = None


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples trajectories and reports the routing and kept set of every token."""

    def handshake(self) -> EngineInfo: ...

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[RolloutRecord]:
        """Yields one record per request, in the order in which they finish."""
        ...

    def abort(self, rollout_ids: Collection[str] | None = None) -> None:
        """Finishes the named requests (all when None) with what they have; reason `abort`."""
        ...

    def close(self) -> None: ...


class WeightSink(Protocol):
    """Receiver of whole sets of HF-named weights: an engine, which the controller begins and ends, or a sender's way to
    an engine.

    Every sender has a sink and calls it from one thread. The sinks of all other senders have ended before that of the
    first one does. A sender's sink that only carries buckets does nothing at begin and end.
    """

    def begin_update(self, version: int) -> None:
        """Opens an update. One that was never ended is forgotten."""
        ...

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Takes one bucket. Its tensors are written over after the call returns."""
        ...

    def end_update(self) -> None:
        """Takes the new version into use; raises `WeightSyncError` where a tensor is missing. Old version stays."""
        ...

    def abandon_update(self) -> None:
        """Instead of `end_update`: forgets what was received, the old version stays. Without an update, nothing."""
        ...


Taken = Callable[[Exception | None], None]
"""Called when an engine holds an update, which was checked if that was asked for; with an error if it does not."""


def check_version(version: int) -> None:
    """Raises `WeightSyncError` if a policy version is none."""
    if version < 0:
        raise WeightSyncError(
            "weight update: policy version", seen=version, expected="at least 0", remedy="number updates from 0 upwards"
        )


def not_taken(seconds: float) -> WeightSyncError:
    """The error of an update that an engine has not taken, and said nothing about for so long."""
    return WeightSyncError(
        "weight update: the engine has not taken the weights",
        seen=f"{seconds:g} s without a sign of it",
        expected="every step within weights.step_seconds",
        remedy="see to the engine (logs/engine.log), and resume the run",
    )


@runtime_checkable
class CheckedSink(WeightSink, Protocol):
    """A sink that can say what it holds, so that an update can be checked."""

    def held_dtypes(self) -> Mapping[str, str]:
        """Names of dtypes (float32, bfloat16) by checkpoint name: what each tensor is cast to when it is taken.

        Asked before an update whose end is followed by `verify` or `abandon_update`.
        """
        ...

    def verify(self, sent: Mapping[str, int]) -> None:
        """Compares `moerl.kernels.checksum` of the tensors in use with those of what was sent, by checkpoint name.

        What holds something else serves nothing until a whole update of it has passed.

        Raises:
            WeightSyncError: the tensors that differ, where nothing is left that serves.
        """
        ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine on the trainer's devices."""

    def sleep(self) -> None:
        """Gives its memory to the trainer until the next update of all weights; nothing is sampled until then."""
        ...


class PolicyEngine(RolloutEngine, CheckedSink, Protocol):
    """An engine whose weights are replaced while it is in use, and which can say what it holds."""

    @property
    def costs(self) -> InterruptCosts: ...


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages that a model's own template turns into the text of a prompt; plain JSON data.

    messages: each with `role` and `content`, and whatever else the template knows. tools: JSON schemas.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem of a task.

    text: what the model continues; empty where it is still to be written from `chat`.
    facts: what its reward needs (the answer, metadata). source: the set that it is of, empty where there is one.
    """

    prompt_id: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    chat: Chat | None = None
    source: str = ""


class Task(Protocol):
    """Prompts and their rewards. A class that names this one as its base inherits what has a body.

    `split` is one of train, dev (looked at while tuning) and heldout (only for final numbers); they are disjoint.

    open_vocabulary: True where the texts may hold any character, False where those of `tokenizer_texts` are all.
    """

    open_vocabulary: bool = True

    def size(self, split: str) -> int:
        """How many prompts a split has."""
        ...

    def prompts(self, split: str, count: int) -> list[Prompt]:
        """The first `count` prompts of a split; deterministic."""
        ...

    def reward(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Future[dict[str, float]]:
        """Asks for the named rewards of a response, and returns at once: sampling goes on meanwhile.

        `reward` is the one trained on, `accuracy` (0 or 1) the one reported. The future raises `RewardError` where this
        response has no reward, `ConfigError` where none can have one. Cancel it where nobody wants it any more.
        """
        ...

    def place(self, prompt: Prompt) -> str:
        """Returns the origin of a prompt for messages: a line of a file, or the prompt's id."""
        return prompt.prompt_id

    def tokenizer_texts(self, count: int) -> list[str]:
        """Texts of the first `count` training prompts: what a tokenizer for a new model is trained on."""
        return [prompt.text for prompt in self.prompts("train", min(count, self.size("train")))]

    def check(self, *, num_demonstrations: int) -> None:
        """Looks at the data once, before a run starts and torch is loaded.

        Args:
            num_demonstrations: training prompts that a cold start will ask demonstrations of; 0 without one.

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
        """Returns what a user should know about the data: sizes, what was left out. One line each."""
        return []

    def close(self) -> None:
        """Ends what the task has started."""
        return


@runtime_checkable
class DemonstrationTask(Task, Protocol):
    """A task that can write demonstrations, for a supervised cold start."""

    def demonstrations(self, prompts: Sequence[Prompt], seed: int) -> list[str]:
        """One response text per prompt (without the end-of-sequence token)."""
        ...


@runtime_checkable
class ChatTask(Task, Protocol):
    """A task that may have prompts of messages, which the model's tokenizer turns into text."""

    @property
    def has_chats(self) -> bool:
        """True if any prompt is made of messages."""
        ...

    def write_prompts(self, write: Callable[[Prompt], Prompt | None]) -> None:
        """Has every prompt written by `write`, once; those of which it makes None are left out.

        Raises:
            ConfigError: as `write` does, with the place of the prompt.
        """
        ...


@runtime_checkable
class WorkedTask(Task, Protocol):
    """A task whose responses may or may not show their work."""

    def work_prefix(self, prompt: Prompt) -> str:
        """Text that, put at the start of a response, makes the model show its work; the honest baseline of a cold
        start that only sometimes does."""
        ...
