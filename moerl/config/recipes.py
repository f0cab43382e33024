"""Groups and keys that a recipe sets, in a few lines: shown when a run starts, by ``--show-config`` and by
`moerl launch slurm --dry-run`. Torch-free.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moerl.config.compose import DEFAULT_RECIPE, chosen_recipe, override_keys, recipe_values

_WIDTH = 110
_ALWAYS_NAMED = ("model", "task")


def recipe_text(overrides: Sequence[str], config_dir: Path | None, only: Sequence[str] = ()) -> str:
    """Returns the recipe with the groups and keys that it sets beyond the base, and the overrides of the command line.

    Args:
        overrides: of the command line, without ``resume=``. A key that they set is not listed as the recipe's.
        only: keys and sections that matter for the command; empty for all.
    """
    chosen = chosen_recipe(overrides)
    sets = recipe_values(chosen or DEFAULT_RECIPE, config_dir)
    default_groups = recipe_values(DEFAULT_RECIPE).groups
    changed = [key for key in override_keys(overrides) if key != "recipe"]
    groups = [
        f"{group}={option}"
        for group, option in sets.groups.items()
        if (group in _ALWAYS_NAMED or option != default_groups[group]) and group not in changed
    ]
    keys = [
        f"{path}={_value(value)}"
        for path, value in sets.keys.items()
        if not _is_among(path, changed) and (not only or _is_among(path, only))
    ]
    name = chosen or f"{DEFAULT_RECIPE} (default)"
    lines = _wrap(f"recipe {name}:", [*groups, *keys])
    own = [text.lstrip("+") for text in overrides if not text.lstrip("+").startswith("recipe=")]
    return "\n".join([*lines, *(_wrap("command line:", own) if own else [])])


def _is_among(path: str, keys: Sequence[str]) -> bool:
    """Returns whether `keys` have the key, its section, or an entry of the mapping that it holds."""
    return any(path == key or path.startswith(f"{key}.") or key.startswith(f"{path}.") for key in keys)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")


def _wrap(head: str, words: Sequence[str]) -> list[str]:
    text = " ".join([head, *words])
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
