"""Output of `moerl plan weights`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from factories import QWEN3_30B, write_hf_config

from moerl.config.load import load_plan
from moerl.launch.plan_weights import GB, PlannedUpdate
from moerl.weights.estimate import Bandwidths


def plan(folder: Path, *overrides: str, gather: float = 50, engine: float = 50) -> int:
    write_hf_config(folder, **QWEN3_30B)
    model = ["recipe=pretrained", f"model.path='{folder}'"]
    config = load_plan([*model, *overrides])
    bandwidths = Bandwidths(gather * GB, engine * GB)
    return PlannedUpdate(config.model, config.parallel, config.weights, config.rollout, bandwidths).show()


def test_one_sender_takes_as_long_as_its_link_to_the_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert plan(tmp_path, "parallel.expert=8") == 0
    text = capsys.readouterr().out
    assert "18867 tensors of 61.1 GB (bfloat16) on 8 devices: parallel.expert=8 parallel.data=8" in text
    assert "1.22 s at 50 GB/s into a sender and 50 GB/s to engines; 1.22 s of sending" in text
    assert "7 ranks hand parts to senders" in text


def test_the_slower_link_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert plan(tmp_path, "parallel.expert=8", gather=5) == 0
    found = re.search(r"([0-9.]+) s at 5 GB/s .* ([0-9.]+) s of gathering", capsys.readouterr().out)
    assert found is not None
    assert float(found[2]) > 10
    assert float(found[1]) == pytest.approx(float(found[2]), rel=0.02)


def test_several_senders_share_the_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert plan(tmp_path, "parallel.expert=32", "weights.transport=disk", "weights.senders=32") == 0
    text = capsys.readouterr().out
    assert "senders, the slowest 16 of 32" in text
    assert re.search(r"0\.0[45] s at", text)


@pytest.mark.parametrize(("servers", "seconds"), [(1, "1.22"), (64, "1.38")])
def test_servers_of_one_sender_pass_buckets_on_to_one_another(
    servers: int, seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert plan(tmp_path, "parallel.expert=8", "rollout=sglang", f"rollout.servers={servers}") == 0
    assert f"\n{seconds} s at" in capsys.readouterr().out


@pytest.mark.parametrize(("senders", "seconds"), [(2, "2.44"), (8, "1.22")])
def test_each_of_several_senders_sends_to_every_server_and_servers_take_one_bucket_at_a_time(
    senders: int, seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    servers = ("rollout=sglang", "rollout.servers=4", f"weights.senders={senders}")
    assert plan(tmp_path, "parallel.expert=8", *servers) == 0
    text = capsys.readouterr().out
    assert f"\n{seconds} s at" in text
    assert "4 servers: each takes 61.1 GB over its own link, one bucket at a time, 1.22 s" in text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("rollout=sglang", "weights.senders=1"), "late: 61.06 GB in the sender that sends most"),
        (("rollout=sglang", "weights.senders=2"), "late: 30.[0-9]+ GB in the sender that sends most"),
        (("rollout=sglang", "weights.senders=2", "weights.transport=disk"), "late: 61.06 GB in the engine's process"),
        (("rollout=sglang_server", "rollout.server=[a.json,b.json]"), "late: 61.06 GB"),
        (("rollout=sglang_server", "rollout.server=a.json"), r"none \(one server that the run cannot start again\)"),
    ],
)
def test_the_copies_that_ranks_keep_in_host_memory_are_told(
    overrides: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert plan(tmp_path, "parallel.expert=8", *overrides) == 0
    assert re.search(said, capsys.readouterr().out)
