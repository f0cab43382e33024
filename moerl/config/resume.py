"""Keys that may change when a run goes on, and why others may not. Torch-free; controller.

A key may change if it decides how long a run is, how it is watched and kept, or how fast it works: other parallel
sizes, microbatches, threads and servers change the weights by rounding alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.config.reference import children, leaves, sections
from moerl.config.schema import OptimizerConfig
from moerl.errors import ConfigError
from moerl.sections import Section
from moerl.tasks.registry import TASK_SECTIONS

_LOSS = "the loss would change in the middle of a run"
_SAMPLES = "what is sampled would change in the middle of a run"
_MAY_CHANGE = {
    *("num_threads", "parallel", "buffer", "weights", "evaluation", "checkpoint", "mismatch", "dump", "quarantine"),
    *("launch", "metrics", "rl.steps", "sft.steps", "keep_routing.verify"),
    *("trainer.microbatch_tokens", "trainer.recompute", "trainer.optimizer_offload", "trainer.sleep"),
    *("trainer.deterministic", "trainer.tf32", "trainer.max_skipped_updates", "trainer.command_seconds"),
    *("trainer.profile_steps", "rollout.max_running", "rollout.max_new_tokens", "rollout.start_seconds"),
    *("rollout.response_seconds", "rollout.probe_seconds", "rollout.servers", "rollout.environment", "rollout.tensor"),
    *("rollout.expert", "rollout.max_pool_tokens", "rollout.memory_share", "rollout.server", "rollout.server_args"),
    *("rollout.placement", "rollout.record_steps"),
    *(f"task.{name}" for section in TASK_SECTIONS for name in section.may_change),
}
"""Keys and sections that may change. A key goes before its section."""
_WHY_NOT = {
    "recipe": "the run has taken its values; give the keys that you mean",
    "seed": "weights, the order of prompts and the draws follow from it",
    "run_dir": "a run goes on in its directory; move that, and give its new place as resume=DIR",
    "model": "the checkpoints hold weights and optimizer state of this model, in this precision",
    "trainer": _LOSS,
    "trainer.megatron": "moerl does not know whether the loss would change in the middle of a run",
    "trainer.distributed_optimizer": "the checkpoints hold the optimizer state in the form that it asks for",
    "optimizer": "the optimizer state and the learning-rate schedule belong to it",
    "rl": _LOSS,
    "rl.prompts_per_step": "which prompts come next is counted in batches of it",
    "rl.group_size": "advantages are relative to the group, and would not compare with those before",
    "rl.minibatches": "the learning-rate schedule counts its updates",
    "algorithm": _LOSS,
    "rollout": "another engine needs other keys, and rounds differently",
    "rollout.path": "which groups come next is counted in these dumps",
    **dict.fromkeys(("rollout.dtype", "rollout.temperature", "rollout.top_p", "rollout.top_k"), _SAMPLES),
    "rollout.min_p": _SAMPLES,
    "keep_routing": _LOSS,
    "keep_sampling_mask": _LOSS,
    "sft": "the order of demonstrations and the optimizer state of the cold start follow from it",
    "task": "problems and rewards follow from it",
    "episode": "what is trained on follows from its limits",
    "scorers": "what is trained on follows from their numbers",
}
"""By any other key or section, why it may not change."""


def reason_against(key: str, command: str) -> str | None:
    """Returns why `key` may not change when a run of `command` goes on; None if it may."""
    if key == "sft.steps" and command == "train":
        return "reinforcement learning starts from the cold start as it was planned"
    while key not in _WHY_NOT and key not in _MAY_CHANGE:
        key = key.rpartition(".")[0]
    return _WHY_NOT.get(key)


def check_may_change(key: str, text: str, command: str, run_dir: Path) -> None:
    """Raises `ConfigError` if a known `key` may not change when a run goes on. text: its override, for the message."""
    reason = reason_against(key, command)
    if reason is None and key not in sections():
        return
    if reason is None:
        raise ConfigError(
            f"{key}: a run that goes on takes single keys",
            seen=text,
            expected="KEY=VALUE",
            remedy=f"give its keys one by one, for example {key}.{children(key)[0]}=VALUE",
        )
    raise ConfigError(
        f"{key}: cannot change when a run goes on: {reason}",
        seen=text,
        expected="the value that the run has",
        remedy="leave it away; to start a new run from these weights, write them with"
        f" `moerl export {run_dir} --output DIR` and add model=pretrained model.path=DIR",
    )


@dataclass(frozen=True, slots=True)
class Change:
    """A key that has another value than before."""

    key: str
    """Dotted path."""
    old: Any
    """Value before, as plain data; None if the run did not have the key."""
    new: Any
    """Value now, as plain data; None if the key is gone."""


def changed_keys(before: Section, now: Section) -> list[Change]:
    """Returns the keys of two configurations whose values differ, in the order of the schema."""
    dumps = (leaves(section.model_dump(mode="json")) for section in (before, now))
    old, new = ({key: value for key, value in each if value != {}} for each in dumps)
    return [Change(key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)]


def change_note(change: Change, optimizer: OptimizerConfig, of_sft: OptimizerConfig) -> str:
    """Returns what else a change brings with it; an empty text if it brings nothing.

    Args:
        optimizer, of_sft: sections `optimizer` and `sft.optimizer`, with the change.
    """
    schedules = {"rl.steps": ("optimizer", optimizer), "sft.steps": ("sft.optimizer", of_sft)}
    section, changed = schedules.get(change.key, ("", None))
    if changed is None or changed.schedule == "constant":
        return ""
    return (
        f"{section}.schedule={changed.schedule} is stretched: from here on the learning rate is that of a run of"
        f" {change.new} steps"
    )
