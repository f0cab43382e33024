"""The key table and the help text made from it."""

from __future__ import annotations

from moerl.config.compose import CONFIGS, config_groups
from moerl.config.help_text import WIDTH, groups_text, keys_text
from moerl.config.reference import closest, config_keys, describe, is_known


def test_every_key_has_a_type_and_a_one_line_description():
    for key in config_keys():
        assert key.type_name, key
        assert key.description.endswith("."), key
        assert "\n" not in key.description


def test_types_read_as_a_newcomer_would_write_them():
    types = {key.path: key.type_name for key in config_keys()}
    assert types["rl.group_size"] == "int >= 2"
    assert types["rollout.top_k"] == "int >= 1, <= 4096 or null"
    assert types["keep_routing.mode"] == "off | rollout | trainer"
    assert types["keep_routing.reference"] == "off | rollout | trainer or null"
    assert types["keep_routing.verify"] == "every | off or int >= 1"
    names = "calculator | chain_sum | dataset | environment | guess | gymnasium | jsonl | openenv | reasoning_gym"
    assert types["task.name"] == f"{names} | self_play | textarena"
    assert types["task.worked_probability"] == "mapping of int to float >= 0, <= 1"
    assert types["model.path"] == "path or null"
    assert types["task.rewards"] == "mapping of text to settings"
    assert types["task.filters"] == "settings, or a list of them or null"


def test_keys_sections_and_entries_of_mappings_are_known():
    assert is_known("sft.optimizer.lr")
    assert is_known("sft.optimizer")
    assert is_known("task.worked_probability.9")
    assert is_known("task.rewards.right.kind")
    assert not is_known("rl.steps.x")
    assert not is_known("steps")


def test_the_closest_key_prefers_the_right_section():
    assert closest("sft.optimiser.lr") == "sft.optimizer.lr"
    assert closest("sft.step") == "sft.steps"
    assert closest("qqqq") is None


def test_a_description_is_found_by_path():
    assert describe("seed").startswith("Seed")
    assert describe("nope") == ""


def test_the_help_lists_every_key_with_its_value_and_fits_its_width():
    text = keys_text()
    for key in config_keys():
        assert f"{key.path}=" in text
    assert "rl.group_size=8 " in text
    assert "task.reward=(you must give it)" in text
    assert all(len(line) <= WIDTH for line in text.splitlines())


def test_the_help_lists_every_option_with_what_it_is():
    text = groups_text()
    for group, options in config_groups().items():
        for option in options:
            assert f"{group}={option}" in text
    assert "recipe=laptop (default)" in text
    for path in CONFIGS.glob("*/*.yaml"):
        assert any(line.startswith("# ") for line in path.read_text().splitlines() if "@package" not in line), path
