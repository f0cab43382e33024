"""A rank: what it says of its node, and when its models rest."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from factories import SPEC

from moerl.config.load import load_config
from moerl.config.ranks import RankConfig
from moerl.contract.commands import AnyCommand, Build, KeepWeights, Publish, Reply
from moerl.contract.trainer import Stage
from moerl.contract.weight_update import UpdateKind
from moerl.errors import ConfigError
from moerl.ranks.worker import Worker


def test_a_model_that_the_node_of_a_rank_does_not_see_is_named_with_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moerl.ranks.worker.Saver", lambda store: None)  # asks for a process group
    config = load_config(["recipe=tiny", f"run_dir='{tmp_path}'"], command="train")
    worker = Worker(RankConfig.of(config), cast(Any, None), lambda done, total: None)
    with pytest.raises(ConfigError) as refused:
        worker.run(Build("sft", str(tmp_path / "model"), SPEC))
    assert refused.value.seen == f"no {tmp_path / 'model' / 'config.json'} on {socket.gethostname()}"
    assert "HF_HOME" in refused.value.remedy


@pytest.mark.parametrize(("stage", "threads"), [("sft", 4), ("rl", 2)])
def test_a_rank_leaves_threads_to_the_engine_beside_it_once_that_samples(
    stage: Stage, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
):
    monkeypatch.setattr("moerl.ranks.worker.Saver", lambda store: None)
    keys = ["recipe=tiny", "rollout.placement=process", "num_threads=4", f"run_dir='{tmp_path}'"]
    worker = Worker(RankConfig.of(load_config(keys, command="train")), cast(Any, None), lambda done, total: None)
    with pytest.raises(ConfigError, match=r"config\.json"):
        worker.run(Build(stage, str(tmp_path / "model"), SPEC))
    assert torch.get_num_threads() == threads


class RestingModel:
    """Stands in for a trainer; calls: of it and of others, in order."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def rest(self) -> None:
        self.calls.append(f"{self.name} rests")


@pytest.mark.parametrize("sleeps", [True, False])
def test_models_rest_between_their_last_bucket_and_the_reply_after_which_servers_go_on(
    sleeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moerl.ranks.worker.Saver", lambda store: None)
    config = load_config(["recipe=tiny", f"run_dir='{tmp_path}'"], command="train")
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"sleep": sleeps})})
    worker, calls, sent = (
        Worker(RankConfig.of(config), cast(Any, None), lambda done, total: None),
        list[str](),
        Reply(checksums={"a": 1}),
    )

    def run(command: AnyCommand) -> Reply:
        calls.append(command.name)
        return sent

    models = [RestingModel(name, calls) for name in ("trainer", "reference")]
    worker._weights = cast(Any, SimpleNamespace(run=run))
    worker._policy, worker._reference = cast(Any, models)
    assert worker.run(Publish(3, UpdateKind.FULL, None)) is sent
    assert calls == ["publish", *(["trainer rests", "reference rests"] if sleeps else [])]
    worker.run(KeepWeights(3))
    assert calls[-1] == "keepweights"
