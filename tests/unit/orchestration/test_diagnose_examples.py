"""Commands that the help and the page of `moerl diagnose` give run as written, on dumps as each system writes them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from foreign_dumps import (
    make_dumped,
    write_miles_train,
    write_nemo_rl,
    write_prime_rl_export,
    write_prime_rl_traces,
    write_slime,
    write_slime_train,
)
from planted_faults import SAMPLING, sample, write_moe
from transformers import AutoModelForCausalLM

from moerl import cli
from moerl.config.command_texts import DIAGNOSE
from moerl.diagnostics.dumps.minimal import write_minimal
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import read_report
from moerl.machine.model_tensors import check_weights

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = Path(__file__).parents[3] / "docs" / "routing_mismatch.md"
COMMANDS = dict.fromkeys(
    [line.partition("#")[0].strip() for line in PAGE.read_text().splitlines() if line.startswith("moerl diagnose ")]
    + [*DIAGNOSE.examples]
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with everything that the commands name, sampled by one policy."""
    folder = tmp_path_factory.mktemp("written")
    model = write_moe(folder / "policy_11")
    rollouts = [_trained(each) for each in sample(model, num_groups=2)]
    _write_run(folder / "runs" / "wide", model, rollouts)
    for name in ("rollout_data", "train_data"):
        (folder / "dumps" / name).mkdir(parents=True)
    for path in (folder / "rollout_12.pt", folder / "dumps" / "rollout_data" / "12.pt"):
        write_slime(path, rollouts, rollout_id=12)
    for path in (folder / "train_12.pt", folder / "dumps" / "train_data" / "12.pt"):
        write_slime_train(path, rollouts, rollout_id=12)
        if path.parent.name == "train_data":  # one file of slime, or one of each rank of miles
            for rank in (0, 1):
                write_miles_train(path.with_stem(f"12_{rank}"), rollouts[rank::2], rollout_id=12)
    write_nemo_rl(folder / "train_data_step12.jsonl", rollouts)
    versioned = [replace(each, policy_versions=np.where(each.sampled, 11, -1).astype(np.int32)) for each in rollouts]
    write_prime_rl_traces(folder / "outputs" / "run", versioned, step=12)
    write_prime_rl_export(folder / "outputs" / "run", rollouts, step=12)
    return folder


def _trained(rollout: DumpedRollout) -> DumpedRollout:
    logprobs = np.where(rollout.sampled, rollout.rollout_logprobs - np.float32(0.01), 0).astype(np.float32)
    return replace(rollout, trainer_logprobs={"trainer": logprobs}, group=rollout.group.removeprefix("g"))


def _write_run(folder: Path, model: Path, rollouts: list[DumpedRollout]) -> None:
    shutil.copytree(model, folder / "cold_start")
    (folder / "rollouts").mkdir()
    (folder / "ledger.json").write_text("{}")
    versions = [np.where(each.sampled, 0, -1).astype(np.int32) for each in rollouts]
    fresh = [replace(r, policy_versions=v, trainer_logprobs={}) for r, v in zip(rollouts, versions, strict=True)]
    write_minimal(folder / "rollouts" / "step-000001.parquet", fresh)


def _expanded(argument: str) -> list[str]:
    """Expands wildcards as a shell does."""
    return sorted(map(str, Path().glob(argument))) if "*" in argument else [argument]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_help_or_the_page_gives_a_diagnosis(
    written: Path, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(written)
    page = tmp_path / "page.html"
    assert SAMPLING.temperature == pytest.approx(0.8)  # that of the commands
    arguments = [each for word in shlex.split(command)[1:] for each in _expanded(word)]
    status = cli.main([*arguments, "--output", str(page)])
    report = read_report(page.with_suffix(".json"))
    assert not report.unusable
    has_trainer = not re.search(r"runs/wide|/rollouts/", command)
    assert ("trainer" in report.scorers) == has_trainer
    if "rollout_data" in command or "rollout_12" in command or "runs/wide" in command:
        assert (status, report.verdict.level) == (0, "good"), report.verdict.text
    assert status in (0, 1, 3)


def test_there_are_commands_for_each_system() -> None:
    for name in ("runs/wide", "rollout_12.pt", "12_*.pt", "train_data_step12", "token_exports", "rollouts/step_12"):
        assert any(name in command for command in COMMANDS), name


@pytest.mark.parametrize("size", ["10GB", "100KB"])
def test_weights_that_prime_rl_broadcast_become_a_model_by_the_line_of_the_page(tmp_path: Path, written: Path, size):
    """The base model has other shards, in number and in name, than the broadcast."""
    (line,) = (line for line in PAGE.read_text().splitlines() if "broadcasts/step_11/" in line)
    broadcast = tmp_path / "outputs" / "run" / "broadcasts" / "step_11"
    model = AutoModelForCausalLM.from_pretrained(written / "policy_11", dtype="auto")
    model.save_pretrained(tmp_path / "BASE_MODEL", max_shard_size="60KB")
    model.save_pretrained(broadcast, max_shard_size=size)
    assert len(list((tmp_path / "BASE_MODEL").glob("*.safetensors"))) > len(list(broadcast.glob("*.safetensors")))
    for file in ("config.json", "generation_config.json"):
        (broadcast / file).unlink(missing_ok=True)
    (broadcast / "STABLE").touch()
    subprocess.run(["/bin/sh", "-c", line], cwd=tmp_path, check=True)
    check_weights(tmp_path / "policy_11")
    for file in broadcast.iterdir():
        assert (tmp_path / "policy_11" / file.name).read_bytes() == file.read_bytes()


def test_a_directory_of_all_steps_needs_no_model(tmp_path: Path):
    rng = np.random.default_rng(0)
    for folder in ("rollout_data", "train_data"):
        (tmp_path / folder).mkdir()
    for step in (1, 2):
        rollouts = [make_dumped(rng, name=str(number)) for number in range(4)]
        write_slime(tmp_path / "rollout_data" / f"{step}.pt", rollouts, rollout_id=step)
        write_slime_train(tmp_path / "train_data" / f"{step}.pt", rollouts, rollout_id=step)
    page = tmp_path / "page.html"
    cli.main(["diagnose", str(tmp_path), "--output", str(page)])
    report = read_report(page.with_suffix(".json"))
    assert [each.step for each in report.steps] == [1, 2]
    assert report.subtitle.startswith("8 rollouts")
