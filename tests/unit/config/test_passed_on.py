"""Settings that are passed on to SGLang and Megatron as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from moerl.cli import main
from moerl.config.checks import config_notes
from moerl.config.load import CONFIG_FILE, dump_config, load_config, load_resolved
from moerl.config.passed_on import MEGATRON_FIXED, MEGATRON_KEYS, SERVER_FIXED, SERVER_KEYS
from moerl.config.reference import is_known
from moerl.config.schema import RunConfig
from moerl.contract.trajectory import MAX_KEPT_IDS
from moerl.errors import ConfigError
from moerl.rollout.sglang.server import ServerOptions, launch_options

SERVED = ("recipe=tiny", "rollout=sglang")


def load(*overrides: str) -> RunConfig:
    return load_config(list(overrides), command="train")


def error(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


def test_both_are_recorded_and_marked_as_not_checked(tmp_path: Path):
    config = load(
        *SERVED,
        "rollout.server_args={attention_backend: fa3}",
        "rollout.server_args.lora_paths=[a,b]",
        "trainer.megatron={moe_deepep_num_sms: 8}",
    )
    (tmp_path / CONFIG_FILE).write_text(dump_config(config))
    assert load_resolved(tmp_path / CONFIG_FILE) == config
    values = yaml.safe_load(dump_config(config))
    assert values["trainer"]["megatron"] == {"moe_deepep_num_sms": 8}
    assert values["rollout"]["server_args"] == {"attention_backend": "fa3", "lora_paths": ["a", "b"]}
    marks = [line for line in dump_config(config).splitlines() if line.endswith("not checked by moerl")]
    assert [line.split(" = ")[0] for line in marks] == ["# trainer.megatron", "# rollout.server_args"]
    assert config_notes(config)[:2] == [line.removeprefix("# ") for line in marks]


def test_show_config_marks_what_is_passed_on(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "recipe=tiny", "trainer.megatron={moe_deepep_num_sms: 8}", "--show-config"]) == 0
    assert '\n# trainer.megatron = {"moe_deepep_num_sms": 8}: not checked by moerl\n' in capsys.readouterr().out


def test_a_run_that_passes_nothing_on_has_no_mark():
    assert "not checked" not in dump_config(load(*SERVED))


@pytest.mark.parametrize(("name", "key"), SERVER_KEYS.items())
def test_an_argument_of_servers_that_a_key_sets_is_refused_with_the_key(name: str, key: str):
    assert is_known(key)
    message = error(*SERVED, f"rollout.server_args.{name}=3")
    assert f"rollout.server_args.{name}: has a key of its own; seen: 3; expected: {key}" in message


@pytest.mark.parametrize(("name", "key"), MEGATRON_KEYS.items())
def test_a_setting_of_megatron_that_a_key_sets_is_refused_with_the_key(name: str, key: str):
    assert is_known(key)
    message = error("recipe=tiny", f"trainer.megatron.{name}=3")
    assert f"trainer.megatron.{name}: has a key of its own; seen: 3; expected: {key}" in message


def test_what_moerl_sets_without_a_key_is_refused_with_the_reason():
    assert "set by moerl; seen: 1; expected: no value: a server of a run" in error(
        *SERVED, "rollout.server_args.port=1"
    )
    assert "set by moerl; seen: True; expected: no value: experts stay" in error(
        *SERVED, "rollout.server_args.enable_eplb=true"
    )
    assert "set by moerl; seen: 0.1; expected: no value: the loss" in error(
        "recipe=tiny", "trainer.megatron.hidden_dropout=0.1"
    )
    assert not MEGATRON_KEYS.keys() & MEGATRON_FIXED
    assert not SERVER_KEYS.keys() & SERVER_FIXED


@pytest.mark.parametrize("value", ["null", "{a: 1}", "[{a: 1}]", "[null]"])
def test_values_are_plain(value: str):
    assert "numbers, true, false, text, and lists of them" in error("recipe=tiny", f"trainer.megatron.timers={value}")


def test_names_are_written_with_underscores():
    assert "should match pattern" in error(*SERVED, "rollout.server_args={attention-backend: fa3}")


def test_other_engines_have_no_server_args():
    assert "add rollout=sglang" in error("recipe=tiny", "rollout.server_args.attention_backend=fa3")


def test_every_option_that_servers_on_gpus_get_is_refused_by_name():
    options = ServerOptions(
        Path("/model"), Path("/env"), max_pool_tokens=9, memory_share=0.5, sleeps=True, vocab_size=MAX_KEPT_IDS
    )
    ours = {name.replace("-", "_") for name in launch_options(options, 1)} | {"api_key", "admin_api_key"}
    assert ours <= SERVER_KEYS.keys() | SERVER_FIXED.keys()


def test_a_run_that_goes_on_takes_other_server_args_and_the_same_settings_of_megatron(tmp_path: Path):
    (tmp_path / CONFIG_FILE).write_text(dump_config(load(*SERVED)))
    resumed = load(f"resume={tmp_path}", "rollout.server_args.attention_backend=fa3")
    assert resumed.model_dump()["rollout"]["server_args"] == {"attention_backend": "fa3"}
    message = error(f"resume={tmp_path}", "trainer.megatron.moe_deepep_num_sms=8")
    assert "trainer.megatron.moe_deepep_num_sms: cannot change when a run goes on: moerl does not know" in message


def test_runs_of_before_pass_nothing_on_and_share_nothing(tmp_path: Path):
    values = yaml.safe_load(dump_config(load(*SERVED)))
    del (
        values["rollout"]["server_args"],
        values["rollout"]["expert"],
        values["trainer"]["megatron"],
        values["trainer"]["profile_steps"],
    )
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(values))
    load(f"resume={tmp_path}", "rollout.server_args.attention_backend=fa3")
    config = load(f"resume={tmp_path}")
    rollout = config.model_dump()["rollout"]
    assert (rollout["server_args"], rollout["expert"]) == ({}, 1)
    assert (config.trainer.megatron, config.trainer.profile_steps) == ({}, [])
