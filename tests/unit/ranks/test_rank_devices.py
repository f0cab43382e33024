"""Notes of a rank about its device, and refusals there before the rank loads anything."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from factories import SPEC

from moerl.config.load import load_config
from moerl.config.ranks import RankConfig
from moerl.contract.commands import Build, Reply
from moerl.errors import ConfigError
from moerl.machine.torch_start import TF32
from moerl.orchestration.run import Run
from moerl.ranks.devices import device_notes, shares_prompts
from moerl.ranks.group import TrainerGroup
from moerl.ranks.processes import _environment
from moerl.ranks.worker import Worker
from moerl.trainer import platform


def config_of(*overrides: str) -> RankConfig:
    return RankConfig.of(load_config(["recipe=laptop", *overrides], command="train"))


def notes_of(*overrides: str) -> list[str]:
    config = config_of(*overrides)
    return device_notes(config.model, config.trainer)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TF32, raising=False)
    monkeypatch.setattr(platform, "can_share_prompts", lambda: False)
    monkeypatch.setattr(platform, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")


def test_prompts_are_shared_on_a_cpu_unless_the_user_says_no() -> None:
    shares = [shares_prompts(config_of(f"trainer.share_prompts={each}").trainer) for each in ("auto", "true", "false")]
    assert shares == [True, True, False]
    assert config_of().trainer.share_prompts == "auto"
    assert notes_of() == []


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_prompts_are_not_shared_and_it_is_said() -> None:
    assert not shares_prompts(config_of().trainer)
    assert any("trainer.share_prompts=auto" in note for note in notes_of())
    assert not any("prompts" in note for note in notes_of("trainer.share_prompts=false"))


@pytest.mark.usefixtures("gpu")
def test_a_rank_on_a_gpu_refuses_shared_prompts_before_there_is_a_model() -> None:
    with pytest.raises(ConfigError, match=r"remedy: set trainer\.share_prompts=auto"):
        Worker(config_of("trainer.share_prompts=true"), cast(Any, None), lambda done, total: None)


@pytest.mark.usefixtures("gpu")
def test_float32_on_a_gpu_says_how_exact_its_products_are_and_that_attention_takes_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "NVIDIA H200, float32" in notes_of()[0]
    assert any("TF32's" in note and "trainer.tf32=off" in note for note in notes_of())
    assert any("attention in float32 is not fused" in note for note in notes_of())
    assert not any("TF32" in note or "fused" in note for note in notes_of("model.dtype=bfloat16"))
    monkeypatch.setenv(TF32, "0")
    assert any("exact: TF32 is off" in note for note in notes_of())


def test_ranks_in_processes_of_their_own_have_the_precision_in_their_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TF32, raising=False)
    assert TF32 not in _environment(config_of(), 0)
    assert _environment(config_of("trainer.tf32=off"), 0)[TF32] == "0"
    monkeypatch.setenv(TF32, "1")
    assert _environment(config_of("trainer.tf32=off"), 0)[TF32] == "0"
    monkeypatch.setenv(TF32, "0")
    assert _environment(config_of(), 0)[TF32] == "0"


@pytest.mark.parametrize("key", ["rollout=sglang", "algorithm=gspo", "trainer.megatron={use_cpu_initialization: true}"])
def test_ranks_in_other_processes_read_the_configuration_as_it_was(key: str) -> None:
    config = config_of(key)
    assert RankConfig.model_validate_json(config.model_dump_json()) == config


def test_what_a_rank_notes_is_said_once() -> None:
    class Ranks:
        def ask(self, command: Build, frames: object) -> list[Reply]:
            return [Reply(notes=["trainer on a GPU"], shares_prompts=command.stage == "rl")]

    said: list[str] = []
    trainer = TrainerGroup(config_of(), cast(Any, Ranks()))
    run = cast(
        Any,
        SimpleNamespace(
            trainer=trainer, model=SimpleNamespace(spec=SPEC), reporter=SimpleNamespace(notify=said.append), _said=set()
        ),
    )
    Run.build(run, "sft", Path("model"))
    assert not trainer.shares_prompts
    Run.build(run, "rl", Path("model"))
    assert trainer.shares_prompts
    assert said == ["trainer on a GPU"]
