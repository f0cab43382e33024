"""Pydantic's errors as a `ConfigError` with dotted path, value seen, value expected and remedy. Pure."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from moerl.config.foreign_keys import counterpart
from moerl.config.moved import moved_key
from moerl.config.reference import CHOICES, by_tag, children, config_keys, describe, meant_keys
from moerl.errors import ConfigError
from moerl.scorers.registry import SCORER_SECTIONS
from moerl.sections import UNSHOWN
from moerl.tasks.rewards.section import Reward


def explain(error: ValidationError) -> ConfigError:
    """Returns the first error in full; its remedy names the paths of further ones."""
    details = error.errors(include_url=False)
    unknown_first = sorted(details, key=lambda detail: detail["type"] != "extra_forbidden")
    paths = [dotted(detail["loc"]) for detail in unknown_first]
    # For a key that takes one of several types, pydantic reports an error for each of them.
    same = [detail for detail, path in zip(unknown_first, paths, strict=True) if path == paths[0]]
    explained = [_explain_one(detail) for detail in same]
    first, others = explained[0], [path for path in paths if path != paths[0]]
    expected, remedy = first.expected, first.remedy
    if len(explained) > 1:
        expected = " or ".join(dict.fromkeys(str(each.expected) for each in explained))
    if others:
        named = ", ".join(dict.fromkeys(others[:5])) + (", ..." if len(others) > 5 else "")
        remedy = f"{remedy} (also wrong: {named})"
    return ConfigError(first.what, seen=first.seen, expected=expected, remedy=remedy)


def unknown_key(path: str) -> ConfigError:
    """Returns the error for a key that does not exist, with its new name, our key for that of another trainer, or the
    key that was probably meant."""
    moved = moved_key(path)
    if moved is not None:
        return moved
    meant = meant_keys(path)[:3]
    is_ours = any(key.rpartition(".")[2] == path for key in meant)
    foreign = counterpart(path)
    if foreign is not None and not is_ours:
        trainer, ours = foreign
        setting = ours if "=" in ours else f"{ours}=VALUE"
        remedy = f"set {setting}; `moerl train --help --all` says what it takes"
        if ours.startswith("moerl "):
            remedy = f"run `{ours}`, a command of its own; `{ours} --help` says what it takes"
        return ConfigError(f"{path}: a key of {trainer}", expected=ours, remedy=remedy)
    siblings = children(path.rpartition(".")[0])
    return ConfigError(
        f"{path}: unknown key",
        expected=f"one of {', '.join(siblings)}" if siblings else None,
        remedy=f"did you mean {' or '.join(meant)}?" if meant else "`moerl train --help --all` lists all keys",
    )


def dotted(location: tuple[int | str, ...]) -> str:
    """Returns a pydantic location as a dotted path: without the choice that pydantic puts behind the sections of
    `CHOICES`, and without the names of the types that a value can be of."""
    parts = [str(part) for part in location]
    if parts and parts[0] in _TAGS and len(parts) > 1:
        del parts[1]
    if parts[:2] == ["task", "rewards"] and len(parts) > 3:
        del parts[3]
    if parts[:1] == ["scorers"] and len(parts) > 2:
        del parts[2]
    names = [part for part in parts if part not in ("[key]", "constrained-int") and not part.startswith("literal[")]
    return ".".join(names) or "configuration"


def _explain_one(detail: ErrorDetails) -> ConfigError:
    path, kind = dotted(detail["loc"]), detail["type"]
    context: dict[str, Any] = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _explain_extra(path, detail["loc"])
    if kind == "missing":
        return ConfigError(
            f"{path}: no value given",
            expected=describe(path) or None,
            remedy=f"add {path}=VALUE, or set it in the recipe",
        )
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        # Pydantic quotes the discriminator.
        tag = _TAGS.get(path) or str(context.get("discriminator", "'kind'")).strip("'")
        choices = CHOICES.get(f"{path}.{tag}", _REWARDS)
        return ConfigError(
            f"{path}.{tag}: unknown {path if tag == 'name' else tag}",
            seen=context.get("tag"),
            expected=context.get("expected_tags", ", ".join(choices)),
            remedy=f"choose one with {path}{'' if path in _TAGS else f'.{tag}'}=NAME",
        )
    if kind == "string_pattern_mismatch" and path.rpartition(".")[2] in ("reward", "function", "loss", "advantages"):
        return ConfigError(
            f"{path}: not the name of a function",
            seen=repr(detail["input"]),
            expected='"package.module:function"',
            remedy=f"name the module and the function, for example {path}=my_module:my_function",
        )
    if path == "recipe" and isinstance(detail["input"], dict):
        return ConfigError(
            "recipe: the recipe's values landed under `recipe`",
            seen=sorted(detail["input"]),
            expected="values at the top",
            remedy="make `# @package _global_` the first line of the recipe file",
        )
    expected = detail["msg"]
    for start in ("Input should be ", "Value should be ", "Value error, "):
        expected = expected.removeprefix(start)
    meaning, value = describe(path), detail["input"]
    shown = "null" if value is None else f"{repr(value)[:200]} ({type(value).__name__})"
    return ConfigError(
        f"{path}: wrong value",
        seen="a value that is not shown, as it may hold a password" if kind == UNSHOWN else shown,
        expected=expected[:1].lower() + expected[1:],
        remedy=f"change {path}" + (f" ({meaning.rstrip('.')})" if meaning else ""),
    )


def _explain_extra(path: str, location: tuple[int | str, ...]) -> ConfigError:
    """Returns the error for an unknown key; for a key of another task or engine it names that one."""
    owners = {key.owner for key in config_keys() if key.path == path}
    section = location[0]
    if section in _TAGS and owners:
        names = CHOICES[f"{section}.{_TAGS[str(section)]}"]
        choices = " or ".join(f"{section}={name}" for name, owner in names.items() if owner in owners)
        return ConfigError(
            f"{path}: not a key of {section} {location[1]}",
            expected=f"{choices}, which has it",
            remedy=f"add {choices}, or remove {path}",
        )
    if [*location[2:3]] == ["rewards"] and location[4] in _REWARDS:
        return _unknown_of_kind(path, f"a reward of the kind {location[4]}", _REWARDS[str(location[4])])
    if section == "scorers" and len(location) > 2 and location[2] in _SCORERS:
        return _unknown_of_kind(path, f"a scorer of the kind {location[2]}", _SCORERS[str(location[2])])
    return unknown_key(path)


def _unknown_of_kind(path: str, what: str, section: type[BaseModel]) -> ConfigError:
    """Returns the error for an unknown key of a section that is chosen by its kind."""
    known = section.model_fields
    near = difflib.get_close_matches(path.rpartition(".")[2], known, n=1)
    return ConfigError(
        f"{path}: unknown key of {what}",
        expected=f"one of {', '.join(known)}",
        remedy=f"did you mean {near[0]}?" if near else "remove it",
    )


_REWARDS = by_tag(get_args(get_args(Reward)[0]), "kind")
_SCORERS = by_tag(SCORER_SECTIONS, "kind")
_TAGS = dict(key.split(".") for key in CHOICES)
"""By section, the key that names its kind; only sections that come in several kinds."""
