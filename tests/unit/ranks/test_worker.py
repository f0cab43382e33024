"""What a rank says of its node."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, cast

import pytest
from factories import SPEC

from moerl.config.load import load_config
from moerl.contract.commands import Build
from moerl.errors import ConfigError
from moerl.ranks.worker import Worker


def test_a_model_that_the_node_of_a_rank_does_not_see_is_named_with_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moerl.ranks.worker.Saver", lambda store: None)  # asks for a process group
    config = load_config(["recipe=tiny", f"run_dir='{tmp_path}'"], command="train")
    worker = Worker(config, cast(Any, None), lambda done, total: None)
    with pytest.raises(ConfigError) as refused:
        worker.run(Build("sft", str(tmp_path / "model"), SPEC))
    assert refused.value.seen == f"no {tmp_path / 'model' / 'config.json'} on {socket.gethostname()}"
    assert "HF_HOME" in refused.value.remedy
