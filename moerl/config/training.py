"""The section `trainer`: the parts of a training step, and its arithmetic. Read by every process."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from moerl.errors import ConfigError
from moerl.sections import Count, CountOrZero, PassedOn, Positive, Section, Share


def bare_off(value: object) -> object:
    """Returns what a bare ``off`` means if ``off`` is an option; YAML reads it as false."""
    return "off" if value is False else value


def bare_on_off(value: object) -> object:
    """Returns what a bare ``on`` or ``off`` means if both are options; YAML reads them as true and false."""
    return "on" if value is True else bare_off(value)


class TrainerConfig(Section):
    """Settings of a training step."""

    microbatch_tokens: Count = Field(description="Most tokens packed into one forward pass.")
    share_prompts: Literal["auto"] | bool = Field(
        description="The prompt of a group is computed once, and its responses go on from it, as far as tokens and"
        " recorded experts are the same; so do forks of an episode's session from its turns, and the texts of a"
        " supervised batch from what all of them begin with. auto = if the attention"
        " can: on CPUs, not on GPUs. The load-balancing loss counts such rows once."
    )
    recompute: Literal["none", "selective", "full"] = Field(
        description="Activations computed again in the backward pass to save memory."
    )
    distributed_optimizer: Annotated[Literal["off", "on", "overlap"], BeforeValidator(bare_off)] = Field(
        description="on = data-parallel ranks share optimizer state and master weights; overlap = the same, and"
        " gradient reduction and weight gathering overlap with computation; the head's gradient then takes memory."
    )
    optimizer_offload: Share = Field(
        description="Share of the optimizer state (master weights and Adam's moments) that lies in host memory; the"
        " update fetches it piece by piece. Needs a distributed optimizer. The digits do not change."
    )
    sleep: bool = Field(
        description="While colocated servers sample, the trainer's weights lie in host memory; they come back for each"
        " step. The digits do not change."
    )
    train_router: bool = Field(description="False freezes the routers' weights.")
    expert_bias: Literal["frozen", "update"] = Field(
        description="What happens to the expert bias of models that have one (DeepSeek-V3, GLM-4.5): kept as loaded, or"
        " moved towards even load after each optimizer step."
    )
    deterministic: bool = Field(description="Use deterministic kernels only; slower on GPUs, no effect on a CPU.")
    tf32: Annotated[Literal["on", "off"], BeforeValidator(bare_on_off)] = Field(
        description="Products of float32 numbers on a GPU: on = of numbers rounded to 10 bits (TF32), several times as"
        " fast; off = exact products, for checks. No effect on model.dtype=bfloat16 or a CPU."
    )
    max_skipped_updates: CountOrZero = Field(
        description="Optimizer steps in a row that may be skipped because the gradient is not finite; one more stops"
        " the run."
    )
    command_seconds: Positive = Field(
        description="Longest time that ranks in processes of their own may take for one command, such as a step or a"
        " checkpoint; after it the run ends with an error that names the silent rank."
    )
    profile_steps: list[Count] = Field(
        description="Steps of reinforcement learning of which rank 0 writes a trace into profile/ of the run directory;"
        " [] = none."
    )
    megatron: PassedOn = Field(
        description="Settings of Megatron-Bridge's provider (Megatron's TransformerConfig) that have no key here, by"
        " name: {NAME: VALUE}. Not checked by moerl."
    )

    def check(self, *, steps: int, is_colocated: bool) -> None:
        """Checks rules between its keys, and against other sections. Raises `ConfigError`.

        Args:
            steps: of reinforcement learning.
            is_colocated: servers of the run are on the trainer's devices.
        """
        if self.sleep and not is_colocated:
            raise ConfigError(
                "trainer.sleep: no server samples on the trainer's devices meanwhile",
                seen="sleep = true, servers elsewhere",
                expected="rollout.placement = colocated",
                remedy="set trainer.sleep=false, or rollout=sglang rollout.placement=colocated",
            )
        if self.optimizer_offload and self.distributed_optimizer == "off":
            raise ConfigError(
                "trainer.optimizer_offload: every rank would keep the state of all replicas in host memory",
                seen=f"optimizer_offload = {self.optimizer_offload:g}, distributed_optimizer = off",
                expected="trainer.distributed_optimizer = on or overlap",
                remedy="set trainer.distributed_optimizer=on, also with one rank, or trainer.optimizer_offload=0",
            )
        beyond = [step for step in self.profile_steps if step > steps]
        if beyond:
            raise ConfigError(
                "trainer.profile_steps: no such step",
                seen=beyond[0],
                expected=f"at most rl.steps = {steps}",
                remedy="lower trainer.profile_steps or raise rl.steps",
            )

    def check_for_gpus(self) -> None:
        """Checks what holds if the trainer is on GPUs. Raises `ConfigError`."""
        if self.share_prompts is True:
            raise ConfigError(
                "trainer.share_prompts: prompts cannot be shared on a GPU, whose attention is Transformer Engine's",
                seen="true",
                expected="auto or false",
                remedy="set trainer.share_prompts=auto",
            )
