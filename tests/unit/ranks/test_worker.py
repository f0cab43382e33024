"""What a rank says of its node."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from factories import SPEC

from moerl.config.load import load_config
from moerl.contract.commands import Build
from moerl.contract.trainer import Stage
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


@pytest.mark.parametrize(("stage", "threads"), [("sft", 4), ("rl", 2)])
def test_a_rank_leaves_threads_to_the_engine_beside_it_once_that_samples(
    stage: Stage, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
):
    monkeypatch.setattr("moerl.ranks.worker.Saver", lambda store: None)
    keys = ["recipe=tiny", "rollout.placement=beside", "num_threads=4", f"run_dir='{tmp_path}'"]
    worker = Worker(load_config(keys, command="train"), cast(Any, None), lambda done, total: None)
    with pytest.raises(ConfigError, match=r"config\.json"):
        worker.run(Build(stage, str(tmp_path / "model"), SPEC))
    assert torch.get_num_threads() == threads
