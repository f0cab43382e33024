"""Keys that got another name or place, or came later: the meaning of an older stored run today.

Pure functions over plain data; any process.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from moerl.errors import ConfigError

MOVED = {
    "algorithm.steps": "rl.steps",
    "algorithm.prompts_per_step": "rl.prompts_per_step",
    "algorithm.group_size": "rl.group_size",
    "algorithm.minibatches": "rl.minibatches",
    "algorithm.moe_aux_loss_coef": "rl.moe_aux_loss_coef",
    "weights.roots": "weights.senders",
    "kl.coef": "algorithm.kl_coef",
    "kl.support": "algorithm.kl_support",
}
"""By old dotted path, the new one. The values mean the same, so a run that was stored continues."""

RENAMED = {
    "weights.gather": {"root": "sender"},
    "rollout.placement": {"inside": "controller", "beside": "process", "apart": "disaggregated"},
}
"""By dotted path, the new name of each value that has another one now."""

ADDED: dict[str, Any] = {
    "trainer.command_seconds": 3600.0,
    "trainer.share_prompts": False,
    "trainer.tf32": "on",
    "trainer.profile_steps": [],
    "trainer.megatron": {},
    "algorithm.dual_clip": None,
    "algorithm.overlong_buffer": None,
    "algorithm.overlong_limit": None,
    "algorithm.overlong_factor": 1.0,
    "algorithm.baseline": "mean",
    "algorithm.whiten": False,
    "algorithm.importance": "token",
    "algorithm.importance_floor": 0.0,
    "algorithm.importance_outside": "clip",
    "algorithm.sequence_band": None,
    "algorithm.opsm_delta": None,
    "algorithm.reduction": "token_mean",
    "algorithm.reduction_length": None,
    "algorithm.pass_k": None,
    "algorithm.proximal": "pass",
    "algorithm.entropy_coef": 0.0,
    "algorithm.kl_in": "loss",
    "weights.interrupt": "retract",
    "weights.every": 1,
    "task.reward_workers": 1,
    "rl.filters": [],
    "rl.skip_above": None,
    "rl.skip_below": None,
    "rl.weigh_prompts": "even",
    "rl.keep": None,
    "rl.keep_by": "shortest",
    "trainer.optimizer_offload": 0.0,
    "trainer.sleep": False,
    "rollout.placement": "controller",
    "rollout.record_steps": True,
    "rollout.server_args": {},
    "rollout.expert": 1,
    "buffer.max_staleness": 0,
    "buffer.window": 1,
    "buffer.when_stale": "wait",
    "checkpoint.grace_seconds": None,
    "launch.on": "local",
    "launch.address": None,
    "metrics.sinks": ["jsonl", "tensorboard"],
    "metrics.project": "moerl",
    "evaluation.samples": 0,
    "evaluation.temperature": 1.0,
    "evaluation.top_p": 1.0,
    "task.thinking_end": None,
}
"""Keys that older runs lack, with the values by which these runs behave as they did."""
_NEW_SECTIONS = ("buffer", "launch", "metrics")
_ONLY_WHERE = {
    "task": ("name", "jsonl"),
    "task.thinking_end": ("name", "dataset"),
    "rollout": ("engine", "embedded"),
    "rollout.server_args": ("engine", "sglang"),
    "rollout.expert": ("engine", "sglang"),
    "algorithm": ("name", "grpo"),
}
"""By added key, or by section, the key of the section and its value that the addition is for."""


def moved_key(path: str) -> ConfigError | None:
    """Returns the error for an old key, or for a section all of whose keys have moved; None for anything else."""
    moved = {old: new for old, new in MOVED.items() if old == path or old.startswith(f"{path}.")}
    if not moved:
        return None
    return ConfigError(
        f"{path}: has another name now",
        expected=", ".join(moved.values()),
        remedy="set " + " ".join(f"{new}=VALUE" for new in moved.values()),
    )


def as_of_today(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a stored run, with today's names of keys and the older behaviour for keys that it lacks."""
    values = {name: dict(value) if isinstance(value, Mapping) else value for name, value in stored.items()}
    for old, new in MOVED.items():
        (old_section, old_name), (new_section, new_name) = old.split("."), new.split(".")
        section = values.get(old_section)
        if not isinstance(section, dict) or old_name not in section:
            continue
        values.setdefault(new_section, {})[new_name] = section.pop(old_name)
        if not section:
            del values[old_section]
    for path, names in RENAMED.items():
        section_name, name = path.split(".")
        section = values.get(section_name)
        if isinstance(section, dict) and section.get(name) in names:
            section[name] = names[section[name]]
    for section_name in _NEW_SECTIONS:
        values.setdefault(section_name, {})
    for path, value in ADDED.items():
        section_name, name = path.split(".")
        section = values.get(section_name)
        key, wanted = _ONLY_WHERE.get(path) or _ONLY_WHERE.get(section_name, ("", None))
        if isinstance(section, dict) and section.get(key) == wanted:
            section.setdefault(name, deepcopy(value))
    return values
