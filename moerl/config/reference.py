"""The keys of a configuration, read off the schema, for help texts and errors.

Pure functions over `moerl.config.schema`; any process.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moerl.config.schema import RunConfig
from moerl.sections import LARGEST_INT, LARGEST_SIZE

COMMAND_KEY = "command"
"""The one field of `RunConfig` that no key sets: the command that runs."""

_NO_BOUNDS = (LARGEST_INT, LARGEST_SIZE)
"""Bounds against absurd numbers, which a help text leaves out."""

_PLAIN_NAMES = {int: "int", float: "float", bool: "bool", str: "text", Path: "path", types.NoneType: "null"}


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key that can be set."""

    path: str
    """Dotted path."""
    type_name: str
    """Type and range of its values, for example ``int >= 1``."""
    description: str
    """Meaning, as in the schema; empty if the field has none."""
    owner: str
    """Name of the model that the field belongs to, for example ``JsonlTaskConfig``."""


def config_keys() -> list[ConfigKey]:
    """Returns every leaf key of `RunConfig` that can be set, in the order of the schema; the keys of all tasks."""
    return [key for key in _walk(RunConfig, "") if key.path != COMMAND_KEY]


def sections() -> set[str]:
    """Returns the dotted paths of the keys that hold other keys, for example ``model.architecture``."""
    paths = set()
    for key in config_keys():
        parents = key.path.split(".")[:-1]
        paths |= {".".join(parents[: depth + 1]) for depth in range(len(parents))}
    return paths


def is_known(path: str) -> bool:
    """Returns whether a path is a key, a section, or inside a key that holds a mapping."""
    known = {key.path: key.type_name for key in config_keys()}
    if path in known or path in sections():
        return True
    parts = path.split(".")
    parents = [".".join(parts[:depth]) for depth in range(1, len(parts))]
    return any(known.get(parent, "").startswith("mapping") for parent in parents)


def children(section: str) -> list[str]:
    """Returns the names of the keys and sections directly under a dotted path; the root is the empty text."""
    prefix = f"{section}." if section else ""
    inside = [key.path.removeprefix(prefix) for key in config_keys() if key.path.startswith(prefix)]
    return list(dict.fromkeys(rest.split(".")[0] for rest in inside))


def closest(path: str) -> str | None:
    """Returns the valid key that `path` most likely meant; None if nothing is near.

    A misspelt name in the right section comes first, then the right name in the wrong section, then any near
    spelling.
    """
    section, _, last = path.rpartition(".")
    near = difflib.get_close_matches(last, children(section), n=1, cutoff=0.7)
    if near:
        return f"{section}.{near[0]}" if section else near[0]
    paths = [key.path for key in config_keys()]
    same_name = [known for known in paths if known.rpartition(".")[2] == last]
    if same_name:
        return max(same_name, key=lambda known: difflib.SequenceMatcher(None, known, path).ratio())
    near = difflib.get_close_matches(path, paths, n=1, cutoff=0.75)
    if near:
        return near[0]
    by_name = {known.rpartition(".")[2]: known for known in paths}
    near = difflib.get_close_matches(last, by_name, n=1, cutoff=0.75)
    return by_name[near[0]] if near else None


def meant_keys(path: str) -> list[str]:
    """Returns the valid keys that `path` may mean: all of that name, the closest, or those that mention it."""
    section, _, last = path.rpartition(".")
    same_name = [key.path for key in config_keys() if key.path.rpartition(".")[2] == last]
    if same_name and not section:
        return same_name
    near = closest(path)
    if near is not None:
        return [near]
    words = last.replace("_", " ").lower()
    return [key.path for key in config_keys() if len(words) > 3 and words in key.description.lower()]


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value of plain data by its dotted path; a mapping is a value only if it is empty."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def describe(path: str) -> str:
    """Returns the description of a key; an empty text if there is none."""
    return next((key.description for key in config_keys() if key.path == path), "")


def _walk(model: type[BaseModel], prefix: str) -> Iterator[ConfigKey]:
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        models = _models(info.annotation)
        if models:
            inside: dict[str, ConfigKey] = {}
            for key in chain.from_iterable(_walk(child, f"{path}.") for child in models):
                inside.setdefault(key.path, key)
            yield from inside.values()
        else:
            type_name = " | ".join(CHOICES[path]) if path in CHOICES else _type_name(info.annotation, info.metadata)
            yield ConfigKey(path, type_name, info.description or "", model.__name__)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Returns the pydantic models that an annotation can hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return [model for argument in get_args(annotation) for model in _models(argument)]
    return []


def _type_name(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if _models(annotation):
        return "settings"
    if annotation is Any:
        return "value"
    if origin is Annotated:
        parts = (info.metadata if isinstance(info, FieldInfo) else [info] for info in arguments[1:])
        return _type_name(arguments[0], [*chain.from_iterable(parts)])
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(argument, metadata) for argument in arguments)
    if origin is dict:
        return "mapping of " + " to ".join(_type_name(argument, []) for argument in arguments)
    if origin is list:
        return f"{_type_name(arguments[0], [])}, or a list of them"
    name = _PLAIN_NAMES[annotation]
    return name if annotation is types.NoneType else name + _bounds(metadata)


def _choices(section: str, tag: str) -> dict[str, str]:
    models = by_tag(_models(RunConfig.model_fields[section].annotation), tag)
    return {name: model.__name__ for name, model in models.items()}


def by_tag(models: Iterable[type[BaseModel]], tag: str) -> dict[str, type[BaseModel]]:
    """Returns models by the one value that each of them takes for its key `tag`."""
    return {get_args(model.model_fields[tag].annotation)[0]: model for model in models}


def _bounds(metadata: list[Any]) -> str:
    low = next((f">= {part.ge:g}" for part in metadata if isinstance(part, Ge)), None)
    low = low or next((f"> {part.gt:g}" for part in metadata if isinstance(part, Gt)), None)
    high = next((f"<= {part.le:g}" for part in metadata if isinstance(part, Le) and part.le not in _NO_BOUNDS), None)
    high = high or next((f"< {part.lt:g}" for part in metadata if isinstance(part, Lt)), None)
    bounds = ", ".join(bound for bound in (low, high) if bound)
    return f" {bounds}" if bounds else ""


CHOICES = {key: _choices(*key.split(".")) for key in ("algorithm.name", "task.name", "rollout.engine")}
"""Keys that decide which other keys their section has: by value, the name of the section's model."""
