"""Recipes: their settings, how they are shown, and the guard against training an existing model with the demo's."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import write_hf_config

from moerl import cli
from moerl.algorithms.grpo import GRPO
from moerl.config.command_texts import COMMANDS
from moerl.config.help_text import recipe_text
from moerl.config.load import load_config, load_plan
from moerl.config.rollouts import SGLangRolloutConfig
from moerl.config.schema import RunConfig
from moerl.errors import ConfigError


@pytest.fixture
def pretrained(tmp_path: Path) -> list[str]:
    write_hf_config(tmp_path / "model", max_position_embeddings=40960)
    return [f"model.path='{tmp_path / 'model'}'"]


@pytest.fixture
def own_task(tmp_path: Path) -> list[str]:
    (tmp_path / "problems.jsonl").write_text("{}\n")
    return [f"task.path='{tmp_path / 'problems.jsonl'}'", "task.reward=rewards:score"]


def train(*overrides: str) -> RunConfig:
    return load_config(overrides, command="train")


# --- a model that exists ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize("group", [["model=pretrained"], ["model.architecture=null"]])
def test_a_model_that_exists_is_not_trained_with_the_recipe_that_nobody_chose(
    command: str, group: list[str], pretrained: list[str]
):
    with pytest.raises(ConfigError) as caught:
        load_config([*group, *pretrained], command=command)
    message = str(caught.value)
    assert message.startswith("recipe: none was chosen for a model that exists; seen: recipe=laptop, the default")
    assert "recipe=pretrained " in message
    assert "recipe=pretrained_small " in message
    assert "recipe=laptop " in message


def test_the_demos_recipe_is_used_on_a_model_that_exists_where_it_is_chosen(pretrained: list[str]):
    assert train("recipe=laptop", "model=pretrained", *pretrained).optimizer.lr == 8e-5


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_commands_that_train_nothing_need_no_chosen_recipe(command: str, pretrained: list[str]):
    assert load_config(["model=pretrained", *pretrained], command=command).recipe == "laptop"


def test_a_high_learning_rate_for_a_large_model_is_noted(tmp_path: Path, pretrained: list[str]):
    from moerl.config.checks import config_notes

    write_hf_config(tmp_path / "model", num_experts=512, moe_intermediate_size=65536, max_position_embeddings=40960)
    config = train("recipe=laptop", "model=pretrained", *pretrained)
    assert any(note.startswith("optimizer.lr = 8e-05 is high for a model of ") for note in config_notes(config))
    config = train("recipe=laptop", "model=pretrained", "optimizer.lr=1e-6", *pretrained)
    assert config_notes(config) == []


def test_the_recipe_for_large_models_has_the_values_of_public_recipes(pretrained: list[str], own_task: list[str]):
    config = train("recipe=pretrained", *pretrained, *own_task)
    assert (config.model.dtype, config.rollout.dtype) == ("bfloat16", "bfloat16")
    assert (config.optimizer.lr, config.optimizer.schedule, config.optimizer.weight_decay) == (1e-6, "constant", 0.1)
    assert isinstance(config.algorithm, GRPO)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert (config.sft.steps, config.rl.moe_aux_loss_coef, config.algorithm.kl_coef) == (0, 0.0, 0.0)
    assert (config.rollout.max_new_tokens, config.rollout.top_k, config.rollout.top_p) == (8192, None, 1.0)
    assert isinstance(config.rollout, SGLangRolloutConfig)


def test_the_recipe_for_small_models_keeps_to_one_process(pretrained: list[str], own_task: list[str]):
    config = train("recipe=pretrained_small", *pretrained, *own_task)
    assert (config.rollout.engine, config.model.dtype, config.sft.steps) == ("embedded", "float32", 0)


@pytest.mark.parametrize(
    ("recipe", "given", "missing"),
    [
        ("pretrained", "nothing", "model.path: no value given"),
        ("pretrained", "model", "task.path: no value given"),
        ("pretrained_small", "model", "task.path: no value given"),
    ],
)
def test_a_recipe_for_models_that_exist_asks_for_model_and_task(
    recipe: str, given: str, missing: str, pretrained: list[str]
):
    with pytest.raises(ConfigError, match=missing):
        train(f"recipe={recipe}", *(pretrained if given == "model" else []))


def test_a_plan_needs_no_task(pretrained: list[str]):
    config = load_plan(["recipe=pretrained", *pretrained])
    assert (config.recipe, config.trainer.recompute) == ("pretrained", "full")
    load_plan(["recipe=pretrained", *pretrained, "task.path=/not/there.jsonl"])


def test_a_plan_is_made_for_a_recipe_that_was_chosen(pretrained: list[str]):
    with pytest.raises(ConfigError, match="recipe: none was chosen"):
        load_plan(["model=pretrained", *pretrained])


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_what_a_recipe_sets_beyond_the_base_is_shown_with_its_groups():
    text = recipe_text(["recipe=laptop"], None)
    words = text.split()
    assert text.startswith("recipe laptop: model=laptop task=chain_sum ")
    for word in ("optimizer.lr=8e-05", "rollout.top_k=12", "rollout.max_new_tokens=72", "sft.steps=400"):
        assert word in words
    # The same as in the base: not worth a word.
    assert not any(word.startswith(("algorithm.clip_low", "num_threads", "recipe=")) for word in words)
    assert len(text.splitlines()) <= 6


def test_the_default_recipe_is_shown_as_such():
    assert recipe_text([], None).startswith("recipe laptop (default): ")


def test_what_the_command_line_changes_is_shown_apart_and_wins():
    recipe, command_line = recipe_text(["recipe=laptop", "optimizer.lr=1e-6", "task=chain_sum_short"], None).split(
        "\ncommand line: "
    )
    assert " optimizer.lr" not in recipe
    assert "task=" not in recipe
    assert command_line == "optimizer.lr=1e-6 task=chain_sum_short"


def test_a_command_that_trains_nothing_is_shown_what_matters_for_it():
    assert recipe_text([], None, COMMANDS["eval"].keys) == (
        "recipe laptop (default): model=laptop task=chain_sum rollout.max_new_tokens=72"
    )


def test_a_recipe_of_ones_own_shows_what_it_inherits(tmp_path: Path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - laptop\n  - _self_\nrecipe: mine\nalgorithm:\n  kl_coef: 0.5\n"
    )
    words = recipe_text(["recipe=mine"], tmp_path).split()
    assert {"algorithm.kl_coef=0.5", "optimizer.lr=8e-05"} <= set(words)


def test_show_config_begins_with_what_the_recipe_sets(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["train", "recipe=tiny", "--show-config"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# recipe tiny: model=tiny task=chain_sum_short ")
