"""The sections `rollout`: the engine that samples, its place, and its settings; and `episode`: limits of episodes, and
what becomes of those that reach one or fail. Read by every process."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from moerl.contract.trajectory import MAX_KEPT_IDS
from moerl.sections import Count, Decay, FilePath, NonNegative, PassedOn, Positive, Ranks, SamplerFloatName, Section

CPU_POOL_TOKENS = 65536
"""Tokens in the pool of a server on a CPU if `rollout.max_pool_tokens` is null."""


class SamplingConfig(Section):
    """Settings of sampling on every engine."""

    has_engine: ClassVar[bool] = True
    """True if an engine samples; False if rollouts are read from dumps."""

    dtype: SamplerFloatName = Field(
        description="Precision; on a CPU rounded to. float8: embedded engine alone, emulated."
    )
    max_running: Count = Field(description="Responses sampled side by side.")
    max_new_tokens: Count = Field(description="Longest response in tokens.")
    temperature: NonNegative = Field(description="Sampling temperature; training needs more than 0.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(description="Nucleus probability mass; 1 = no cut.")
    top_k: Annotated[int, Field(ge=1, le=MAX_KEPT_IDS)] | None = Field(
        description=f"Largest kept set; null = {MAX_KEPT_IDS} if top_p or min_p cut, else everything."
    )
    min_p: Decay = Field(description="Least probability of a kept token, as a share of the most likely token's.")

    @property
    def is_colocated(self) -> bool:
        """True if servers of the run take turns with the trainer on its devices."""
        return False

    @property
    def num_servers(self) -> int:
        """Number of servers that sample."""
        return 0

    @property
    def keeps_weight_copy(self) -> bool:
        """True if ranks keep a copy of the weights, for servers that come while the trainer is at work."""
        return False


class EmbeddedRolloutConfig(SamplingConfig):
    """An engine on transformers, in the controller's process or in its own."""

    engine: Literal["embedded"] = Field(description="Engine that samples.")
    placement: Literal["controller", "process"] = Field(
        description="controller = in the controller's process, in turns with it; process = in a process of its own,"
        " which samples while the trainer works."
    )
    record_steps: bool = Field(
        description="On a GPU decoding steps are recorded as CUDA graphs, and replayed; false = slower, to look for"
        " faults. No effect on a CPU."
    )


class ServedRolloutConfig(SamplingConfig):
    """Keys of all servers, whoever starts them."""

    kind: ClassVar[str]
    """Kind of the servers, in `moerl.rollout.server_kinds`."""
    starts_servers: ClassVar[bool] = True
    """True if the run starts its servers, with the weights of its model; False if others do."""

    start_seconds: Positive = Field(description="Longest time until a server is ready.")
    response_seconds: Positive = Field(description="Longest time from asking for a response to having it.")
    probe_seconds: Positive = Field(
        description="A server that has requests and is silent for this long must sample one token within the same time;"
        " after four failed probes it is replaced."
    )

    @property
    def keeps_weight_copy(self) -> bool:
        """Returns False only for a single server that others started: a run that loses it cannot go on. A server that
        the run starts again needs the weights while the trainer is at work."""
        return self.starts_servers or self.num_servers > 1


class SGLangRolloutConfig(ServedRolloutConfig):
    """SGLang servers that the run starts, watches and stops."""

    kind: ClassVar[str] = "sglang"
    """SGLang."""
    engine: Literal["sglang"] = Field(description="Engine that samples.")
    placement: Literal["disaggregated", "colocated"] = Field(
        description="disaggregated = each server has GPUs (on CPU: cores) of its own, the last ones of the machine;"
        " colocated = servers are on the trainer's GPUs, from the first one on, and give their memory back while it"
        " works."
    )
    servers: Ranks = Field(description="Servers side by side.")
    environment: FilePath = Field(
        description="Server's environment, made by `moerl sglang install`; decides the device."
    )
    tensor: Ranks = Field(description="Tensor-parallel ranks of a server, all on one machine.")
    expert: Ranks = Field(
        description="Groups of a server's ranks that share its experts: each has some of them, cut over the group's"
        " ranks. 1 = every rank has a part of every expert."
    )
    max_pool_tokens: Count | None = Field(
        description="Tokens in a server's key-value pool; null = as memory allows, 65536 on CPU."
    )
    memory_share: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        description="Share of a GPU's memory for a server's weights and key-value pool; null = SGLang's own choice,"
        " which leaves little to a colocated trainer."
    )
    server_args: PassedOn = Field(
        description="Arguments of SGLang's servers that have no key here, by name with underscores: {NAME: VALUE}. Not"
        " checked by moerl."
    )

    @property
    def num_servers(self) -> int:
        return self.servers

    @property
    def is_colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def own_devices(self) -> int:
        """Devices (on CPU: cores) that the servers have for themselves."""
        return 0 if self.is_colocated else self.servers * self.tensor


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


class ServerRolloutConfig(ServedRolloutConfig):
    """Servers that `moerl serve` runs."""

    kind: ClassVar[str] = "sglang"
    """SGLang."""
    starts_servers: ClassVar[bool] = False
    """False: `moerl serve` starts them."""
    engine: Literal["sglang_server"] = Field(description="Engine that samples.")
    server: Annotated[list[FilePath], BeforeValidator(_as_list), Field(min_length=1)] = Field(
        description="Their server.json files (address and keys): one, or [A,B,...]."
    )

    @property
    def num_servers(self) -> int:
        return len(self.server)


class DumpsRolloutConfig(SamplingConfig):
    """Rollouts read from dumps; no engine is started.

    `temperature`, `top_p`, `top_k` and `min_p` are those of responses whose dump says nothing of them. The other keys
    of sampling are those of the recipe, and have no effect.
    """

    has_engine: ClassVar[bool] = False
    """False: rollouts are read from dumps."""
    engine: Literal["dumps"] = Field(description="Engine that samples; dumps = none.")
    path: FilePath = Field(
        description="Dumps to train from: a run directory, a directory of files of one format, or a file."
    )


RolloutConfig = Annotated[
    EmbeddedRolloutConfig | SGLangRolloutConfig | ServerRolloutConfig | DumpsRolloutConfig,
    Field(discriminator="engine"),
]


class EpisodeConfig(Section):
    """Limits of episodes, all of their sessions together, and what becomes of episodes that reach one or fail."""

    max_turns: Count | None = Field(default=None, description="Most turns that the policy samples; null = no limit.")
    max_tokens: Count | None = Field(
        default=None,
        description="Sampled tokens from which on no other turn begins; null = no limit but those of each session,"
        " rollout.max_new_tokens.",
    )
    max_calls: Count | None = Field(
        default=None, description="Most calls of tools; with one more no other turn begins; null = no limit."
    )
    max_seconds: Positive | None = Field(
        default=None, description="Seconds of an episode from which on no other turn begins; null = no limit."
    )
    when_limited: Literal["train", "filter", "refuse"] = Field(
        default="train",
        description="What becomes of an episode that a limit kept from another turn: it is trained on with the rewards"
        " that it ends with; left out (filtered in the ledger, episode_limited); or refused (quarantined).",
    )
    when_failed: Literal["refuse", "filter"] = Field(
        default="refuse",
        description="What becomes of an episode whose environment fails: refused (quarantined, which counts for"
        " quarantine.max_rate), or left out (filtered in the ledger, episode_failed).",
    )
