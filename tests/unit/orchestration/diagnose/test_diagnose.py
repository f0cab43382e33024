"""`moerl diagnose` on files: formats, exit codes, what the page and the JSON say."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from factories import write_hf_model
from foreign_dumps import make_dumped, write_nemo_rl, write_slime
from planted_faults import SAMPLING, Diagnosed, layer_late, scorer
from small_hub import Cache, commit_of, hub

from moerl import cli
from moerl.diagnostics.checkpoints import split_version
from moerl.diagnostics.dumps.minimal import write_minimal
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Report
from moerl.diagnostics.report.words import unbroken
from moerl.diagnostics.scoring import Question
from moerl.machine.scoring_memory import ScoringMemory
from moerl.models.description import read_model
from moerl.offline import dump_scorers, rescoring
from moerl.offline.trainer_scorer import TrainerScorer, lone_trainer
from moerl.telemetry.progress import HeartbeatProgress

pytestmark = pytest.mark.usefixtures("one_thread")


def _write_minimal(path: Path, rollouts: list[DumpedRollout]) -> None:
    write_minimal(path.with_suffix(".jsonl"), rollouts)


def _write_slime(path: Path, rollouts: list[DumpedRollout]) -> None:
    write_slime(path, [replace(rollout, group=rollout.group.removeprefix("g")) for rollout in rollouts])


@pytest.mark.parametrize("write", [_write_minimal, _write_slime])
def test_a_sound_dump_of_any_format_is_in_order(tmp_path: Path, model: Path, clean, run: Diagnosed, write):
    write(tmp_path / "dump.pt", clean)
    (file,) = tmp_path.glob("dump.*")
    status, report = run(file, "--model", model, "--temperature", SAMPLING.temperature)  # slime does not say it
    assert (status, report.verdict.level) == (0, "good"), report.verdict.text
    assert set(report.scorers) == {"neither", "kept_sets", "experts", "both", "floor"}
    assert len(report.strips) == 3
    assert {each.name for each in report.slices if each.by == "kind"} == {"prompt", "response"}


def test_a_faulty_dump_ends_with_1_and_is_named_on_the_page_and_in_the_terminal(
    tmp_path: Path, model: Path, clean, run: Diagnosed, capsys: pytest.CaptureFixture[str]
):
    write_minimal(tmp_path / "dump.parquet", map(layer_late, clean))
    status, report = run(tmp_path / "dump.parquet", "--model", f"{model}@3")
    assert status == 1
    assert report.verdict.text.startswith("Routes are 1 layer too late (certain")
    assert report.verdict.text in capsys.readouterr().out
    assert unbroken(report.verdict.text) in (tmp_path / "page.html").read_text()


def test_a_fault_of_some_rollouts_is_said_of_them_and_shown_as_it_came_beside_the_repaired_record(
    tmp_path: Path, model: Path, clean, run: Diagnosed
):
    some = {clean[1].name, clean[4].name}
    planted = [layer_late(rollout) if rollout.name in some else rollout for rollout in clean]
    write_minimal(tmp_path / "dump.parquet", planted)
    status, report = run(tmp_path / "dump.parquet", "--model", f"{model}@3")
    assert status == 1
    (finding,) = report.findings
    assert finding.title == f"routes are 1 layer too late, in 2 of {len(clean)} rollouts"
    assert set(finding.rollouts) == some
    came, repaired = ({each.name: each for each in report.maps}[name] for name in ("position", "position, repaired"))
    mean = [
        np.mean([share for row in each.differing for share in row if share is not None]) for each in (came, repaired)
    ]
    assert mean[0] > 2 * mean[1]
    assert {each.why for each in report.strips} >= {"largest gap", "largest gap, repaired"}
    rows = pq.read_table(tmp_path / "page.parquet").to_pylist()
    assert {row["rollout"] for row in rows if row["faults"] == ["layer_shift"]} == some
    for row in rows:
        assert (row["gap_as_recorded"] > 2 * row["gap_repaired"]) == (row["rollout"] in some), row


def test_what_is_scored_and_what_it_takes_are_said_before_the_scores(
    tmp_path: Path, model: Path, clean, run: Diagnosed, capsys: pytest.CaptureFixture[str]
):
    write_minimal(tmp_path / "dump.parquet", clean)
    tokens = 150
    run(tmp_path / "dump.parquet", "--model", model, "--tokens", tokens)
    first, counted, memory, *_ = capsys.readouterr().out.splitlines()
    assert first == f"diagnosing {tmp_path / 'dump.parquet'}"
    found = re.fullmatch(r"(\d+) of 8 rollouts, (\d+) tokens, bfloat16", counted)
    assert found is not None
    assert int(found[1]) < 8
    assert tokens - max(map(len, clean)) < int(found[2]) <= tokens
    assert memory.startswith("memory: 0.0 GB of weights in bfloat16; ")


def test_every_round_of_scores_shows_how_far_it_is(
    tmp_path: Path, model: Path, clean, run: Diagnosed, monkeypatch: pytest.MonkeyPatch
):
    parts: list[str] = []
    begin = HeartbeatProgress.begin_part
    monkeypatch.setattr(HeartbeatProgress, "begin_part", lambda self, title: (parts.append(title), begin(self, title)))
    write_minimal(tmp_path / "dump.parquet", clean)
    run(tmp_path / "dump.parquet", "--model", model)
    assert parts[0] == "reading, rollouts"
    assert parts[1:4] == ["causes", "scores 1, rollouts", "causes"]
    assert parts[-1] == "writing the report"
    assert "scores 5, rollouts" in parts


@pytest.mark.parametrize(("backend", "copies"), [("hf", 1), ("trainer", 2)])
def test_models_that_do_not_fit_are_refused_before_they_are_loaded(
    backend: str,
    copies: int,
    tmp_path: Path,
    model: Path,
    clean,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    write_minimal(tmp_path / "dump.parquet", clean)
    monkeypatch.setattr(rescoring, "load_model", lambda *_, **__: pytest.fail("loaded"))
    arguments = ["diagnose", str(tmp_path / "dump.parquet"), "--model", str(model), "--backend", backend]
    plan, rooms = dump_scorers.plan_scoring, list[int]()

    def planned(*given: Any, **named: Any) -> ScoringMemory:
        rooms.append(named["host_bytes"])
        return plan(*given, **{**named, "host_bytes": 1000})

    monkeypatch.setattr(dump_scorers, "plan_scoring", planned)
    assert cli.main(arguments) == 2
    assert "--model: does not fit into memory" in capsys.readouterr().err
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert (machine - rooms[0]) / weights == pytest.approx(copies - 1, abs=0.1)


def test_of_a_run_the_first_rollouts_are_held_against_the_weights_that_sampled_them(
    tmp_path: Path, model: Path, clean, run: Diagnosed
):
    folder = tmp_path / "wide"
    shutil.copytree(model, folder / "cold_start")
    (folder / "rollouts").mkdir()
    (folder / "ledger.json").write_text("{}")
    fresh = [replace(rollout, policy_versions=np.where(rollout.sampled, 0, -1).astype(np.int32)) for rollout in clean]
    write_minimal(folder / "rollouts" / "step-000001.parquet", fresh)
    status, report = run(folder)
    assert (status, report.verdict.level) == (0, "good"), report.verdict.text
    assert dict(report.facts)["model"] == "cold_start (version 0)"


def test_a_run_that_did_not_keep_its_first_rollouts_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "wide" / "rollouts").mkdir(parents=True)
    (tmp_path / "wide" / "ledger.json").write_text("{}")
    assert cli.main(["diagnose", str(tmp_path / "wide")]) == 2
    assert "moerl export" in capsys.readouterr().err


def test_a_temperature_that_the_dump_does_not_say_is_a_question_and_no_fault(
    tmp_path: Path, model: Path, clean, run: Diagnosed
):
    _write_slime(tmp_path / "rollout_4.pt", clean)
    status, report = run(tmp_path / "rollout_4.pt", "--model", model)
    assert (status, report.verdict.level) == (0, "note")
    assert report.verdict.text.startswith(
        "The dump does not say its temperature: tokens were drawn at temperature 0.80"
    )


def test_a_dump_with_both_policies_needs_no_model(tmp_path: Path, run: Diagnosed):
    rng = np.random.default_rng(0)
    rollouts = [make_dumped(rng, name=str(number)) for number in range(20)]
    write_nemo_rl(tmp_path / "train_data_step4.jsonl", rollouts)
    _, report = run(tmp_path / "train_data_step4.jsonl")
    d = np.concatenate([(r.trainer_logprobs["trainer"] - r.rollout_logprobs)[r.sampled] for r in rollouts])
    assert report.decompositions[0].total.value == pytest.approx(np.abs(d).mean(), rel=1e-5)


def test_routes_of_both_policies_are_compared_without_a_model(tmp_path: Path, run: Diagnosed):
    rng = np.random.default_rng(0)
    rollouts = []
    for number in range(6):
        rollout = make_dumped(rng, name=str(number))
        assert rollout.expert_ids is not None
        theirs = rollout.expert_ids.copy()
        theirs[:, 1] = (theirs[:, 1] + 1) % 8
        rollouts.append(replace(rollout, trainer_expert_ids=theirs))
    write_minimal(tmp_path / "dump.jsonl", rollouts)
    _, report = run(tmp_path / "dump.jsonl")
    assert report.layers[0].differing == 0.0
    assert report.layers[1].differing > 0.5


def test_routes_of_both_policies_are_compared_in_those_rollouts_that_have_them(tmp_path: Path, run: Diagnosed):
    rng = np.random.default_rng(0)
    rollouts = [make_dumped(rng, name=str(number)) for number in range(6)]
    bare = replace(rollouts[0], expert_ids=None, routed=None)
    routed = [replace(rollout, trainer_expert_ids=rollout.expert_ids) for rollout in rollouts[1:]]
    assert routed[4].expert_ids is not None
    beyond = np.full_like(routed[4].expert_ids, 300)
    foreign = replace(routed[4], expert_ids=beyond, trainer_expert_ids=beyond)
    write_minimal(tmp_path / "dump.jsonl", [bare, *routed[:4], foreign])
    _, report = run(tmp_path / "dump.jsonl")
    assert [layer.differing for layer in report.layers] == [0.0] * routed[0].expert_ids.shape[1]  # type: ignore[union-attr]
    said = "routes of other sizes than those of the first rollout that has them"
    assert [(each.reason, each.count) for each in report.unusable] == [(said, 1)]


def test_rollouts_that_a_model_cannot_take_are_counted_by_reason(tmp_path: Path, model: Path, clean, run: Diagnosed):
    foreign = replace(clean[0], name="foreign", token_ids=clean[0].token_ids + 1000)
    write_minimal(tmp_path / "dump.jsonl", [*clean, foreign])
    _, report = run(tmp_path / "dump.jsonl", "--model", model)
    assert [(each.reason, each.count) for each in report.unusable] == [("tokens beyond the model's vocabulary", 1)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "diagnose: no dump"),
        (["nothing.jsonl"], "DUMP: not there"),
        (["{dump}"], "--model: the dump has no log-probs of the trainer"),
        (["{dump}", "--model", "nowhere"], "--model: no Hugging Face model"),
        (["{dump}", "--model", "{model}@new"], "--model: version"),
        (["{dump}", "--model", "{model}", "--dtype", "int3"], "--dtype: of the scorer"),
        (["{dump}", "--model", "{model}", "--output", "page.txt"], "--output: not the name of a page"),
        (["{dump}", "--model", "{model}", "--rollouts", "0"], "--rollouts: too few"),
        (["{dump}", "--model", "{model}", "--top-p", "1.5"], "--top-p: too large"),
        (["{dump}", "--model", "{model}", "--model", "{model}", "--backend", "trainer"], "one model at a time"),
    ],
)
def test_what_cannot_be_diagnosed_is_said(
    tmp_path: Path, model: Path, clean, arguments, said: str, capsys: pytest.CaptureFixture[str]
):
    write_minimal(tmp_path / "dump.jsonl", clean[:1])
    given = [each.format(dump=tmp_path / "dump.jsonl", model=model) for each in arguments]
    assert cli.main(["diagnose", *given]) == 2
    assert said in capsys.readouterr().err


def test_the_trainer_scores_as_transformers_does(model: Path, clean):
    judge, question = scorer(model, dtype=torch.float32), Question((1.0, 0.7))
    described = read_model(model)
    with lone_trainer(described, "float32") as alone:
        trainer = TrainerScorer(alone, described.spec, name="policy", version=None)
        for rollouts in (clean, [replace(rollout, expert_ids=None, routed=None) for rollout in clean]):
            for ours, theirs in zip(trainer.score(rollouts, question), judge.score(rollouts, question), strict=True):
                assert ours.kept_TF == pytest.approx(theirs.kept_TF, abs=2e-5)
                assert ours.full_TF == pytest.approx(theirs.full_TF, abs=2e-5)
                assert ours.mass_T == pytest.approx(theirs.mass_T, abs=2e-5)


def test_the_trainer_finds_what_transformers_finds(tmp_path: Path, model: Path, clean, run: Diagnosed):
    write_minimal(tmp_path / "dump.jsonl", map(layer_late, clean))
    status, report = run(tmp_path / "dump.jsonl", "--model", model, "--backend", "trainer")
    assert status == 1
    assert {finding.cause for finding in report.findings} == {"layer_shift"}


@pytest.mark.slow
def test_a_sound_dump_is_in_order_by_the_trainer_too(tmp_path: Path, model: Path, clean, run: Diagnosed):
    write_minimal(tmp_path / "dump.jsonl", clean)
    status, report = run(tmp_path / "dump.jsonl", "--model", model, "--backend", "trainer")
    assert (status, report.findings, report.verdict.level) == (0, (), "good"), report.verdict.text
    # Nobody knows margins here: none are shown, rather than zeros.
    assert {layer.margin_at_flips for layer in report.layers} | {layer.margin_elsewhere for layer in report.layers} == {
        None
    }
    assert not [each.name for each in report.histograms if "margin" in each.name]


def test_a_gap_that_nothing_explains_has_a_status_of_its_own(tmp_path: Path, model: Path, clean, run: Diagnosed):
    rng = np.random.default_rng(0)
    _, report = _of(tmp_path / "sound.jsonl", clean, model, run)
    noise = 4 * report.scorers["floor"]["logprob_abs_mean"] * np.sqrt(np.pi / 2)
    noisy = [
        replace(
            r, rollout_logprobs=(r.rollout_logprobs - np.abs(rng.normal(0, noise, len(r))) * r.sampled).astype("f4")
        )
        for r in clean
    ]
    status, report = _of(tmp_path / "noisy.jsonl", noisy, model, run)
    assert (status, report.verdict.level) == (3, "note"), report.verdict.text
    assert "nats are unexplained" in report.verdict.text


def _of(path: Path, rollouts: list[DumpedRollout], model: Path, run: Diagnosed) -> tuple[int, Report]:
    write_minimal(path, rollouts)
    return run(path, "--model", model)


def test_a_model_of_the_hub_has_a_revision_a_version_or_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "whole"
    folder.mkdir()
    write_hf_model(folder)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    with hub({"owner/moe": {"main": files, "v1": files}}, kind="models") as (address, _):
        cache = Cache(monkeypatch)
        cache.use(tmp_path / "home", address)
        main, tagged = cache.snapshot(commit_of("main")), cache.snapshot(commit_of("v1"))
        found = [split_version(f"owner/moe{end}") for end in ("", "@12", "@v1", "@v1@12")]
    assert found == [(main, None), (main, 12), (tagged, None), (tagged, 12)]
