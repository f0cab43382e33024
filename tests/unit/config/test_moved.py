"""Keys of earlier builds: refused with their new name, read in the configuration of a run that is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from moerl.config.load import CONFIG_FILE, dump_config, load_config, load_resolved
from moerl.config.moved import ADDED, MOVED, RENAMED, as_of_today
from moerl.config.reference import config_keys, is_known
from moerl.errors import ConfigError


def error(*overrides: str, config_dir: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides), command="train", config_dir=config_dir)
    return str(caught.value)


def as_before(values: dict[str, Any]) -> dict[str, Any]:
    """The same values under the names that keys and values had before they moved."""
    for old, new in MOVED.items():
        (old_section, old_name), (section, name) = old.split("."), new.split(".")
        values.setdefault(old_section, {})[old_name] = values[section].pop(name)
    for path, names in RENAMED.items():
        section, name = path.split(".")
        before = {new: old for old, new in names.items()}
        values[section][name] = before[values[section][name]]
    return {name: value for name, value in values.items() if value != {}}


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_key_that_moved_is_refused_with_its_new_name(old: str, new: str) -> None:
    assert new in {key.path for key in config_keys()}
    assert not is_known(old)
    assert f"{old}: has another name now; expected: {new}; remedy: set {new}=VALUE" in error("recipe=tiny", f"{old}=1")


def test_a_section_that_is_gone_is_refused_with_the_new_names_of_its_keys() -> None:
    message = error("recipe=tiny", "kl={coef: 0.1}")
    assert "kl: has another name now" in message
    assert "set algorithm.kl_coef=VALUE algorithm.kl_support=VALUE" in message


def test_a_recipe_with_keys_of_before_is_refused_with_the_new_name(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\nrecipe: mine\nalgorithm: {steps: 3}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    assert "algorithm.steps: has another name now; expected: rl.steps" in error("recipe=mine", config_dir=tmp_path)


def test_a_run_directory_of_before_is_read_with_the_new_names(tmp_path: Path) -> None:
    config = load_config(["recipe=tiny", "rl.minibatches=2", "algorithm.kl_coef=0.5"], command="train")
    before = as_before(yaml.safe_load(dump_config(config)))
    for path in ADDED:
        section, name = path.split(".")
        before[section].pop(name, None)
    before = {name: value for name, value in before.items() if value != {}}
    assert {"algorithm", "kl"} <= set(before)
    assert "rl" not in before
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(before))
    assert load_resolved(tmp_path / CONFIG_FILE) == config
    resumed = load_config([f"resume={tmp_path}", "rl.steps=9"], command="train")
    assert (resumed.rl.steps, resumed.algorithm) == (9, config.algorithm)
    assert "algorithm.steps: has another name now" in error(f"resume={tmp_path}", "algorithm.steps=9")


@pytest.mark.parametrize(("old", "new"), RENAMED["rollout.placement"].items())
def test_a_stored_value_of_before_gets_its_name_of_today(old: str, new: str) -> None:
    values = load_config(["recipe=tiny", *(["rollout=sglang"] if old == "apart" else [])], command="train").model_dump()
    values["rollout"]["placement"] = old
    assert as_of_today(values)["rollout"]["placement"] == new


def test_values_under_the_new_names_stay_as_they_are() -> None:
    values = load_config(["recipe=tiny"], command="train").model_dump()
    assert as_of_today(values) == values
