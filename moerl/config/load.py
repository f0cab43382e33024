"""The configuration of a command, loaded: composed (`moerl.config.compose`), validated once, checked.

Torch-free. Runs in the command line, before anything else starts; a run that goes on reads the one before, too.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moerl.config.checks import COMMANDS, check_command, check_model_fits, check_run
from moerl.config.compose import chosen_recipe, compose_values, parse_override, read_values, to_yaml
from moerl.config.explain import explain, unknown_key
from moerl.config.hub_model import with_hub_model
from moerl.config.moved import as_of_today
from moerl.config.passed_on import passed_on_notes
from moerl.config.reference import COMMAND_KEY, is_known
from moerl.config.resume import changed_keys, check_may_change, reason_against
from moerl.config.schema import ModelConfig, RunConfig
from moerl.errors import ConfigError
from moerl.sections import Section
from moerl.tasks.registry import TASK_SECTIONS

CONFIG_FILE = "config.yaml"
AUTO = "resume=auto"
"""Override that goes on with the run in `run_dir` if there is one, and starts it if there is none: a requeued job's
command line is the one that started the run."""


def load_config(
    overrides: Sequence[str],
    *,
    command: str,
    config_dir: Path | None = None,
    known_model: ModelConfig | None = None,
    looks_at_packages: bool = True,
) -> RunConfig:
    """Returns the validated configuration of a command. A model of the hub is a directory in it, with its small files.

    Args:
        overrides: ``group=option``, ``key=value`` and ``resume=RUN_DIR`` as on the command line.
        command: the command that will run (`moerl.config.checks.COMMANDS`).
        config_dir: a directory with groups of the user's own, for example ``recipe/mine.yaml``.
        known_model: section of the run that these overrides started; a model of the hub by the same name stays at its
            commit. None for a new run.
        looks_at_packages: as `check_command`; False for a job, whose interpreter may be another one.

    Raises:
        ConfigError: Unknown key or option, wrong type, impossible combination, a file that is not there.
    """
    resume, rest = split_resume(overrides)
    if resume is not None:
        return _load_resumed(resume, rest, command)
    values = compose_values(rest, config_dir=config_dir)
    config = _validated(values, command)
    if command in ("train", "sft"):
        _check_recipe_is_chosen(config, rest)
    config = _with_hub_model(config, values, known_model)
    check_command(config, command, looks_at_packages=looks_at_packages)
    return config


def load_plan(overrides: Sequence[str], *, config_dir: Path | None = None) -> RunConfig:
    """Returns the configuration that `moerl train` would run with, for a plan: the task need not be named.

    Raises:
        ConfigError: as `load_config`; ``resume=`` is refused.
    """
    if any(text.startswith("resume=") for text in overrides):
        raise ConfigError(
            "resume: a plan is made from a recipe and keys", seen=[*overrides], remedy="leave resume away"
        )
    unnamed = {f"task.{key}": value for task in TASK_SECTIONS for key, value in task.plan_values.items()}
    values = compose_values(overrides, config_dir=config_dir, stand_ins=unnamed)
    config = _validated(values, "train")
    _check_recipe_is_chosen(config, overrides)
    config = _with_hub_model(config, values)
    check_model_fits(config)
    return config


def split_resume(overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Returns the run directory of ``resume=RUN_DIR``, None without one, and the other overrides."""
    given = [text.partition("=")[2] for text in overrides if text.startswith("resume=")]
    rest = [text for text in overrides if not text.startswith("resume=")]
    if not given:
        return None, rest
    if len(given) > 1 or not given[0]:
        raise ConfigError("resume: one run directory", seen=given, expected="resume=RUN_DIR", remedy="give it once")
    return Path(given[0]), rest


def stored_run(overrides: Sequence[str]) -> RunConfig | None:
    """Returns the configuration of the run that is in ``run_dir=DIR`` already; None if there is none. Raises
    `ConfigError` if it cannot be read."""
    given = [parse_override(text) for text in overrides if text.startswith("run_dir=")]
    stored = Path(str(given[0].value)) / CONFIG_FILE if given else None
    return load_resolved(stored) if stored is not None and stored.exists() else None


def resolve_auto(
    overrides: Sequence[str], *, command: str, config_dir: Path | None = None
) -> tuple[list[str], list[str]]:
    """Returns the overrides of a command line with ``resume=RUN_DIR``, or nothing, in place of ``resume=auto``.

    Keys of the command line that are as the run has them are left away. The others stay, so that the rules of a run
    that goes on apply to them.

    Returns:
        The overrides in the order given, of a run that goes on ``resume=RUN_DIR`` first; and lines for the user: keys
        that keep the run's value although the recipe has another one.

    Raises:
        ConfigError: there is no `run_dir=`, or groups and recipe are those of another run.
    """
    if AUTO not in overrides or command not in ("train", "sft"):
        return list(overrides), []
    split_resume(overrides)
    given = {parse_override(text).key: text for text in overrides if text != AUTO}
    if "run_dir" not in given:
        raise ConfigError(
            f"{AUTO}: needs a run directory",
            seen=" ".join(overrides),
            expected="run_dir=DIR, which may or may not hold a run",
            remedy="add run_dir=DIR",
        )
    rest = [text for text in overrides if text != AUTO]
    before = stored_run(rest)
    known = None if before is None else before.model
    config = load_config(rest, command=command, config_dir=config_dir, known_model=known)
    if before is None:
        return rest, []
    found, notes = [f"resume={config.run_dir}"], list[str]()
    for change in changed_keys(before, config):
        if change.key in ("run_dir", COMMAND_KEY):
            continue
        if change.key == "model.path" and config.model.hub is not None and config.model.commit == before.model.commit:
            continue  # the same model of the hub, in another cache
        if change.key in given:
            found.append(given[change.key])
        elif reason_against(change.key, command) is None:
            stays, says = json.dumps(change.old), json.dumps(change.new)
            notes.append(f"{change.key} stays {stays}, as the run has it; the command line's recipe says {says}")
        else:
            text = f"{change.key}={json.dumps(change.new)}"
            check_may_change(change.key, text, command, config.run_dir)
    return found, notes


def refuse_taken_run_dir(config: RunConfig) -> None:
    """Raises `ConfigError` if `run_dir` already holds a run."""
    if (config.run_dir / CONFIG_FILE).exists():
        raise ConfigError(
            "run_dir: holds a run already",
            seen=config.run_dir,
            expected="a new or empty directory",
            remedy=f"go on with `moerl {config.command} resume={config.run_dir}`, or choose another run_dir",
        )


def dump_config(config: RunConfig) -> str:
    """Writes the resolved configuration as YAML; `load_resolved` reads it back to an equal `RunConfig`. Comments at the
    top name the settings that moerl does not check."""
    notes = "".join(f"# {note}\n" for note in passed_on_notes(config.trainer, config.rollout))
    return notes + to_yaml(config.model_dump(mode="json"))


def load_resolved(path: Path) -> RunConfig:
    """Reads a resolved configuration, for example a run's ``config.yaml``, of this or an earlier build.

    Raises:
        ConfigError: it cannot be read, or is not of this version.
    """
    return _validate(as_of_today(read_values(path)))


def check_export(run_dir: Path, output: Path) -> RunConfig:
    """Reads the configuration of the run to export. Raises `ConfigError` if it cannot be read, or `output` exists."""
    config = load_resolved(run_dir / CONFIG_FILE)
    if output.exists():
        raise ConfigError(
            "--output: exists already", seen=output, expected="a directory to be made", remedy="choose another name"
        )
    return config


def _load_resumed(run_dir: Path, overrides: list[str], command: str) -> RunConfig:
    if command not in ("train", "sft"):
        raise ConfigError(
            f"resume: moerl {command} has nothing to go on with",
            seen=run_dir,
            expected="moerl train or moerl sft",
            remedy="leave resume away",
        )
    values = as_of_today(read_values(run_dir / CONFIG_FILE))
    _check_same_command(str(values.get(COMMAND_KEY)), command, run_dir)
    for parsed in map(parse_override, overrides):
        if not is_known(parsed.key):
            raise unknown_key(parsed.key)
        check_may_change(parsed.key, parsed.text, command, run_dir)
        *parents, name = parsed.key.split(".")
        section = values
        for parent in parents:
            section = section[parent]
        section[name] = parsed.value
    values["run_dir"] = str(run_dir)
    config = _with_hub_model(_absolute(_validate(values)), values)
    check_command(config, command)
    return config


def _with_hub_model(config: RunConfig, values: dict[str, Any], known: ModelConfig | None = None) -> RunConfig:
    """Replaces a model of the hub by its directory. Call after all other checks: this may have to ask the hub."""
    return config.model_copy(update={"model": with_hub_model(config.model, values["model"]["path"], known)})


def _check_same_command(stored: str, command: str, run_dir: Path) -> None:
    if stored not in COMMANDS:
        raise ConfigError(
            f"{run_dir / CONFIG_FILE}: not the configuration of a run",
            seen=f"command = {stored}",
            expected=f"one of {', '.join(COMMANDS)}",
            remedy="restore it, or start a new run",
        )
    if stored != command:
        raise ConfigError(
            "resume: the run belongs to another command",
            seen=f"moerl {command} resume={run_dir}, a run of moerl {stored}",
            expected=f"moerl {stored}",
            remedy=f"use `moerl {stored} resume={run_dir}`" if stored in ("train", "sft") else "start a new run",
        )


def _validated(values: dict[str, Any], command: str) -> RunConfig:
    """Returns composed values as the configuration of a command, paths made absolute."""
    if values.get("run_dir") is None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        prefix = "" if command == "train" else f"{command}-"
        values["run_dir"] = f"runs/{prefix}{values.get('recipe')}-seed{values.get('seed')}-{now}"
    if COMMAND_KEY in values:
        raise unknown_key(COMMAND_KEY)
    return _absolute(_validate({COMMAND_KEY: command, **values}))


def _check_recipe_is_chosen(config: RunConfig, overrides: Sequence[str]) -> None:
    """Raises `ConfigError` if nobody chose a recipe for a model that exists: the default is made for the small model
    that it builds."""
    if config.model.path is None or chosen_recipe(overrides) is not None:
        return
    raise ConfigError(
        "recipe: none was chosen for a model that exists",
        seen=f"recipe={config.recipe}, the default, which is made for the model that it builds",
        expected="a recipe that is named",
        remedy="add recipe=pretrained (models of billions of parameters, on GPUs) or recipe=pretrained_small (a small"
        f" one, on a laptop); recipe={config.recipe} if you mean its values",
    )


def _absolute(value: Any) -> Any:
    """Returns a value of a configuration with all paths in it made absolute."""
    if isinstance(value, list):
        return [_absolute(item) for item in value]
    if isinstance(value, dict):
        return {key: _absolute(item) for key, item in value.items()}
    if isinstance(value, Section):
        return value.model_copy(update={key: _absolute(item) for key, item in value})
    return value.resolve() if isinstance(value, Path) else value


def _validate(values: dict[str, Any]) -> RunConfig:
    """Validates as strict JSON: paths and integer keys are text there, and nothing else is converted. Then the rules
    between fields."""
    try:
        config = RunConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise explain(error) from error
    check_run(config)
    return config
