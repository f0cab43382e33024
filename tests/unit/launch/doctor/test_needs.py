"""What a run needs, against what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import write_hf_model
from small_hub import Cache, hub

from moerl.config.hub import prepare_model
from moerl.config.load import load_plan
from moerl.config.schema import RunConfig
from moerl.launch.doctor.accelerators import Gpu
from moerl.launch.doctor.check import Check
from moerl.launch.doctor.needs import checkpoint_bytes, environment_of, run_checks

GIB = 2**30


def run(*overrides: str) -> RunConfig:
    return load_plan([*overrides])


def looks(config: RunConfig, gpus: int = 0, mib: float = 81_559.0, cores: int = 64) -> dict[str, Check]:
    there = [Gpu("H100", "580", mib, 0.0)] * gpus
    return {check.name: check for check in run_checks(config, there, cores, 64 * GIB)}


def test_the_demo_needs_nothing_that_is_not_here() -> None:
    assert {check.level for check in looks(run("recipe=laptop")).values()} == {"green"}


def test_ranks_without_cores_are_a_note() -> None:
    found = looks(run("recipe=tiny", "parallel.tensor=2"), cores=1)["cores"]
    assert (found.level, found.expected) == ("yellow", "2 cores")


def test_ranks_without_gpus_are_a_fault() -> None:
    config = run("recipe=tiny", "parallel.tensor=2")
    assert looks(config, gpus=1)["GPUs of the run"].level == "red"
    assert looks(config, gpus=2)["GPUs of the run"].level == "green"


def test_servers_without_gpus_are_a_fault() -> None:
    config = run("recipe=tiny", "rollout=sglang", "rollout.servers=2", "rollout.tensor=2")
    found = looks(config, gpus=4)["GPUs of the run"]
    assert (found.level, found.expected) == ("red", "5 GPUs")
    assert found.seen == "4 GPUs for 1 ranks of the trainer, 4 of servers"
    assert looks(config, gpus=5)["GPUs of the run"].level == "green"
    assert environment_of(config) is not None
    assert environment_of(run("recipe=tiny")) is None


def test_a_rank_that_does_not_fit_is_a_fault() -> None:
    config = run("recipe=laptop", "model.architecture.num_experts=512", "model.architecture.moe_intermediate_size=4096")
    found = looks(config, gpus=1, mib=4096.0)["memory of a rank"]
    assert (found.level, "moerl plan memory" in found.remedy) == ("red", True)
    assert looks(config, gpus=1)["memory of a rank"].level == "green"


def test_a_file_that_the_task_names_and_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    missing = tmp_path / "no.jsonl"
    found = looks(run("recipe=tiny", "task=jsonl", f"task.path='{missing}'", "task.reward=rewards:score"))
    assert found["configuration"].level == "red"
    assert str(missing) in found["configuration"].seen


def test_a_server_file_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    missing = tmp_path / "server.json"
    found = looks(run("recipe=tiny", "rollout=sglang_server", f"rollout.server='{missing}'"))
    assert found["server.json files"].level == "red"


def test_room_grows_with_the_checkpoints_that_are_kept() -> None:
    two, four = (checkpoint_bytes(run("recipe=laptop", f"checkpoint.keep={keep}")) for keep in (2, 4))
    assert four / two == 5 / 3
    assert two > 1e6


def test_weights_of_the_hub_that_are_not_fetched_yet_are_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_hf_model(folder, max_position_embeddings=512)
    models = {"owner/moe": {"main": {file.name: file.read_bytes() for file in folder.iterdir()}}}
    lengths = ["rollout.max_new_tokens=16", "trainer.microbatch_tokens=256"]
    keys = ["recipe=pretrained_small", "task=chain_sum", *lengths, "model.path=owner/moe"]
    with hub(models, kind="models") as (address, _):
        Cache(monkeypatch).use(tmp_path / "home", address)
        config = run(*keys)
        found = looks(config)["configuration"]
        assert (found.level, found.seen) == (
            "yellow",
            "1 files of weights of owner/moe are not in the cache of the hub",
        )
        prepare_model(config.model)
    assert looks(config)["configuration"].level == "green"


def test_a_gpu_that_does_not_hold_the_engine_beside_the_trainer_is_a_fault() -> None:
    config = run("recipe=laptop", "rollout.max_running=65536")
    found = looks(config, gpus=1, mib=4096.0)["memory of a rank"]
    assert (found.level, "rollout.max_running" in found.remedy) == ("red", True)
    assert "key-value cache" in found.seen
    assert looks(run("recipe=laptop", "rollout.max_running=8"), gpus=1, mib=4096.0)["memory of a rank"].level == "green"


def test_shared_prompts_on_gpus_are_a_fault() -> None:
    config = run("recipe=laptop", "trainer.share_prompts=true")
    assert looks(config, gpus=1)["configuration"].level == "red"
    assert looks(config)["configuration"].level == "green"
    assert looks(run("recipe=laptop"), gpus=1)["configuration"].level == "green"
