"""Output of `moerl plan memory`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from factories import write_hf_config

from moerl.config.load import load_plan
from moerl.config.run_memory import GIB, Machine
from moerl.config.schema import RunConfig
from moerl.launch.checks.facts import Facts
from moerl.launch.plan import plan_memory

LARGE = {"hidden_size": 1024, "num_hidden_layers": 8, "num_experts": 64, "moe_intermediate_size": 512}


def gpus(gib: float) -> Machine:
    return Machine(gib * GIB, gpus_per_node=8)


def large_model(folder: Path, *overrides: str) -> RunConfig:
    """0.8B parameters and few rows: the state is what counts."""
    write_hf_config(folder, **LARGE)
    model = ["recipe=laptop", "model=pretrained", f"model.path='{folder}'", "model.dtype=bfloat16"]
    return load_plan([*model, "trainer.microbatch_tokens=128", *overrides])


def test_a_layout_that_fits_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert plan_memory(Facts("plan", large_model(tmp_path, "parallel.expert=4"), gpus(10))) == 0
    text = capsys.readouterr().out
    assert text.startswith("0.8B parameters on 4 devices: parallel.expert=4 parallel.data=4\n")
    assert "heaviest rank\n" in text
    assert "optimizer state" in text
    assert re.search(r"GPU of a rank +. total +. +(\d+\.\d\d . +){3}9\.0 ", text), text
    assert "does not fit" not in text


def test_a_layout_that_does_not_fit_names_near_ones_that_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = large_model(tmp_path, "parallel.data=4")
    assert plan_memory(Facts("plan", config, gpus(10))) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4].startswith("does not fit: parallel: a rank of the trainer does not fit a GPU: 1")
    assert "expected: at most 9.0 GiB, 90% of 10.0 GiB" in lines[-4]
    for line in lines[-3:]:
        fitting = line.partition(": ")[2].split()
        again = large_model(tmp_path, "parallel.data=4", *fitting)
        assert again.parallel.world_size == 4
        assert plan_memory(Facts("plan", again, gpus(10))) == 0


def test_where_no_layout_fits_the_remedy_is_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = large_model(tmp_path, "parallel.pipeline=2")
    assert plan_memory(Facts("plan", config, gpus(1))) == 1
    text = capsys.readouterr().out
    assert "heaviest rank, pipeline stage" in text
    assert "take more of them, trainer.recompute=full, trainer.distributed_optimizer=on" in text
    assert "trainer.optimizer_offload=1 or a smaller" in text
    assert "model.dtype" not in text


def test_hosts_are_shown_and_compared_where_their_memory_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = large_model(tmp_path, "parallel.expert=4")
    assert plan_memory(Facts("plan", config, gpus(10))) == 0
    text = capsys.readouterr().out
    assert "checkpoint" in text
    assert "not known" in text
    assert plan_memory(Facts("plan", config, Machine(10 * GIB, 8, host_bytes=2 * GIB))) == 1
    assert "does not fit: memory of a host: a run does not fit one of its machines: " in capsys.readouterr().out
