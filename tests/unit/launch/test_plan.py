"""What `moerl plan memory` prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import write_hf_config

from moerl.config.load import load_plan
from moerl.config.schema import RunConfig
from moerl.launch.plan import plan_memory

LARGE = {"hidden_size": 1024, "num_hidden_layers": 8, "num_experts": 64, "moe_intermediate_size": 512}


def large_model(folder: Path, *overrides: str) -> RunConfig:
    """0.8B parameters and few rows: the state is what counts."""
    write_hf_config(folder, **LARGE)
    model = ["recipe=laptop", "model=pretrained", f"model.path='{folder}'", "model.dtype=bfloat16"]
    return load_plan([*model, "trainer.microbatch_tokens=128", *overrides])


def test_a_layout_that_fits_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert plan_memory(large_model(tmp_path, "parallel.expert=4"), gpu_memory_gib=10) == 0
    text = capsys.readouterr().out
    assert text.startswith("0.8B parameters on 4 devices: parallel.expert=4 parallel.data=4\n")
    assert "heaviest rank\n" in text
    assert "optimizer state" in text
    assert "of the 9.0 GiB that may be filled of 10 GiB" in text


def test_a_layout_that_does_not_fit_names_near_ones_that_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = large_model(tmp_path, "parallel.data=4")
    assert plan_memory(config, gpu_memory_gib=8) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4].startswith("does not fit: 1")
    for line in lines[-3:]:
        fitting = line.partition(": ")[2].split()
        again = large_model(tmp_path, "parallel.data=4", *fitting)
        assert again.parallel.world_size == 4
        assert plan_memory(again, gpu_memory_gib=8) == 0


def test_where_no_layout_fits_the_remedy_is_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = large_model(tmp_path, "parallel.pipeline=2")
    assert plan_memory(config, gpu_memory_gib=1) == 1
    text = capsys.readouterr().out
    assert "heaviest rank, pipeline stage" in text
    assert "take more of them, trainer.recompute=full, trainer.distributed_optimizer=overlap or a smaller" in text
    assert "model.dtype" not in text
