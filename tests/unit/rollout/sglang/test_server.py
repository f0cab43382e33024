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
    assert (chosen["weight-version"], chosen["port"], chosen["tensor-parallel-size"]) == ("4", 99, 2)
    assert ("attention-backend" in chosen) == (device == "cpu")
    assert "max-total-tokens" not in chosen


def test_a_free_port_can_be_bound():
    assert 1024 < free_port("127.0.0.1") < 65536
