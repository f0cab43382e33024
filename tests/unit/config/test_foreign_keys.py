"""Keys of other trainers, answered with ours."""

from __future__ import annotations

import pytest

from moerl.config.checks import COMMANDS
from moerl.config.foreign_keys import COUNTERPARTS, counterpart, trainer_of
from moerl.config.load import load_config
from moerl.config.reference import is_known
from moerl.errors import ConfigError

ALL = [(trainer_of(name), name, ours) for ours, theirs in COUNTERPARTS.items() for name in theirs.split()]


def error(override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(["recipe=tiny", override], command="train")
    return str(caught.value)


@pytest.mark.parametrize(("trainer", "name", "ours"), ALL, ids=lambda value: str(value))
def test_a_key_of_another_trainer_has_one_of_ours(trainer: str, name: str, ours: str):
    assert is_known(ours.partition("=")[0]) or ours.removeprefix("moerl ") in COMMANDS
    assert not is_known(name)
    found = counterpart(name)
    assert found is not None
    assert trainer in found[0].split(" and ")
    assert found[1] == ours


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n: a key of verl; expected: rl.group_size"),
        ("data.train_batch_size=8", "a key of verl; expected: rl.prompts_per_step"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "a key of verl; expected: algorithm.kl_coef"),
        ("+actor_rollout_ref.rollout.engine_kwargs.sglang.a=1", "a key of verl; expected: rollout.server_args"),
        ("n_samples_per_prompt=8", "a key of slime; expected: rl.group_size"),
        ("debug_train_only=true", "a key of slime; expected: rollout=dumps; remedy: set rollout=dumps;"),
        ("debug_rollout_only=true", "a key of slime; expected: moerl rollout; remedy: run `moerl rollout`"),
        ("load_debug_rollout_data=/dump", "a key of slime; expected: rollout.path"),
        ("trainer.val_only=true", "a key of verl; expected: moerl eval; remedy: run `moerl eval`"),
        (
            "actor_rollout_ref.actor.megatron.param_offload=true",
            "a key of verl; expected: trainer.sleep; remedy: set trainer.sleep=VALUE",
        ),
        (
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=512",
            "a key of verl; expected: algorithm.overlong_buffer;",
        ),
        ("adam_beta2=0.98", "a key of slime; expected: optimizer.beta2; remedy: set optimizer.beta2=VALUE"),
        ("warmup_ratio=0.1", "a key of TRL; expected: optimizer.warmup_steps;"),
        ("num_generations=8", "a key of TRL; expected: rl.group_size; remedy: set rl.group_size=VALUE"),
    ],
)
def test_the_error_for_a_key_of_another_trainer_names_ours(override: str, said: str):
    assert said in error(override)


def test_a_name_that_two_trainers_have_is_said_to_be_of_both_and_means_the_same():
    assert counterpart("weight_decay") == ("slime and TRL", "optimizer.weight_decay")
    names = [name.lstrip("-").replace("-", "_") for _, name, _ in ALL]
    for shared in {name for name in names if names.count(name) > 1}:
        assert len({ours for _, name, ours in ALL if name.lstrip("-").replace("-", "_") == shared}) == 1


def test_a_name_that_is_ours_in_some_section_is_answered_with_that_section():
    assert "did you mean optimizer.lr" in error("lr=1")


@pytest.mark.parametrize("name", ["actor_rollout_ref", "zzz", "--zzz", "trainer.foo", ""])
def test_what_no_trainer_has_has_no_counterpart(name: str):
    assert counterpart(name) is None
