"""Keys that have got another name or place: refused with the new one, read in the configuration of a stored run.

Pure functions over plain data; any process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moerl.errors import ConfigError

MOVED = {
    "algorithm.steps": "rl.steps",
    "algorithm.prompts_per_step": "rl.prompts_per_step",
    "algorithm.group_size": "rl.group_size",
    "algorithm.minibatches": "rl.minibatches",
    "algorithm.moe_aux_loss_coef": "rl.moe_aux_loss_coef",
    "kl.coef": "algorithm.kl_coef",
    "kl.support": "algorithm.kl_support",
}
"""By dotted path of before, the dotted path of now. The values mean the same, so a run that was stored continues."""


def moved_key(path: str) -> ConfigError | None:
    """The error for a key of before, or for a section all of whose keys have moved; None for anything else."""
    moved = {old: new for old, new in MOVED.items() if old == path or old.startswith(f"{path}.")}
    if not moved:
        return None
    return ConfigError(
        f"{path}: has another name now",
        expected=", ".join(moved.values()),
        remedy="set " + " ".join(f"{new}=VALUE" for new in moved.values()),
    )


def with_moved_keys(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a stored run with every key of before under its name of now; sections left empty are gone."""
    values = {name: dict(value) if isinstance(value, Mapping) else value for name, value in stored.items()}
    for old, new in MOVED.items():
        (old_section, old_name), (new_section, new_name) = old.split("."), new.split(".")
        section = values.get(old_section)
        if not isinstance(section, dict) or old_name not in section:
            continue
        values.setdefault(new_section, {})[new_name] = section.pop(old_name)
        if not section:
            del values[old_section]
    return values
