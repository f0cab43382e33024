"""Config groups and keys as texts for people: as ``--help`` lists them, and those that a recipe sets, which are shown
when a run starts, by ``--show-config`` and by `moerl launch slurm --dry-run`. Torch-free."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from moerl.config.compose import (
    CONFIGS,
    DEFAULT_RECIPE,
    chosen_recipe,
    compose_values,
    config_groups,
    parse_override,
    recipe_values,
)
from moerl.config.reference import CHOICES, ConfigKey, config_keys

WIDTH = 110
_KEY_WIDTH = 46
_REQUIRED = "???"
_ALWAYS_NAMED = ("model", "task")
RESUME_TEXT = (
    "  On the command of a run that exists: resume=RUN_DIR goes on from its last checkpoint. rl.steps may\n"
    "  be raised then, and what decides how a run is watched, kept and laid out may change; the rest says why not.\n"
    "  run_dir=DIR resume=auto goes on with the run in DIR, or starts it if there is none."
)


def groups_text(config_dir: Path | None = None, keys: Sequence[str] = ()) -> str:
    """Lists config groups with their options, the default one first and marked, and what each option is.

    Args:
        keys: keys and sections whose groups are listed, and the recipes, in a line each; empty lists every group.
    """
    lines = ["config groups (GROUP=OPTION; an option sets many keys at once):"]
    entries = yaml.safe_load((CONFIGS / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    defaults = {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}
    wanted = {"recipe", *(key.partition(".")[0] for key in keys)}
    for group, options in config_groups(config_dir).items():
        default = defaults.get(group)
        first = [*(option for option in options if option == default), *(each for each in options if each != default)]
        marked = {option: option + " (default)" * (option == default) for option in first}
        if keys and group in wanted:
            lines.append(f"    {group}={' | '.join(marked.values())}")
        for option in () if keys else first:
            lines += _entry(f"{group}={marked[option]}", _first_comment(group, option, config_dir))
    lines.append("  --config-dir DIR adds options of your own: DIR/recipe/mine.yaml becomes recipe=mine")
    return "\n".join(lines)


def keys_text(keys: Sequence[str] = ()) -> str:
    """Lists keys with their default values, types and meanings, by section.

    Args:
        keys: keys and sections to list; empty lists every key.
    """
    composed = compose_values([])
    lines = ["keys (KEY=VALUE; shown with the value they have when nothing else is said):"]
    section = None
    for key in config_keys():
        if keys and not any(key.path == wanted or key.path.startswith(f"{wanted}.") for wanted in keys):
            continue
        heading = _heading(key)
        if heading != section:
            lines += ["", f"  {heading}"]
            section = heading
        lines += _entry(f"{key.path}={_default(key, composed)}", f"{key.type_name}. {key.description}")
    return "\n".join(lines)


def first_keys_text(keys: Sequence[str]) -> str:
    """Lists keys with their default values, a line each; meanings are cut to fit the line."""
    composed = compose_values([])
    known = {key.path: key for key in config_keys()}
    lines = ["first keys (KEY=VALUE; shown with the value they have when nothing else is said):"]
    for path in keys:
        meaning = textwrap.shorten(known[path].description, WIDTH - _KEY_WIDTH - 4, placeholder=" ...")
        lines += _entry(f"{path}={_default(known[path], composed)}", meaning)
    return "\n".join(lines)


def _heading(key: ConfigKey) -> str:
    choice = _choice(key)
    if choice is not None and choice != "embedded":
        section, _, _ = key.path.partition(".")
        return f"{section}={choice}" + (", besides the keys of rollout=embedded" if section == "rollout" else "")
    return key.path.rpartition(".")[0] or "run"


def _choice(key: ConfigKey) -> str | None:
    """Finds the first kind of a section that has the key; None if the section does not come in several kinds."""
    names = (name for choices in CHOICES.values() for name, owner in choices.items() if owner == key.owner)
    return next(names, None)


def _default(key: ConfigKey, composed: dict[str, Any]) -> str:
    values: Any = composed
    path = key.path
    choice = _choice(key)
    if choice is not None:
        section, _, path = path.partition(".")
        values = composed[section]
        if path not in values:
            values = yaml.safe_load((CONFIGS / section / f"{choice}.yaml").read_text(encoding="utf-8"))
    for part in path.split("."):
        values = values[part]
    if values == _REQUIRED:
        return "(you must give it)"
    return _text(values)


def _first_comment(group: str, option: str, config_dir: Path | None) -> str:
    """Returns the first comment line of an option's file that is not a Hydra directive; empty if there is none."""
    folders = [CONFIGS] if config_dir is None else [CONFIGS, config_dir]
    path = next(path for path in (folder / group / f"{option}.yaml" for folder in folders) if path.is_file())
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ")
    return ""


def _entry(head: str, text: str) -> list[str]:
    """Returns the lines of an entry in two columns; a head that is too long gets a line of its own."""
    indent = " " * (_KEY_WIDTH + 4)
    wrapped = textwrap.wrap(text, WIDTH - len(indent)) or [""]
    if len(head) > _KEY_WIDTH:
        return [f"    {head}", *(f"{indent}{line}" for line in wrapped)]
    return [f"    {head:<{_KEY_WIDTH}}{wrapped[0]}".rstrip(), *(f"{indent}{line}" for line in wrapped[1:])]


def recipe_text(overrides: Sequence[str], config_dir: Path | None, only: Sequence[str] = ()) -> str:
    """Returns the recipe with the groups and keys that it sets beyond the base, and the overrides of the command line.

    Args:
        overrides: of the command line, without ``resume=``. A key that they set is not listed as the recipe's.
        only: keys and sections that matter for the command; empty for all.
    """
    chosen = chosen_recipe(overrides)
    recipe_groups, recipe_keys = recipe_values(chosen or DEFAULT_RECIPE, config_dir)
    default_groups, _ = recipe_values(DEFAULT_RECIPE)
    changed = [parsed.key for parsed in map(parse_override, overrides) if parsed.key != "recipe"]
    groups = [
        f"{group}={option}"
        for group, option in recipe_groups.items()
        if (group in _ALWAYS_NAMED or option != default_groups[group]) and group not in changed
    ]
    keys = [
        f"{path}={_text(value)}"
        for path, value in recipe_keys.items()
        if not _is_among(path, changed) and (not only or _is_among(path, only))
    ]
    name = chosen or f"{DEFAULT_RECIPE} (default)"
    lines = _wrap(f"recipe {name}:", [*groups, *keys])
    own = [text.lstrip("+") for text in overrides if not text.lstrip("+").startswith("recipe=")]
    return "\n".join([*lines, *(_wrap("command line:", own) if own else [])])


def _is_among(path: str, keys: Sequence[str]) -> bool:
    """Returns whether `keys` have the key, its section, or an entry of the mapping that it holds."""
    return any(path == key or path.startswith(f"{key}.") or key.startswith(f"{path}.") for key in keys)


def _wrap(head: str, words: Sequence[str]) -> list[str]:
    text = " ".join([head, *words])
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")
