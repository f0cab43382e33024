"""Settings that are passed on to SGLang and Megatron as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from moerl.cli import main
from moerl.config.checks import config_notes
from moerl.config.load import CONFIG_FILE, dump_config, load_config, load_resolved
from moerl.config.megatron_names import MEGATRON_FIXED, MEGATRON_KEYS, MEGATRON_OPEN
from moerl.config.passed_on import SERVER_FIXED, SERVER_KEYS, check_passed_on
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
    assert "cannot be passed on; seen: 1; expected: no value: a server of a run" in error(
        *SERVED, "rollout.server_args.port=1"
    )
    assert "cannot be passed on; seen: True; expected: no value: experts stay" in error(
        *SERVED, "rollout.server_args.enable_eplb=true"
    )
    assert "cannot be passed on; seen: 0.1; expected: no value: the loss" in error(
        "recipe=tiny", "trainer.megatron.hidden_dropout=0.1"
    )
    assert not MEGATRON_KEYS.keys() & MEGATRON_FIXED
    assert not SERVER_KEYS.keys() & SERVER_FIXED


@pytest.mark.parametrize(
    ("section", "key", "names"), [("rollout", "server_args", SERVER_FIXED), ("trainer", "megatron", MEGATRON_FIXED)]
)
def test_no_name_with_a_reason_is_passed_on(section: str, key: str, names: Mapping[str, str]):
    config = load(*SERVED)
    for forbidden, why in names.items():
        changed = {section: getattr(config, section).model_copy(update={key: {forbidden: 3}})}
        with pytest.raises(ConfigError) as caught:
            check_passed_on(changed.get("trainer", config.trainer), changed.get("rollout", config.rollout))
        message = f"{section}.{key}.{forbidden}: cannot be passed on; seen: 3; expected: no value: {why};"
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pp_size", "rollout.tensor"),
        ("pipeline_parallel_size", "rollout.tensor"),
        ("dp_size", "rollout.servers"),
        ("gpu_id_step", "rollout.placement"),
        ("enable_dp_attention", "no other split of a model"),
        ("nnodes", "on one machine"),
        ("speculative_algorithm", "no kept sets"),
        ("speculative_num_steps", "no kept sets"),
        ("enable_hierarchical_cache", "wrong routing rows"),
        ("hicache_ratio", "wrong routing rows"),
        ("disaggregation_mode", "whole responses"),
    ],
)
def test_servers_get_no_other_places_drafts_or_caches_than_the_plan_and_the_handshake_know(name: str, why: str):
    assert re.search(
        rf"rollout\.server_args\.{name}: .*; expected: .*{why}", error(*SERVED, f"rollout.server_args.{name}=2")
    )


@pytest.mark.parametrize(
    "name", ["rotary_base", "layernorm_epsilon", "normalization", "activation_func", "moe_router_topk_scaling_factor"]
)
def test_megatron_computes_the_model_that_its_config_json_describes(name: str):
    message = error("recipe=tiny", f"trainer.megatron.{name}=5")
    assert "cannot be passed on; seen: 5; expected: no value: the model's config.json decides" in message


def test_layers_of_stages_are_those_of_the_layout():
    message = error("recipe=tiny", "trainer.megatron.num_layers_in_first_pipeline_stage=1")
    assert "expected: parallel.pipeline" in message


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("moe_permute_fuson", "did you mean moe_permute_fusion?"),
        ("rotary_bas", "did you mean rotary_base?"),
        ("zzz", "leave it away"),
    ],
)
def test_a_name_that_megatron_does_not_have_is_refused_before_a_start(name: str, remedy: str):
    message = error("recipe=tiny", f"trainer.megatron={{{name}: true}}")
    assert f"trainer.megatron.{name}: not known as a setting of Megatron; seen: True" in message
    assert f"remedy: {remedy}" in message


def test_settings_that_say_how_a_model_is_computed_are_passed_on():
    named = ", ".join(f"{name}: 1" for name in MEGATRON_OPEN)
    config = load("recipe=tiny", f"trainer.megatron={{{named}}}")
    assert config.trainer.megatron == dict.fromkeys(MEGATRON_OPEN, 1)


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
