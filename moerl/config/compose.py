"""Composition of values from the YAML groups, recipes and overrides: plain data, which `moerl.config.load` validates.

The only module that knows Hydra and OmegaConf. Torch-free; runs in the command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from moerl.config.explain import unknown_key
from moerl.config.reference import is_known, leaves
from moerl.errors import ConfigError
from moerl.machine.shipped import shipped_folder
from moerl.reading import find_irregular

CONFIGS = shipped_folder("configs")

DEFAULT_RECIPE = "laptop"
"""Recipe that the defaults of `configs/config.yaml` name."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """One ``key=value``."""

    text: str
    """Assignment as given, without a leading ``+``."""
    key: str
    """Key or config group."""
    value: Any
    """Value as Hydra reads it."""


def compose_values(
    overrides: Sequence[str], *, config_dir: Path | None = None, stand_ins: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns the composed, resolved values as plain data; `run_dir` may still be null. Raises `ConfigError`.

    Args:
        stand_ins: by dotted path, values for mandatory keys that nobody gave.
    """
    with _configuration_errors():
        composed = _compose(overrides, config_dir)
        for path, value in (stand_ins or {}).items():
            section, _, key = path.rpartition(".")
            if OmegaConf.is_missing(composed[section], key):
                composed[section][key] = value
        return _plain(composed)


def recipe_values(recipe: str, config_dir: Path | None = None) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns by config group the option that a recipe takes, and by dotted path the value of each key that would have
    another one without the recipe. Raises `ConfigError`."""
    with _configuration_errors():
        composed = _compose([f"recipe={recipe}"], config_dir, with_hydra=True)
        choices = composed.hydra.runtime.choices
        groups = {group: str(choices[group]) for group in config_groups(config_dir) if group != "recipe"}
        base = _compose([f"{group}={option}" for group, option in groups.items()], config_dir, recipe=False)
    without = _leaves(base)
    keys = {path: value for path, value in _leaves(composed).items() if without.get(path, ...) != value}
    return groups, {path: keys[path] for path in keys if path != "recipe" and path[:6] != "hydra."}


def chosen_recipe(overrides: Sequence[str]) -> str | None:
    """Returns the recipe that the overrides name; None if they leave it to the default."""
    named = [parsed.value for parsed in map(parse_override, overrides) if parsed.key == "recipe"]
    return str(named[-1]) if named else None


def parse_override(text: str) -> Parsed:
    """Reads one override with Hydra's grammar; only plain assignments of one value are accepted."""
    key, equals, value = text.partition("=")
    if not equals or not key or key.startswith(("~", "-")):
        raise ConfigError("override: not an assignment", seen=text, expected="key=value", remedy=_as_assignment(text))
    if not value:
        raise ConfigError(f"{key}: empty value", seen=text, expected="key=value", remedy="give a value, or null")
    plain = text.lstrip("+")
    try:
        override = OverridesParser.create().parse_override(plain)
    except HydraException as error:
        raise ConfigError(
            f"{key}: the value cannot be read",
            seen=value,
            expected="a number, true, false, null, text, [list] or {mapping}",
            remedy=(
                f"the shell leaves ~ as it is behind {key}=; write $HOME"
                if value.startswith("~")
                else f"put text with special characters in quotes: {key}=\"'...'\""
            ),
        ) from error
    if override.is_sweep_override() or override.package is not None or override.type is not OverrideType.CHANGE:
        raise ConfigError(
            f"{key}: one run takes one value",
            seen=text,
            expected="key=value",
            remedy="moerl train -m starts one run per value",
        )
    return Parsed(plain, override.key_or_group, override.value())


def split_sweep(overrides: Sequence[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Returns the overrides that all runs of a sweep have, and by other key, in the order given, the texts of its
    values, in the syntax of Hydra's basic sweeper: ``key=1,2,3``, ``key=choice(a,b)``, ``key=range(1,4)``.

    Raises:
        ConfigError: an override cannot be read, a key or one of its values comes twice, or values cannot be listed.
    """
    common, swept = list[str](), dict[str, tuple[str, ...]]()
    seen = set[str]()
    for text in overrides:
        key, values = _swept_values(text)
        if key in seen:
            raise ConfigError(f"{key}: given twice", seen=text, expected="each key once", remedy="leave one away")
        seen.add(key)
        if values is None:
            common.append(text)
            continue
        for value in values:
            parse_override(f"{key}={value}")
        if len(set(values)) < len(values):
            raise ConfigError(
                f"{key}: a value comes twice", seen=text, expected="values that differ", remedy="leave one away"
            )
        swept[key] = values
    return common, swept


def _swept_values(text: str) -> tuple[str, tuple[str, ...] | None]:
    """Returns the key of an override, and the texts of its values; None if it gives only one."""
    try:
        override = OverridesParser.create().parse_override(text.lstrip("+"))
    except HydraException:
        return parse_override(text).key, None  # which says what is wrong
    is_plain = override.type is OverrideType.CHANGE and override.package is None
    if not is_plain or not override.is_sweep_override():
        return parse_override(text).key, None
    if not override.is_discrete_sweep() or override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        raise ConfigError(
            f"{override.key_or_group}: values that cannot be listed",
            seen=text,
            expected="key=1,2,3 or key=choice(a,b) or key=range(1,4)",
            remedy="write the values out",
        )
    key = override.key_or_group
    return key, tuple(_unescaped(key, value) for value in override.sweep_string_iterator())


def _unescaped(key: str, value: str) -> str:
    """Removes the escapes of colons, which Hydra writes and does not need outside of mappings."""
    plain = value.replace("\\:", ":")
    is_same = parse_override(f"{key}={plain}").value == parse_override(f"{key}={value}").value
    return plain if is_same else value


def config_groups(config_dir: Path | None = None) -> dict[str, list[str]]:
    """Returns the options of every config group, the user's own included.

    Raises:
        ConfigError: `config_dir` is not a directory, or one of its files has the name of a built-in one.
    """
    groups = {folder.name: _options(folder) for folder in sorted(CONFIGS.iterdir()) if folder.is_dir()}
    if config_dir is None:
        return groups
    if not config_dir.is_dir():
        raise ConfigError(
            "--config-dir: no such directory",
            seen=config_dir,
            expected="a directory with recipe/NAME.yaml or other groups",
            remedy="give an existing directory",
        )
    for folder in sorted(config_dir.iterdir()):
        if not folder.is_dir() or folder.name not in groups:
            continue
        if irregular := find_irregular(folder):
            raise ConfigError(
                "--config-dir: holds something else than files",
                seen=irregular,
                expected="recipe/NAME.yaml or other groups",
                remedy="remove it, or give another directory",
            )
        taken = sorted(set(_options(folder)) & set(groups[folder.name]))
        if taken:
            raise ConfigError(
                f"--config-dir: {folder.name}={taken[0]} is the name of a built-in option",
                seen=folder / f"{taken[0]}.yaml",
                expected="a name of its own",
                remedy="rename the file",
            )
        groups[folder.name] = sorted(groups[folder.name] + _options(folder))
    return groups


def to_yaml(values: Mapping[str, Any]) -> str:
    """Writes plain data as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(values)))


def read_values(path: Path) -> dict[str, Any]:
    """Reads the values of a resolved configuration file. Raises `ConfigError`."""
    if not path.is_file():
        inside = path.parent.is_file()
        raise ConfigError(
            "run directory: holds no run" if path.parent.exists() else "run directory: not there",
            seen=path.parent,
            expected=f"a directory with {path.name}",
            remedy=f"give the directory: {path.parent.parent}" if inside else "check the path, or start the run again",
        )
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise ConfigError(f"{path}: not a configuration", remedy="restore it, or start a new run")
        return _plain(loaded)
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"{path}: cannot be read", seen=" ".join(str(error).split())[:300], remedy="restore it, or start a new run"
        ) from error


def _compose(
    overrides: Sequence[str], config_dir: Path | None, *, with_hydra: bool = False, recipe: bool = True
) -> DictConfig:
    """Returns Hydra's composition. with_hydra: with its own keys, which hold the choices. recipe: False = no recipe."""
    groups = config_groups(config_dir)
    arguments = [_argument(parse_override(text), groups) for text in overrides]
    if not recipe:
        arguments.append("~recipe")
    if config_dir is not None:
        arguments.append(f'hydra.searchpath=["file://{config_dir.resolve()}"]')
    with initialize_config_dir(str(CONFIGS), version_base="1.3", job_name="moerl"):
        return compose("config", overrides=arguments, return_hydra_config=with_hydra)


@contextmanager
def _configuration_errors() -> Iterator[None]:
    """Raises errors of the libraries as `ConfigError`."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(
            "configuration files: cannot be composed",
            seen=" ".join(str(error).split())[:300],
            remedy="correct the recipe or group file that is named",
        ) from error


def _as_assignment(text: str) -> str:
    """Returns the remedy for a word without =: how to write what it may mean."""
    groups = [group for group, options in config_groups().items() if text in options]
    if groups:
        return f"did you mean {' or '.join(f'{group}={text}' for group in groups)}?"
    if text == "resume" or is_known(text):
        return f"did you mean {text}=VALUE?"
    return "see `moerl train --help` for examples"


def _argument(parsed: Parsed, groups: dict[str, list[str]]) -> str:
    """Returns the override as Hydra applies it: an option of a group, or ``++`` to set a value whatever was there."""
    if parsed.key in groups:
        option = parsed.value
        if option not in groups[parsed.key]:
            close = difflib.get_close_matches(str(option), groups[parsed.key], n=1)
            near = f"did you mean {close[0]}?" if close else "choose one of these;"
            raise ConfigError(
                f"{parsed.key}: no such option",
                seen=option,
                expected=f"one of {', '.join(groups[parsed.key])}",
                remedy=f"{near} --config-dir DIR adds your own",
            )
        return parsed.text
    if not is_known(parsed.key):
        raise unknown_key(parsed.key)
    return f"++{parsed.text}"


def _plain(composed: DictConfig) -> dict[str, Any]:
    """Returns plain data, interpolations resolved. Raises `ConfigError` for a mandatory value that is missing."""
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        path = str(error.full_key)
        raise ConfigError(f"{path}: no value given", expected="a value", remedy=f"add {path}=VALUE") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _leaves(composed: DictConfig) -> dict[str, Any]:
    """Returns every value by dotted path, interpolations and missing values as they are written."""
    values: Any = OmegaConf.to_container(composed, resolve=False)
    return dict(leaves(values))


def _options(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))
