"""Composes a configuration from the YAML groups, recipes and overrides, and validates it once.

The only module that knows Hydra and OmegaConf. Runs in the command line, before anything else starts; ranks that a
launcher started compose the same configuration from the same arguments.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError

import moerl
from moerl.config.checks import check_command, check_model_fits
from moerl.config.explain import explain, unknown_key
from moerl.config.reference import COMMAND_KEY, is_known
from moerl.config.schema import ParallelConfig, RunConfig
from moerl.errors import ConfigError

CONFIGS = Path(moerl.__file__).parent / "configs"
CONFIG_FILE = "config.yaml"
DEFAULT_RECIPE = "laptop"
"""As the defaults of `moerl/configs/config.yaml` say."""
RESUME_KEYS = (
    "checkpoint.every",
    "checkpoint.keep",
    "dump.rollouts_every",
    "quarantine.max_rate",
    *(f"parallel.{size}" for size in ParallelConfig.model_fields),
)
"""Keys that may change when a run goes on: none changes what is learned, other parallel sizes but for rounding."""

_UNNAMED_TASK = {"task.path": "unnamed.jsonl", "task.reward": "unnamed:unnamed"}
"""Stand in for values that a plan does not look at, where they are not given."""


@dataclass(frozen=True, slots=True)
class _Parsed:
    """One ``key=value``; `text` is without a leading ``+``."""

    text: str
    override: Override

    @property
    def key(self) -> str:
        return self.override.key_or_group


def load_config(overrides: Sequence[str], *, command: str, config_dir: Path | None = None) -> RunConfig:
    """The validated configuration of a command.

    Args:
        overrides: ``group=option``, ``key=value`` and ``resume=RUN_DIR`` as on the command line.
        command: the command that will run (`moerl.config.checks.COMMANDS`).
        config_dir: a directory with groups of the user's own, for example ``recipe/mine.yaml``.

    Raises:
        ConfigError: Unknown key or option, wrong type, impossible combination, a file that is not there.
    """
    resume, rest = split_resume(overrides)
    if resume is not None:
        return _load_resumed(resume, rest, command)
    config = _validated(compose_values(rest, config_dir=config_dir), command)
    if command in ("train", "sft"):
        _check_recipe_is_chosen(config, rest)
    check_command(config, command)
    return config


def load_plan(overrides: Sequence[str], *, config_dir: Path | None = None) -> RunConfig:
    """The configuration that `moerl train` would run with, for a plan: the task need not be named.

    Raises:
        ConfigError: as `load_config`; ``resume=`` is refused.
    """
    if any(text.startswith("resume=") for text in overrides):
        raise ConfigError(
            "resume: a plan is made from a recipe and keys", seen=[*overrides], remedy="leave resume away"
        )
    values = compose_values(overrides, config_dir=config_dir, stand_ins=_UNNAMED_TASK)
    config = _validated(values, "train")
    _check_recipe_is_chosen(config, overrides)
    check_model_fits(config)
    return config


def compose_values(
    overrides: Sequence[str], *, config_dir: Path | None = None, stand_ins: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The composed, resolved values as plain data; `run_dir` may still be null. Raises `ConfigError`.

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


@dataclass(frozen=True, slots=True)
class RecipeValues:
    """What a recipe sets. groups: the option it takes of each config group. keys: by dotted path, its value of each key
    that is not what it would be without the recipe."""

    groups: dict[str, str]
    keys: dict[str, Any]


def recipe_values(recipe: str, config_dir: Path | None = None) -> RecipeValues:
    """What a recipe sets beyond the base configuration and the options it takes. Raises `ConfigError`."""
    with _configuration_errors():
        composed = _compose([f"recipe={recipe}"], config_dir, with_hydra=True)
        choices = composed.hydra.runtime.choices
        groups = {group: str(choices[group]) for group in config_groups(config_dir) if group != "recipe"}
        base = _compose([f"{group}={option}" for group, option in groups.items()], config_dir, recipe=False)
    without = _leaves(base)
    keys = {path: value for path, value in _leaves(composed).items() if without.get(path, ...) != value}
    return RecipeValues(groups, {path: keys[path] for path in keys if path != "recipe" and path[:6] != "hydra."})


def _compose(
    overrides: Sequence[str], config_dir: Path | None, *, with_hydra: bool = False, recipe: bool = True
) -> DictConfig:
    """Hydra's composition. with_hydra: with its own keys, which say what was chosen. recipe: False leaves it out."""
    groups = config_groups(config_dir)
    arguments = [_argument(_parse(text), groups) for text in overrides]
    if not recipe:
        arguments.append("~recipe")
    if config_dir is not None:
        arguments.append(f'hydra.searchpath=["file://{config_dir.resolve()}"]')
    with initialize_config_dir(str(CONFIGS), version_base="1.3", job_name="moerl"):
        return compose("config", overrides=arguments, return_hydra_config=with_hydra)


@contextmanager
def _configuration_errors() -> Iterator[None]:
    """Errors of the libraries as `ConfigError`."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(
            "configuration files: cannot be composed",
            seen=" ".join(str(error).split())[:300],
            remedy="correct the recipe or group file that is named",
        ) from error


def split_resume(overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The run directory of ``resume=RUN_DIR``, None without one, and the other overrides."""
    given = [text.partition("=")[2] for text in overrides if text.startswith("resume=")]
    rest = [text for text in overrides if not text.startswith("resume=")]
    if not given:
        return None, rest
    if len(given) > 1 or not given[0]:
        raise ConfigError("resume: one run directory", seen=given, expected="resume=RUN_DIR", remedy="give it once")
    return Path(given[0]), rest


def override_keys(overrides: Sequence[str]) -> list[str]:
    """The keys and groups that overrides set."""
    return [_parse(text).key for text in overrides]


def chosen_recipe(overrides: Sequence[str]) -> str | None:
    """The recipe that the overrides name, None where they leave it to the default."""
    named = [parsed.override.value() for parsed in map(_parse, overrides) if parsed.key == "recipe"]
    return str(named[-1]) if named else None


def refuse_taken_run_dir(config: RunConfig) -> None:
    """Raises `ConfigError` where `run_dir` already holds a run."""
    if (config.run_dir / CONFIG_FILE).exists():
        raise ConfigError(
            "run_dir: holds a run already",
            seen=config.run_dir,
            expected="a new or empty directory",
            remedy=f"go on with `moerl {config.command} resume={config.run_dir}`, or choose another run_dir",
        )


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; `load_resolved` reads it back to an equal `RunConfig`."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def load_resolved(path: Path) -> RunConfig:
    """Reads a resolved configuration, for example a run's ``config.yaml``. Raises `ConfigError`."""
    return _validate(_read_values(path))


def config_groups(config_dir: Path | None = None) -> dict[str, list[str]]:
    """The options of every config group, the user's own included.

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


def _parse(text: str) -> _Parsed:
    """Reads one override with Hydra's grammar; only plain assignments of one value are accepted."""
    key, equals, value = text.partition("=")
    if not equals or not key or key.startswith(("~", "-")):
        raise ConfigError(
            "override: not an assignment",
            seen=text,
            expected="key=value",
            remedy="see `moerl train --help` for examples",
        )
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
            remedy=f"put text with special characters in quotes: {key}=\"'...'\"",
        ) from error
    if override.is_sweep_override() or override.package is not None or override.type is not OverrideType.CHANGE:
        raise ConfigError(
            f"{key}: one run takes one value", seen=text, expected="key=value", remedy="start one run per value"
        )
    return _Parsed(plain, override)


def _argument(parsed: _Parsed, groups: dict[str, list[str]]) -> str:
    """The override in the form in which Hydra applies it: an option of a group, or a value set whatever was there."""
    if parsed.key in groups:
        option = parsed.override.value()
        if option not in groups[parsed.key]:
            raise ConfigError(
                f"{parsed.key}: no such option",
                seen=option,
                expected=f"one of {', '.join(groups[parsed.key])}",
                remedy="choose one of these; --config-dir DIR adds your own",
            )
        return parsed.text
    if not is_known(parsed.key):
        raise unknown_key(parsed.key)
    return f"++{parsed.text}"


def _load_resumed(run_dir: Path, overrides: list[str], command: str) -> RunConfig:
    if command not in ("train", "sft"):
        raise ConfigError(
            f"resume: moerl {command} has nothing to go on with",
            seen=run_dir,
            expected="moerl train or moerl sft",
            remedy="leave resume away",
        )
    values = _read_values(run_dir / CONFIG_FILE)
    _check_same_command(str(values.get(COMMAND_KEY)), command, run_dir)
    for parsed in map(_parse, overrides):
        if parsed.key not in RESUME_KEYS:
            raise ConfigError(
                f"{parsed.key}: cannot change when a run goes on",
                seen=parsed.text,
                expected=f"one of {', '.join(RESUME_KEYS)}",
                remedy="leave it away, or start a new run",
            )
        section, name = parsed.key.split(".")
        values[section][name] = parsed.override.value()
    values["run_dir"] = str(run_dir)
    config = _with_absolute_paths(_validate(values))
    check_command(config, command)
    return config


def _check_same_command(stored: str, command: str, run_dir: Path) -> None:
    if stored != command:
        raise ConfigError(
            "resume: the run belongs to another command",
            seen=f"moerl {command} resume={run_dir}, a run of moerl {stored}",
            expected=f"moerl {stored}",
            remedy=f"use `moerl {stored} resume={run_dir}`" if stored in ("train", "sft") else "start a new run",
        )


def _validated(values: dict[str, Any], command: str) -> RunConfig:
    """Composed values as the configuration of a command, paths made absolute."""
    if values.get("run_dir") is None:
        values["run_dir"] = _default_run_dir(command, str(values.get("recipe")), str(values.get("seed")))
    if COMMAND_KEY in values:
        raise unknown_key(COMMAND_KEY)
    return _with_absolute_paths(_validate({COMMAND_KEY: command, **values}))


def _check_recipe_is_chosen(config: RunConfig, overrides: Sequence[str]) -> None:
    """The default recipe is made for the small model that it builds; it is not used on another one unasked."""
    if config.model.path is None or chosen_recipe(overrides) is not None:
        return
    raise ConfigError(
        "recipe: none was chosen for a model that exists",
        seen=f"recipe={config.recipe}, the default, which is made for the model that it builds",
        expected="a recipe that is named",
        remedy="add recipe=pretrained (models of billions of parameters, on GPUs) or recipe=pretrained_small (a small"
        f" one, on a laptop); recipe={config.recipe} where you mean its values",
    )


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    changed: dict[str, Any] = {"run_dir": config.run_dir.resolve()}
    for name, section in (("model", config.model), ("task", config.task), ("rollout", config.rollout)):
        changed[name] = section.model_copy(update={key: _absolute(value) for key, value in section})
    return config.model_copy(update=changed)


def _absolute(value: Any) -> Any:
    if isinstance(value, list):
        return [_absolute(item) for item in value]
    return value.resolve() if isinstance(value, Path) else value


def _read_values(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(
            "run directory: holds no run",
            seen=path,
            expected=f"a directory with {CONFIG_FILE}",
            remedy="check the path, or start the run again",
        )
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise ConfigError(f"{path}: not a configuration", remedy="start a new run")
        return _plain(loaded)
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read", seen=" ".join(str(error).split())[:300], remedy="restore it, or start a new run"
        ) from error


def _plain(composed: DictConfig) -> dict[str, Any]:
    """Plain data with interpolations resolved; a mandatory value that is missing is named."""
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        path = str(error.full_key)
        raise ConfigError(f"{path}: no value given", expected="a value", remedy=f"add {path}=VALUE") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _validate(values: dict[str, Any]) -> RunConfig:
    """Validates as strict JSON: paths and integer keys are text there, and nothing else is converted."""
    try:
        return RunConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise explain(error) from error


def _leaves(composed: DictConfig) -> dict[str, Any]:
    """Every value by dotted path, interpolations and missing values as they are written."""
    found: dict[str, Any] = {}

    def walk(values: Any, prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and value:
                walk(value, f"{prefix}{key}.")
            else:
                found[f"{prefix}{key}"] = value

    walk(OmegaConf.to_container(composed, resolve=False), "")
    return found


def _default_run_dir(command: str, recipe: str, seed: str) -> str:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    prefix = "" if command == "train" else f"{command}-"
    return f"runs/{prefix}{recipe}-seed{seed}-{now}"


def _options(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))
