"""Traces of single steps."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moerl.config.load import load_config
from moerl.config.ranks import RankConfig
from moerl.contract.commands import Profile
from moerl.contract.trainer import PROFILES
from moerl.ranks.worker import Worker
from moerl.trainer.profiling import Profiler, named


def ranges(file: Path) -> dict[str, dict[str, Any]]:
    """The named ranges of a trace, by name."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return {event["name"]: event for event in events if event.get("cat") == "user_annotation"}


def spend() -> None:
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))


def test_a_trace_holds_its_ranges_in_their_places(tmp_path: Path):
    profiler = Profiler(tmp_path / "profile")
    profiler.begin(7)
    spend()
    profiler.end_rollout()
    with named("training"), named("proof"):
        spend()
    profiler.end()
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "step-000007.json.gz"
    found = ranges(file)
    assert {"rollout", "training", "proof"} <= found.keys()
    rollout, training, proof = (found[name] for name in ("rollout", "training", "proof"))
    assert rollout["ts"] + rollout["dur"] <= training["ts"] <= proof["ts"]
    assert proof["ts"] + proof["dur"] <= training["ts"] + training["dur"]
    assert any(event["name"] == "aten::mm" for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"])


def test_a_range_is_nothing_while_no_trace_is_recorded(tmp_path: Path):
    profiler = Profiler(tmp_path)
    assert isinstance(named("proof"), nullcontext)
    profiler.begin(1)
    assert not isinstance(named("proof"), nullcontext)
    profiler.end()
    assert isinstance(named("proof"), nullcontext)


def test_a_step_that_failed_leaves_no_trace_and_the_next_one_has_its_own(tmp_path: Path):
    profiler = Profiler(tmp_path)
    profiler.begin(1)
    profiler.begin(2)
    profiler.end()
    assert [file.name for file in tmp_path.iterdir()] == ["step-000002.json.gz"]
    profiler.begin(3)
    profiler.drop()
    profiler.drop()
    assert isinstance(named("proof"), nullcontext)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_writes_a_trace(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moerl.ranks.worker.Saver", lambda store: None)  # asks for a process group
    config = load_config(["recipe=tiny", f"run_dir='{tmp_path}'"], command="train")
    worker = Worker(RankConfig.of(config), cast(Any, SimpleNamespace(rank=rank)), lambda done, total: None)
    worker.run(Profile(2))
    worker.run(Profile(0))
    assert (tmp_path / PROFILES / "step-000002.json.gz").exists() == (rank == 0)
