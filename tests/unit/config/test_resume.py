"""Settings that may change when a run goes on, and messages about the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.config.load import CONFIG_FILE, dump_config, load_config
from moerl.config.reference import config_keys
from moerl.config.resume import Change, change_note, changed_keys, reason_against
from moerl.errors import ConfigError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_FILE).write_text(dump_config(load_config(["recipe=tiny", "seed=9"], command="train")))
    return tmp_path


def resumed(run_dir: Path, *overrides: str, command: str = "train"):
    return load_config([f"resume={run_dir}", *overrides], command=command)


def error(run_dir: Path, *overrides: str, command: str = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        resumed(run_dir, *overrides, command=command)
    return str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "rl.steps=80",
        "evaluation.every=7",
        "evaluation.heldout_problems=3",
        "checkpoint.every=9",
        "dump.rollouts_every=0",
        "mismatch.every=0",
        "quarantine.max_rate=0.5",
        "metrics.project=other",
        "rollout.max_new_tokens=20",
        "rollout.max_running=2",
        "trainer.max_skipped_updates=5",
        "trainer.microbatch_tokens=1024",
        "weights.step_seconds=10.0",
        "keep_routing.verify=off",
        "parallel.expert=2",
    ],
)
def test_a_run_goes_on_with_another_value_of_what_may_change(override: str, run_dir: Path):
    config = resumed(run_dir, override)
    before = resumed(run_dir)
    key, _, value = override.partition("=")
    [change] = changed_keys(before, config)
    assert (change.key, str(change.new)) == (key, value)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("seed=1", "the order of prompts"),
        ("optimizer.lr=1.0", "the optimizer state"),
        ("model.dtype=bfloat16", "the checkpoints hold"),
        ("rl.prompts_per_step=8", "which prompts come next"),
        ("rl.minibatches=2", "the learning-rate schedule counts"),
        ("algorithm.clip_high=0.3", "the loss would change"),
        ("rollout.top_k=5", "what is sampled would change"),
        ("task.min_terms=3", "problems and rewards follow from it"),
        ("sft.steps=9", "reinforcement learning starts from the cold start"),
        ("run_dir=elsewhere", "a run goes on in its directory"),
    ],
)
def test_what_may_not_change_says_why(override: str, reason: str, run_dir: Path):
    key = override.partition("=")[0]
    message = error(run_dir, override)
    assert message.startswith(f"{key}: cannot change when a run goes on: ")
    assert reason in message
    assert "moerl export" in message


def test_every_key_may_change_or_has_its_reason():
    for key in config_keys():
        reason = reason_against(key.path, "train")
        assert reason is None or len(reason) > 10, key.path


@pytest.mark.parametrize(
    ("override", "meant"), [("rl.stepps=4", "rl.steps"), ("checkpoint.evry=4", "checkpoint.every")]
)
def test_a_misspelt_key_is_called_misspelt(override: str, meant: str, run_dir: Path):
    message = error(run_dir, override)
    assert message.startswith(f"{override.partition('=')[0]}: unknown key")
    assert f"did you mean {meant}?" in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("rl.steps=abc", "rl.steps: wrong value; seen: 'abc' (str); expected: a valid integer"),
        ("rl.steps=0", "rl.steps: wrong value"),
        ("evaluation.every=-1", "greater than or equal to 0"),
        ("rollout.max_new_tokens=512", "trainer.microbatch_tokens: does not hold one response"),
        ("rollout.servers=2", "rollout.servers: not a key of rollout embedded"),
    ],
)
def test_a_wrong_value_is_refused_as_at_the_start(override: str, part: str, run_dir: Path):
    assert part in error(run_dir, override)


@pytest.mark.parametrize("override", ["parallel=ep2", "checkpoint={every: 3}"])
def test_groups_and_sections_are_given_key_by_key(override: str, run_dir: Path):
    section = override.partition("=")[0]
    assert f"give its keys one by one, for example {section}." in error(run_dir, override)


@pytest.mark.parametrize("override", ["recipe=laptop", "model=laptop", "rollout=sglang", "task=jsonl"])
def test_another_recipe_or_group_is_refused(override: str, run_dir: Path):
    assert f"{override.partition('=')[0]}: cannot change when a run goes on" in error(run_dir, override)


def test_a_cold_start_on_its_own_can_be_made_longer(tmp_path: Path):
    (tmp_path / CONFIG_FILE).write_text(dump_config(load_config(["recipe=tiny"], command="sft")))
    assert resumed(tmp_path, "sft.steps=9", command="sft").sft.steps == 9


def test_a_schedule_that_depends_on_the_number_of_steps_is_stretched_and_that_is_said(run_dir: Path):
    config = resumed(run_dir, "rl.steps=80")
    change = Change("rl.steps", 3, 80)
    constant = config.optimizer
    assert change_note(change, constant, constant) == ""
    decaying = constant.model_copy(update={"schedule": "linear"})
    assert change_note(change, decaying, constant) == (
        "optimizer.schedule=linear is stretched: from here on the learning rate is that of a run of 80 steps"
    )
    assert change_note(Change("checkpoint.every", 3, 80), decaying, decaying) == ""
