"""`moerl diagnose` on trainers that are apart, weights of other versions, dumps without routes or model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from foreign_dumps import make_dumped, write_nemo_rl
from planted_faults import SAMPLING, Diagnosed, sample, scorer, write_moe

from moerl.diagnostics.dumps.minimal import write_minimal
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Report
from moerl.diagnostics.scoring import Question

pytestmark = pytest.mark.usefixtures("one_thread")

Change = Callable[[DumpedRollout], DumpedRollout]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("other") / "other", seed=7)


@pytest.fixture(scope="module")
def plain(model: Path) -> list[DumpedRollout]:
    """Sound rollouts over the full vocabulary."""
    return sample(model, num_groups=3, sampling=replace(SAMPLING, top_p=1.0))


@pytest.fixture(scope="module")
def trained(model: Path, plain: list[DumpedRollout]) -> list[DumpedRollout]:
    """The same with log-probs of a trainer that has its own routing."""
    return with_trainer(model, plain)


def with_trainer(
    model: Path, rollouts: list[DumpedRollout], *, temperature: float | None = None
) -> list[DumpedRollout]:
    asked = [replace(rollout, expert_ids=None, routed=None) for rollout in rollouts]
    if temperature is not None:
        asked = [replace(rollout, temperatures=np.full(len(rollout), temperature, np.float32)) for rollout in asked]
    found: list[DumpedRollout] = []
    for rollout, scored in zip(rollouts, scorer(model).score(asked, Question()), strict=True):
        logprobs = np.zeros(len(rollout), np.float32)
        logprobs[rollout.sampled] = scored.full_TF[:, 0]
        found.append(replace(rollout, trainer_logprobs={"trainer": logprobs}))
    return found


def trainer_lower(rollout: DumpedRollout) -> DumpedRollout:
    return replace(rollout, trainer_logprobs={"trainer": rollout.trainer_logprobs["trainer"] - np.float32(1.0)})


def version(number: int) -> Change:
    return lambda rollout: replace(rollout, policy_versions=np.where(rollout.sampled, number, -1).astype(np.int32))


def causes(report: Report) -> set[str]:
    return {finding.cause for finding in report.findings}


def as_nemo_rl(rollout: DumpedRollout) -> DumpedRollout:
    return replace(rollout, expert_ids=None, routed=None, kept=None)


# --- the trainer's log-probs -----------------------------------------------------------------------------------------


def test_a_trainer_that_is_far_from_every_scorer_is_a_fault_with_a_model_as_it_is_without(
    tmp_path: Path, model: Path, trained: list[DumpedRollout], run: Diagnosed
):
    write_minimal(tmp_path / "sound.parquet", trained)
    status, report = run(tmp_path / "sound.parquet", "--model", f"{model}@3")
    assert (status, causes(report)) == (0, set())
    write_minimal(tmp_path / "dump.parquet", map(trainer_lower, trained))
    for arguments, cause in (((), "unexplained"), (("--model", f"{model}@3"), "trainer_apart")):
        status, report = run(tmp_path / "dump.parquet", *arguments)
        assert (status, report.verdict.level, causes(report)) == (1, "fault", {cause})
    assert (
        report.verdict.text == "The trainer's log-probs are 1.0e+00 nats from the model's, whatever is kept (likely)."
    )


def test_a_trainer_that_is_apart_in_some_rollouts_is_never_in_order(
    tmp_path: Path, model: Path, trained: list[DumpedRollout], run: Diagnosed
):
    some = [trainer_lower(rollout) if number == 5 else rollout for number, rollout in enumerate(trained)]
    write_minimal(tmp_path / "dump.parquet", some)
    status, report = run(tmp_path / "dump.parquet", "--model", f"{model}@3")
    assert (status, report.verdict.level) == (3, "note")
    (finding,) = report.findings
    assert finding.title.endswith(f"in 1 of {len(trained)} rollouts")
    assert finding.rollouts == (trained[5].name,)


def test_a_trainer_without_the_temperature_is_told_so(
    tmp_path: Path, model: Path, plain: list[DumpedRollout], run: Diagnosed
):
    write_minimal(tmp_path / "dump.parquet", with_trainer(model, plain, temperature=1.0))
    status, report = run(tmp_path / "dump.parquet", "--model", f"{model}@3")
    assert (status, causes(report)) == (1, {"trainer_temperature"})
    assert "before the temperature of 0.8" in report.verdict.text


def test_a_trainer_at_the_engines_side_is_not_accused_if_the_model_is_another(
    tmp_path: Path, other: Path, trained: list[DumpedRollout], run: Diagnosed
):
    write_minimal(tmp_path / "dump.parquet", trained)
    status, report = run(tmp_path / "dump.parquet", "--model", other)
    assert (status, causes(report)) == (1, {"weights"})


@pytest.mark.slow
def test_a_tie_of_two_scorers_does_not_say_what_the_trainer_kept(
    tmp_path: Path, model: Path, plain: list[DumpedRollout], run: Diagnosed
):
    rng = np.random.default_rng(0)
    own = with_trainer(model, plain)
    noisy = [
        replace(
            r,
            trainer_logprobs={"trainer": (r.trainer_logprobs["trainer"] + rng.normal(0.0, 0.06, len(r))).astype("f4")},
        )
        for r in own
    ]
    for rollouts, is_told in ((own, True), (noisy, False)):
        write_minimal(tmp_path / "dump.parquet", rollouts)
        _, report = run(tmp_path / "dump.parquet", "--model", f"{model}@3")
        fact = dict(report.facts)["the trainer's log-probs"]
        assert fact.count("own routing, full vocabulary") == fact.count("recorded routing, full vocabulary") == 1
        assert ("what it kept cannot be told" not in fact) == is_told, fact


# --- weights of other versions ---------------------------------------------------------------------------------------


def test_tokens_of_a_version_that_was_not_given_are_never_in_order(
    tmp_path: Path, model: Path, other: Path, plain: list[DumpedRollout], run: Diagnosed
):
    write_minimal(tmp_path / "dump.parquet", plain)
    status, report = run(tmp_path / "dump.parquet", "--model", f"{other}@4")
    assert (status, report.verdict.level, causes(report)) == (3, "note", {"staleness"})
    assert report.verdict.advice == "Give the weights of these versions, too: --model DIRECTORY@VERSION."
    # Of weights that did not change between two versions nothing is left to explain.
    status, report = run(tmp_path / "dump.parquet", "--model", f"{model}@4")
    assert (status, report.verdict.level) == (0, "good")


@pytest.mark.slow
def test_rounding_is_measured_on_weights_that_a_rollout_names(
    tmp_path: Path, model: Path, other: Path, plain: list[DumpedRollout], run: Diagnosed
):
    write_minimal(tmp_path / "dump.parquet", plain)
    floors = []
    for models in ((f"{model}@3",), (f"{other}@9", f"{model}@3")):
        status, report = run(tmp_path / "dump.parquet", *(word for name in models for word in ("--model", name)))
        assert (status, report.verdict.level) == (0, "good")
        floors.append(report.scorers["floor"]["logprob_abs_mean"])
    assert floors[0] == floors[1]


def test_a_temperature_that_is_said_far_too_high_is_asked_about(
    tmp_path: Path, model: Path, plain: list[DumpedRollout], run: Diagnosed
):
    write_minimal(tmp_path / "dump.parquet", plain)
    status, report = run(tmp_path / "dump.parquet", "--model", f"{model}@3", "--temperature", "1.9")
    assert status == 1
    assert "the temperature that is said" in report.verdict.advice


# --- no routes, no model ---------------------------------------------------------------------------------------------


def test_sound_rollouts_without_routes_are_in_order_though_rounding_chooses_other_experts(
    tmp_path: Path, model: Path, plain: list[DumpedRollout], trained: list[DumpedRollout], run: Diagnosed
):
    write_nemo_rl(tmp_path / "train_data_step12.jsonl", [as_nemo_rl(rollout) for rollout in trained])
    drawn = ("--temperature", SAMPLING.temperature)
    status, report = run(tmp_path / "train_data_step12.jsonl", "--model", model, *drawn)
    assert (status, report.verdict.level, causes(report)) == (0, "good", set())
    assert report.verdict.text.startswith("Nothing is wrong that shows: engine and model are ")
    write_minimal(tmp_path / "with_routes.parquet", plain)
    _, routed = run(tmp_path / "with_routes.parquet", "--model", f"{model}@3")
    floors = [each.scorers["floor"]["logprob_abs_mean"] for each in (report, routed)]
    assert floors[0] > 1.2 * floors[1]


@pytest.mark.parametrize(("nats", "status"), [(0.005, 0), (0.05, 3), (0.2, 1)])
def test_without_a_model_the_gap_of_two_policies_decides(nats: float, status: int, tmp_path: Path, run: Diagnosed):
    rng = np.random.default_rng(0)
    rollouts = [make_dumped(rng, name=str(number), spans=(3, 37)) for number in range(12)]
    apart = [replace(r, trainer_logprobs={"trainer": r.rollout_logprobs - np.float32(nats)}) for r in rollouts]
    write_minimal(tmp_path / "dump.parquet", apart)
    found, report = run(tmp_path / "dump.parquet")
    assert found == status
    assert report.verdict.level == {0: "good", 3: "note", 1: "fault"}[status]


def test_without_a_model_one_rollout_that_is_apart_is_not_hidden_by_the_others(tmp_path: Path, run: Diagnosed):
    rng = np.random.default_rng(0)
    rollouts = [make_dumped(rng, name=str(number), spans=(3, 37)) for number in range(12)]
    nats = [0.2 if number == 7 else 1e-4 for number in range(12)]
    apart = [
        replace(rollout, trainer_logprobs={"trainer": rollout.rollout_logprobs - np.float32(size)})
        for rollout, size in zip(rollouts, nats, strict=True)
    ]
    write_minimal(tmp_path / "dump.parquet", apart)
    status, report = run(tmp_path / "dump.parquet")
    assert (status, report.verdict.level) == (3, "note")
    assert report.findings[0].rollouts == ("7",)
    assert "1 of 12 rollouts is 2.0e-01 nats apart" in report.verdict.text


def test_log_probs_that_are_the_engines_digit_for_digit_are_no_proof_of_anything(tmp_path: Path, run: Diagnosed):
    rng = np.random.default_rng(0)
    rollouts = [make_dumped(rng, name=str(number), spans=(3, 37)) for number in range(4)]
    copied = [replace(rollout, trainer_logprobs={"trainer": rollout.rollout_logprobs}) for rollout in rollouts]
    write_minimal(tmp_path / "dump.parquet", copied)
    status, report = run(tmp_path / "dump.parquet")
    assert (status, report.verdict.level) == (0, "note")
    assert "compares nothing" in report.verdict.text
