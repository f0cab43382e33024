from __future__ import annotations

from pathlib import Path

import pytest

from moerl.errors import EngineError
from moerl.rollout.sglang.server import ServerOptions, SGLangServer, free_port, launch_options


def options(**changes: object) -> ServerOptions:
    return ServerOptions(Path("/model"), Path("/nowhere/env"), **changes)  # pyright: ignore[reportArgumentType]


def test_a_public_address_is_refused_before_anything_starts(tmp_path: Path):
    with pytest.raises(EngineError, match="server address"):
        SGLangServer(options(host="0.0.0.0"), tmp_path / "server")
    assert not (tmp_path / "server").exists()


def test_an_environment_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path):
    with pytest.raises(EngineError, match="moerl sglang install"):
        SGLangServer(options(), tmp_path / "server")
    assert not (tmp_path / "server").exists()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_server_captures_routes_samples_in_torch_and_labels_its_weights(device: str):
    chosen = launch_options(options(device=device, policy_version=4, tensor=2), 99)
    assert chosen["enable-return-routed-experts"]
    assert chosen["sampling-backend"] == "pytorch"
    assert chosen["skip-tokenizer-init"]
    assert chosen["log-level-http"] == "warning"
    assert (chosen["weight-version"], chosen["port"], chosen["tensor-parallel-size"]) == ("4", 99, 2)
    assert ("attention-backend" in chosen) == (device == "cpu")
    assert ("sleep-on-idle" in chosen) == (device == "cpu")
    assert ("min-free-slots-delay" in chosen) == (device == "cpu")
    assert "json-model-override-args" not in chosen
    assert chosen["expert-parallel-size"] == 1
    assert launch_options(options(device=device, tensor=4, expert=2), 99)["expert-parallel-size"] == 2


def test_a_pool_on_cpu_is_bounded_and_one_on_gpus_takes_what_there_is():
    assert launch_options(options(device="cpu"), 99)["max-total-tokens"] == 65536
    assert "max-total-tokens" not in launch_options(options(device="cuda"), 99)
    assert launch_options(options(device="cpu", max_pool_tokens=700), 99)["max-total-tokens"] == 700


def test_a_server_on_the_trainers_gpus_takes_its_share_of_their_memory_and_can_give_it_back():
    chosen = launch_options(options(device="cuda", memory_share=0.4, sleeps=True), 99)
    assert (chosen["mem-fraction-static"], chosen["enable-memory-saver"]) == (0.4, True)
    assert not {"mem-fraction-static", "enable-memory-saver"} & launch_options(options(device="cuda"), 99).keys()


def test_weights_that_the_trainer_did_not_send_have_no_version():
    assert launch_options(options(policy_version=-1), 99)["weight-version"] == "none"


def test_ids_beyond_the_tokenizer_are_closed():
    assert launch_options(options(vocab_size=87), 99)["json-model-override-args"] == '{"sampled_vocab_size": 87}'


def test_a_free_port_can_be_bound():
    assert 1024 < free_port("127.0.0.1") < 65536


def test_arguments_that_are_passed_on_reach_the_server_as_they_are():
    passed = {"attention_backend": "fa3", "chunked_prefill_size": 4096, "disable_radix_cache": True}
    chosen = launch_options(options(device="cuda", passed_on=passed), 99)
    assert {name: chosen[name] for name in ("attention-backend", "chunked-prefill-size", "disable-radix-cache")} == {
        "attention-backend": "fa3",
        "chunked-prefill-size": 4096,
        "disable-radix-cache": True,
    }
    assert chosen.items() >= launch_options(options(device="cuda"), 99).items()


def test_an_argument_that_servers_on_a_cpu_need_as_it_is_cannot_be_passed_on():
    with pytest.raises(EngineError, match=r"rollout\.server_args\.attention_backend: set by moerl for servers on cpu"):
        launch_options(options(device="cpu", passed_on={"attention_backend": "fa3"}), 99)
