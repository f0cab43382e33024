"""`moerl diagnose` on dumps of other trainers: the trainer's log-probs, train data, empty responses, exit statuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from foreign_dumps import (
    make_dumped,
    write_nemo_rl,
    write_prime_rl_export,
    write_prime_rl_traces,
    write_slime,
    write_slime_train,
)
from planted_faults import SAMPLING, Diagnosed, layer_late, scorer

from moerl import cli
from moerl.diagnostics.dumps.build import EMPTY
from moerl.diagnostics.dumps.minimal import write_minimal
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.scoring import Question
from moerl.errors import ConfigError, ContractError
from moerl.orchestration import diagnose as diagnose_command
from moerl.telemetry.metrics import SCORERS

pytestmark = pytest.mark.usefixtures("one_thread")


def _as_trained(rollouts: list[DumpedRollout], path: Path, *, routing: str) -> list[DumpedRollout]:
    """With log-probs of a trainer that computes as we do, with the record enforced or with its own routing."""
    judge = scorer(path)
    seen = rollouts if routing == "recorded" else [replace(r, expert_ids=None, routed=None) for r in rollouts]
    trained: list[DumpedRollout] = []
    for rollout, scored in zip(rollouts, judge.score(seen, Question()), strict=True):
        logprobs = np.zeros(len(rollout), np.float32)
        logprobs[rollout.sampled] = scored.kept_TF[:, 0]
        trained.append(replace(rollout, trainer_logprobs={"trainer": logprobs}))
    return trained


@pytest.mark.parametrize("routing", ["own", "recorded"])
def test_the_trainers_log_probs_stand_beside_the_engines_and_ours(
    tmp_path: Path, model: Path, clean, run: Diagnosed, routing: str, capsys: pytest.CaptureFixture[str]
):
    trained = [replace(r, group=r.group.removeprefix("g")) for r in _as_trained(clean, model, routing=routing)]
    write_slime(tmp_path / "rollout_12.pt", trained, rollout_id=12)
    write_slime_train(tmp_path / "train_12.pt", trained[1:], rollout_id=12)
    temperature = ("--temperature", SAMPLING.temperature)
    status, report = run(tmp_path / "rollout_12.pt", tmp_path / "train_12.pt", "--model", model, *temperature)
    assert status == 0
    figures = report.scorers
    near, far = {"own": ("kept_sets", "both"), "recorded": ("both", "kept_sets")}[routing]
    assert figures[near]["trainer_distance"] < 1e-5 < figures[far]["trainer_distance"]
    assert figures["trainer"]["logprob_abs_mean"] > 1e-3
    assert f"1 of {len(clean)} rollouts is not in the train data" in report.notes
    fact = dict(report.facts)["the trainer's log-probs"]
    assert f"from ours {figures[near]['trainer_distance']:.1e} with {SCORERS[near]}, " in fact
    assert "cannot be told" not in fact
    assert fact.endswith(f"; in {len(clean) - 1} of {len(clean)} rollouts")
    assert f"the trainer's log-probs: {fact}" in capsys.readouterr().out
    assert "Trainer less this scorer" in (tmp_path / "page.html").read_text()
    column = pq.read_table(tmp_path / "page.parquet")["gap_trainer"].to_pylist()
    assert column[0] is None
    assert np.mean(column[1:]) > 1e-4


def test_rollouts_and_train_data_of_two_steps_are_refused(tmp_path: Path, clean, capsys: pytest.CaptureFixture[str]):
    trained = [replace(each, group="0", trainer_logprobs={"trainer": each.rollout_logprobs}) for each in clean]
    write_slime(tmp_path / "rollout_12.pt", trained, rollout_id=12)
    write_slime_train(tmp_path / "train_13.pt", trained, rollout_id=13)
    assert cli.main(["diagnose", str(tmp_path / "rollout_12.pt"), str(tmp_path / "train_13.pt")]) == 2
    said = capsys.readouterr().err
    assert "rollouts of rollout_id 12, train data of rollout_id 13" in said
    assert "the same rollout_id" in said


def test_empty_responses_get_a_note_and_change_no_number(tmp_path: Path, model: Path, clean, run: Diagnosed):
    plain = [replace(each, group="0") for each in clean]
    write_slime(tmp_path / "4.pt", plain)
    arguments = ("--model", model, "--temperature", SAMPLING.temperature)
    _, without = run(tmp_path / "4.pt", *arguments)
    loaded = torch.load(tmp_path / "4.pt", weights_only=False)
    for at in (3, 0):
        sample_ = loaded["samples"][at]
        empty = {name: [] for name in ("loss_mask", "rollout_log_probs", "weight_versions")}
        empty |= {"response": "", "response_length": 0, "status": "aborted", "rollout_routed_experts": None}
        empty |= {"rollout_top_p_token_ids": None, "rollout_top_p_token_offsets": None}
        prompt = sample_["tokens"][: len(sample_["tokens"]) - sample_["response_length"]]
        loaded["samples"].insert(at, {**sample_, **empty, "tokens": prompt, "index": 1000 + at})
    torch.save(loaded, tmp_path / "4.pt")
    status, report = run(tmp_path / "4.pt", *arguments)
    (finding,) = report.findings
    assert finding.title == "2 rollouts have an empty response, or one without sampled tokens"
    assert (status, finding.level, report.verdict) == (0, "note", without.verdict)
    assert report.scorers == without.scorers
    assert report.decompositions == without.decompositions
    assert [(each.reason, each.count) for each in report.unusable] == [(EMPTY, 2)]


def test_empty_responses_are_noted_without_a_model_too_and_a_dump_of_them_alone_is_refused(
    tmp_path: Path, run: Diagnosed, capsys: pytest.CaptureFixture[str]
):
    rng = np.random.default_rng(0)
    rollouts = [make_dumped(rng, name=str(number)) for number in range(3)]
    silent = replace(rollouts[0], sampled=rollouts[0].sampled & False)
    write_nemo_rl(tmp_path / "train_data_step4.jsonl", [silent, *rollouts])
    _, report = run(tmp_path / "train_data_step4.jsonl")
    assert report.findings[-1].title == "1 rollout has an empty response, or one without sampled tokens"
    write_nemo_rl(tmp_path / "train_data_step5.jsonl", [silent])
    assert cli.main(["diagnose", str(tmp_path / "train_data_step5.jsonl")]) == 2
    assert f"no rollout that can be used; seen: {EMPTY}" in capsys.readouterr().err


@pytest.mark.parametrize(("page", "said"), [("page.txt/page.html", "is no directory"), ("page.html", "has that name")])
@pytest.mark.parametrize("beside", [".html", ".json", ".parquet"])
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, page: str, said: str, beside: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "page.txt").touch()
    (tmp_path / "page").with_suffix(beside).mkdir()
    (tmp_path / "dump.jsonl").touch()
    assert cli.main(["diagnose", str(tmp_path / "dump.jsonl"), "--output", str(tmp_path / page)]) == 2
    told = capsys.readouterr()
    assert "--output: cannot write" in told.err
    assert said in told.err
    assert "name another page with --output" in told.err
    assert "checkpoint" not in told.err
    assert not told.out


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no directory that nobody can write to")
def test_a_directory_that_nobody_can_write_to_is_refused_and_one_that_is_missing_is_made(
    tmp_path: Path, run: Diagnosed, capsys: pytest.CaptureFixture[str]
):
    write_nemo_rl(tmp_path / "train_data_step4.jsonl", [make_dumped(np.random.default_rng(0))])
    named = ["diagnose", str(tmp_path / "train_data_step4.jsonl"), "--output"]
    assert cli.main([*named, "/proc/page.html"]) == 2
    assert "--output: cannot write /proc/page.html; seen: /proc: " in capsys.readouterr().err
    cli.main([*named, str(tmp_path / "new" / "folder" / "page.html")])
    assert sorted(each.name for each in (tmp_path / "new" / "folder").iterdir()) == ["page.html", "page.json"]


def test_a_table_goes_to_a_directory_that_is_missing_too(tmp_path: Path, model: Path, clean: list[DumpedRollout]):
    write_minimal(tmp_path / "dump.parquet", clean)
    page = tmp_path / "new" / "folder" / "page.html"
    assert cli.main(["diagnose", str(tmp_path / "dump.parquet"), "--model", f"{model}@3", "--output", str(page)]) == 0
    assert sorted(each.name for each in page.parent.iterdir()) == ["page.html", "page.json", "page.parquet"]


def test_a_disk_that_fills_meanwhile_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write_nemo_rl(tmp_path / "train_data_step4.jsonl", [make_dumped(np.random.default_rng(0))])
    monkeypatch.setattr(diagnose_command, "write_report", full)
    assert cli.main(["diagnose", str(tmp_path / "train_data_step4.jsonl"), "--output", str(tmp_path / "p.html")]) == 2
    told = capsys.readouterr().err
    assert "No space left" in told
    assert "name another page with --output" in told
    assert "checkpoint" not in told


def test_what_is_left_out_of_a_directory_is_said_in_the_terminal(
    tmp_path: Path, run: Diagnosed, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "logs"
    folder.mkdir()
    write_nemo_rl(folder / "train_data_step4.jsonl", [make_dumped(np.random.default_rng(0))])
    (folder / "val_data_step4.jsonl").write_text('{"content": [["q", "a"]], "rewards": [1.0], "idx": 0}\n')
    _, report = run(folder)
    note = "left out: 1 file of evaluations (val_data_step4.jsonl)"
    assert note in report.notes
    assert f"{folder}: {note}" in capsys.readouterr().out


def test_a_run_of_prime_rl_needs_no_model_if_it_has_token_exports(
    tmp_path: Path, run: Diagnosed, capsys: pytest.CaptureFixture[str]
):
    rollouts = [make_dumped(np.random.default_rng(0), name="a", spans=(3, 20))]
    write_prime_rl_traces(tmp_path / "outputs" / "run", rollouts)
    assert cli.main(["diagnose", str(tmp_path / "outputs"), "--output", str(tmp_path / "page.html")]) == 2
    assert "or log-probs of the trainer are in the token exports" in capsys.readouterr().err
    write_prime_rl_export(tmp_path / "outputs" / "run", rollouts)
    _, report = run(tmp_path / "outputs" / "run")
    assert "20 sampled tokens" in report.subtitle
    assert dict(report.facts)["format"] == "prime-rl traces, with prime-rl token export"


@pytest.mark.parametrize(
    ("error", "options", "said"),
    [
        (ConfigError("a dump", seen="x", expected="y"), ["--traceback"], "ConfigError: a dump"),
        (ZeroDivisionError("a bug"), [], "ZeroDivisionError: a bug"),
    ],
)
def test_a_failure_with_its_trace_is_no_fault_of_the_dump(
    error: Exception,
    options: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "dump.jsonl").touch()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(diagnose_command, "run_diagnose", fail)
    assert cli.main(["diagnose", str(tmp_path / "dump.jsonl"), *options]) == 2
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert said in told


def test_a_file_that_cannot_be_read_or_is_wrong_has_a_status_of_its_own(
    tmp_path: Path, model: Path, clean, run: Diagnosed, capsys: pytest.CaptureFixture[str]
):
    write_minimal(tmp_path / "sound.jsonl", map(layer_late, clean))
    assert run(tmp_path / "sound.jsonl", "--model", model)[0] == 1
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 and then nothing")
    (tmp_path / "words.jsonl").write_text("no JSON at all")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and then nothing")
    for name in ("cut.pt", "words.jsonl", "damaged.parquet"):
        assert cli.main(["diagnose", str(tmp_path / name), "--model", str(model)]) == 2, name


def test_an_error_of_the_system_or_of_the_contract_is_not_told_as_a_fault(
    tmp_path: Path, clean, monkeypatch: pytest.MonkeyPatch
):
    write_minimal(tmp_path / "dump.jsonl", clean[:1])
    for error in (PermissionError("not yours"), ContractError("damaged", field="dump", seen="x", expected="y")):

        def refuses(_: object, error: Exception = error) -> int:
            raise error

        monkeypatch.setattr(diagnose_command, "run_diagnose", refuses)
        assert cli.main(["diagnose", str(tmp_path / "dump.jsonl")]) == 2
