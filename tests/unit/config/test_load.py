"""Composing a configuration: groups, recipes, overrides, and every way in which they can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import write_hf_config

from moerl.config.compose import CONFIGS
from moerl.config.load import (
    CONFIG_FILE,
    dump_config,
    load_config,
    load_plan,
    load_resolved,
    refuse_taken_run_dir,
    split_resume,
)
from moerl.config.rollouts import SamplingConfig, SGLangRolloutConfig
from moerl.config.schema import ArchitectureConfig
from moerl.errors import ConfigError
from moerl.tasks.chain_sum import ChainSumTaskConfig
from moerl.tasks.jsonl import JsonlTaskConfig


def load(*overrides: str, command: str = "train", config_dir: Path | None = None):
    return load_config(overrides, command=command, config_dir=config_dir)


def error(*overrides: str, command: str = "train", config_dir: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, command=command, config_dir=config_dir)
    return str(caught.value)


def write_recipe(directory: Path, text: str) -> Path:
    (directory / "recipe").mkdir(exist_ok=True)
    (directory / "recipe" / "mine.yaml").write_text(text)
    return directory


def test_the_laptop_recipe_is_what_runs_when_nothing_is_said():
    config = load()
    assert config == load("recipe=laptop", f"run_dir={config.run_dir}")
    assert (config.recipe, config.rl.group_size, config.rollout.top_k) == ("laptop", 8, 12)
    assert isinstance(config.task, ChainSumTaskConfig)
    assert config.task.worked_probability == {4: 0.1, 5: 0.2, 6: 0.55, 7: 0.7}


def test_the_demo_is_the_laptop_recipe_shorter_and_sampled_ahead():
    changes = ["num_threads=2", "rollout.placement=process", "buffer.max_staleness=1", "optimizer.lr=1e-4"]
    shorter = ["sft.steps=320", "sft.num_examples=20480", "rl.steps=40"]
    same = load("recipe=laptop", "run_dir=x", *changes, *shorter).model_copy(update={"recipe": "demo"})
    assert load("recipe=demo", "run_dir=x") == same


@pytest.mark.parametrize("recipe", ["laptop", "tiny"])
def test_every_recipe_has_at_least_four_moe_layers_and_eight_experts(recipe: str):
    architecture = load(f"recipe={recipe}").model.architecture
    assert isinstance(architecture, ArchitectureConfig)
    assert architecture.num_layers >= 4
    assert architecture.num_experts >= 8


def test_an_override_wins_over_the_recipe_and_a_group_over_the_recipes_choice():
    config = load("recipe=laptop", "rl.group_size=16", "model=tiny", "seed=7")
    assert (config.rl.group_size, config.seed) == (16, 7)
    assert config.model.architecture is not None
    assert config.model.architecture.hidden_size == 32


def test_overrides_with_plus_signs_mean_the_same():
    assert load("+seed=4").seed == load("++seed=4").seed == 4


def test_the_default_run_dir_names_command_recipe_and_seed():
    assert str(load("recipe=tiny", "seed=3").run_dir).startswith(f"{Path.cwd()}/runs/tiny-seed3-")
    assert str(load("recipe=tiny", command="sft").run_dir).startswith(f"{Path.cwd()}/runs/sft-tiny-seed1-")


def test_a_new_number_of_terms_can_be_given_a_probability():
    config = load("task.max_terms=8", "task.worked_probability.8=0.5")
    assert isinstance(config.task, ChainSumTaskConfig)
    assert config.task.worked_probability[8] == 0.5


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("rl.group_sise=4", "rl.group_size"),
        ("group_size=4", "rl.group_size"),
        ("algoritm.clip_low=4", "algorithm.clip_low"),
        ("model.architecture.hiden_size=4", "model.architecture.hidden_size"),
        ("optimizer={learning_rate: 1.0}", ""),
    ],
)
def test_an_unknown_key_is_refused_by_its_path_with_the_key_that_was_meant(override: str, meant: str):
    message = error(override)
    assert "unknown key" in message
    assert override.split("=")[0] in message
    assert f"did you mean {meant}" in message or "learning_rate" in override


def test_an_unknown_key_that_resembles_nothing_points_to_the_help():
    assert "--help" in error("zzz=1")


def test_hydras_own_keys_are_unknown():
    assert "hydra.run.dir: unknown key" in error("hydra.run.dir=x")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rl.steps=abc", "a valid integer"),
        ("rl.steps=2.5", "a valid integer"),
        ("rl.steps=50.0", "a valid integer"),
        ("seed=true", "a valid integer"),
        ("rl.group_size=1", "greater than or equal to 2"),
        ("optimizer.lr=fast", "a valid number"),
        ("optimizer.lr=inf", "a finite number"),
        ("optimizer.lr=0", "greater than 0"),
        ("model.dtype=fp16", "'float32' or 'bfloat16'"),
        ("keep_routing.mode=on", "'off', 'rollout' or 'trainer'"),
        ("keep_routing.verify=0", "'every' or 'off' or greater than or equal to 1"),
        ("keep_routing.verify=sometimes", "'every' or 'off' or a valid integer"),
        ("keep_sampling_mask.enabled=1", "a valid boolean"),
        ("rollout.top_k=5000", "less than or equal to 4096"),
        ("rollout.top_p=0", "greater than 0"),
        ("algorithm.clip_low=0.0", "greater than 0"),
        ("algorithm.clip_low=1.5", "less than or equal to 1"),
        ("algorithm.clip_high=0.0", "greater than 0"),
        ("checkpoint.keep=1", "greater than or equal to 2"),
        ("run_dir=5", "a valid string"),
        ("task.worked_probability.4=1.5", "less than or equal to 1"),
    ],
)
def test_a_wrong_value_is_refused_with_path_value_expectation_and_remedy(override: str, expected: str):
    message = error(override)
    path, _, value = override.partition("=")
    assert message.startswith(f"{path}: wrong value; seen: ")
    assert value.lower() in message.lower()
    assert f"expected: {expected}" in message
    assert f"remedy: change {path}" in message


def test_a_number_of_terms_that_is_no_number_is_refused():
    assert "task.worked_probability.x: wrong value; seen: 'x'" in error("task.worked_probability.x=0.5")


def test_further_wrong_keys_are_named_in_the_same_line():
    message = error("rl.steps=abc", "seed=x")
    assert "rl.steps" in message
    assert "seed" in message
    assert "\n" not in message


def test_a_missing_value_is_named():
    assert "task.path: no value given" in error("task=jsonl")
    assert "model.path: no value given" in error("model=pretrained")


NEED_A_MODEL = {"pretrained", "pretrained_small", "math", "code", "gsm8k", "code_problems"}
NEED_ROWS = {"math", "code", "math_small"}


@pytest.mark.parametrize("path", sorted((CONFIGS / "recipe").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_composes_and_names_itself(path: Path, tmp_path: Path):
    write_hf_config(tmp_path, max_position_embeddings=40960)
    of_yours = [f"model.path='{tmp_path}'"] if path.stem in NEED_A_MODEL else []
    of_yours += ["task.path=rows.jsonl"] if path.stem in NEED_ROWS else []
    assert load_plan([f"recipe={path.stem}", *of_yours]).recipe == path.stem


@pytest.mark.parametrize("group", ["recipe", "rollout"])
def test_an_unknown_option_of_a_group_lists_the_ones_there_are(group: str):
    options = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    assert f"expected: one of {', '.join(options)};" in error(f"{group}=nope")


def test_a_key_of_another_task_says_which_task_has_it():
    assert "add task=dataset, or remove task.path" in error("task.path=/x")


def test_a_key_of_another_engine_says_which_engine_has_it():
    assert "add rollout=sglang_server, or remove rollout.server" in error("rollout=sglang", "rollout.server=/x")
    assert "add rollout=sglang, or remove rollout.tensor" in error("rollout.tensor=2")


def test_engines_share_how_responses_are_sampled_and_take_absolute_paths():
    embedded = load_config(["recipe=tiny"], command="train").rollout
    served = load_config(["recipe=tiny", "rollout=sglang"], command="train").rollout
    assert isinstance(served, SGLangRolloutConfig)
    assert served.environment.is_absolute()
    shared = set(SamplingConfig.model_fields)
    assert embedded.model_dump(include=shared) == served.model_dump(include=shared)


def test_an_unknown_engine_is_refused():
    assert "rollout.engine: unknown engine; seen: zz" in error("rollout.engine=zz")


def test_a_server_of_moerl_serve_must_be_named():
    assert "rollout.server: no value given" in error("rollout=sglang_server")


def test_an_unknown_task_name_is_refused():
    assert "task.name: unknown task; seen: zz" in error("task.name=zz")


def test_a_reward_that_names_no_function_is_refused():
    message = error("task=jsonl", "task.path=x.jsonl", "task.reward=score")
    assert 'expected: "package.module:function"' in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("seed", "not an assignment"),
        ("~seed", "not an assignment"),
        ("seed=", "seed: empty value"),
        ("seed=1,2", "one run takes one value"),
        ("algorithm@x=grpo", "one run takes one value"),
        ("run_dir=a=b", "run_dir: the value cannot be read"),
        ("optimizer.lr=[1", "optimizer.lr: the value cannot be read"),
    ],
)
def test_an_override_that_is_not_one_assignment_is_refused(override: str, part: str):
    assert part in error(override)


def test_a_quoted_value_may_hold_special_characters():
    assert load("run_dir='a=b (c)'").run_dir == Path("a=b (c)").resolve()


def test_relative_paths_are_stored_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_hf_config(Path("model"))
    Path("data.jsonl").write_text("")
    config = load(
        *(
            "recipe=laptop",
            "model=pretrained",
            "model.path=model",
            "task=jsonl",
            "task.path=data.jsonl",
            "task.reward=a:b",
        ),
        *("run_dir=run", "rollout.max_new_tokens=9"),
    )
    assert isinstance(config.task, JsonlTaskConfig)
    assert (config.model.path, config.task.path) == (tmp_path / "model", tmp_path / "data.jsonl")
    assert config.run_dir == tmp_path / "run"
    config.run_dir.mkdir()
    (config.run_dir / CONFIG_FILE).write_text(dump_config(config))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load("resume=../run") == config


def test_a_recipe_of_ones_own_builds_on_a_built_in_one(tmp_path: Path):
    folder = tmp_path / "with space"
    folder.mkdir()
    write_recipe(
        folder, "# @package _global_\ndefaults:\n  - laptop\n  - _self_\nrecipe: mine\nkeep_routing:\n  mode: off\n"
    )
    config = load("recipe=mine", config_dir=folder)
    assert (config.recipe, config.keep_routing.mode, config.rl.group_size) == ("mine", "off", 8)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("# @package _global_\nrecipe: mine\nalgoritm: {steps: 3}\n", "algoritm: unknown key"),
        ("# @package _global_\nrecipe: mine\nalgorithm: {steps: [3\n", "line 3"),
        ("# @package _global_\ndefaults: [nope]\nrecipe: mine\n", "recipe/nope"),
        ("# @package _global_\nrecipe: mine\nseed: ${nope}\n", "nope"),
        ("recipe: mine\n", "# @package _global_"),
    ],
)
def test_a_broken_recipe_is_refused_with_its_fault(tmp_path: Path, text: str, part: str):
    assert part in error("recipe=mine", config_dir=write_recipe(tmp_path, text))


def test_a_file_of_ones_own_that_a_built_in_one_would_hide_is_refused(tmp_path: Path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "laptop.yaml").write_text("recipe: laptop\n")
    assert "recipe=laptop is the name of a built-in option" in error(config_dir=tmp_path)


def test_a_config_dir_that_is_not_there_is_refused(tmp_path: Path):
    assert "--config-dir: no such directory" in error(config_dir=tmp_path / "nope")


def test_a_dumped_configuration_reads_back_equal(tmp_path: Path):
    config = load("recipe=tiny", "optimizer.lr=3.3e-7", "keep_routing.mode=off")
    (tmp_path / CONFIG_FILE).write_text(dump_config(config))
    assert load_resolved(tmp_path / CONFIG_FILE) == config


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_FILE).write_text(dump_config(load("recipe=tiny", "seed=9")))
    return tmp_path


def test_resume_takes_the_configuration_of_the_run_and_its_place(run_dir: Path):
    config = load(f"resume={run_dir}")
    assert (config.recipe, config.seed, config.run_dir) == ("tiny", 9, run_dir)


def test_a_run_goes_on_with_the_command_it_was_started_with(run_dir: Path, tmp_path: Path):
    message = error(f"resume={run_dir}", command="sft")
    assert "resume: the run belongs to another command" in message
    assert f"remedy: use `moerl train resume={run_dir}`" in message
    sft = tmp_path / "sft"
    sft.mkdir()
    (sft / CONFIG_FILE).write_text(dump_config(load("recipe=tiny", command="sft")))
    assert f"remedy: use `moerl sft resume={sft}`" in error(f"resume={sft}")


def test_the_command_is_no_key(tmp_path: Path):
    assert "command: unknown key" in error("command=sft")
    recipe = "# @package _global_\nrecipe: mine\ncommand: sft\n"
    assert "command: unknown key" in error("recipe=mine", config_dir=write_recipe(tmp_path, recipe))


def test_resume_of_a_directory_without_a_run_is_refused(tmp_path: Path):
    assert "holds no run" in error(f"resume={tmp_path}")


def test_resume_of_a_damaged_configuration_is_refused(tmp_path: Path):
    (tmp_path / CONFIG_FILE).write_text("seed: [1\n")
    assert "cannot be read" in error(f"resume={tmp_path}")


@pytest.mark.parametrize("command", ["rollout", "eval"])
def test_commands_that_do_not_train_have_nothing_to_resume(run_dir: Path, command: str):
    assert "nothing to go on with" in error(f"resume={run_dir}", command=command)


def test_resume_needs_one_directory():
    for overrides in (["resume="], ["resume=a", "resume=b"]):
        with pytest.raises(ConfigError, match="resume: one run directory"):
            split_resume(overrides)


def test_a_run_dir_that_holds_a_run_is_refused(run_dir: Path):
    with pytest.raises(ConfigError, match=r"run_dir: holds a run already.*resume="):
        refuse_taken_run_dir(load("recipe=tiny", f"run_dir={run_dir}"))
    refuse_taken_run_dir(load("recipe=tiny", f"run_dir={run_dir}/fresh"))
