"""Use of this machine's GPU by a command."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moerl.config.load import load_config
from moerl.errors import ConfigError
from moerl.orchestration.commands import _check_device
from moerl.rollout import loading
from moerl.rollout.host import engine_device
from moerl.rollout.loading import load_sampler


def test_a_gpu_that_is_too_small_is_refused_and_a_cpu_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(["recipe=laptop"], command="train")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _check_device(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**28))
    with pytest.raises(ConfigError, match="does not fit on its GPU"):
        _check_device(config)


def test_the_engine_samples_on_the_gpu_of_its_process_but_for_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_device("bfloat16") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert engine_device("bfloat16") == torch.device("cuda", 1)
    assert engine_device("float8") == torch.device("cpu")


def test_a_sampler_is_moved_to_that_device(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(loading, "load_model", lambda folder, dtype: torch.nn.Linear(2, 2, dtype=dtype))
    monkeypatch.setattr(loading, "engine_device", lambda dtype: torch.device("meta"))
    assert load_sampler(tmp_path, "bfloat16").weight.device.type == "meta"
