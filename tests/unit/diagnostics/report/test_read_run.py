"""Contents of a run's page that come from the files of the run directory."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from episode_dumps import write_dump

from moerl.diagnostics.report.data import Report
from moerl.diagnostics.report.read_run import report_of_directory

ROW = {"stage": "rl", "step": 1, "mismatch/logprob_abs_mean": 0.001, "staleness/age_max": 2.0}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "config.yaml").write_text("{}")
    return tmp_path


def report(run_dir: Path, config: str = "{}") -> Report:
    (run_dir / "config.yaml").write_text(config)
    found = report_of_directory(run_dir)
    assert found is not None
    return found


def store(run_dir: Path, name: str, rewards: list[float | None], response: str = "the answer") -> None:
    rows = [
        {"prompt_id": str(n), "prompt": f"question {n}", "text": response, "reward_reward": reward}
        for n, reward in enumerate(rewards)
    ]
    (run_dir / name).parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), run_dir / name)


@pytest.mark.parametrize(
    ("buffer", "level"),
    [
        ("{max_staleness: 2, window: 1}", "good"),
        ("{max_staleness: 1, window: 1}", "note"),
        ("{max_staleness: 1, window: 9}", "good"),
        ("{max_staleness: 2}", "good"),
    ],
)
def test_the_age_of_tokens_is_held_against_the_bound_of_the_configuration(
    run_dir: Path, buffer: str, level: str
) -> None:
    found = report(run_dir, f"buffer: {buffer}\nrl: {{prompts_per_step: 8}}\n").findings
    assert [finding.level for finding in found if finding.cause == "age"] == [level]


@pytest.mark.parametrize(
    ("rollout", "model", "said"),
    [("float32", "float32", "float32 rounding"), ("float32", "bfloat16", "16-bit rounding")],
)
def test_rounding_is_that_of_the_coarser_side(run_dir: Path, rollout: str, model: str, said: str) -> None:
    found = report(run_dir, f"rollout: {{dtype: {rollout}}}\nmodel: {{dtype: {model}}}\n").headlines
    assert found[-1].notes[-1].startswith(said)


def test_the_highest_and_the_lowest_reward_of_the_last_step_are_shown(run_dir: Path) -> None:
    store(run_dir, "rollouts/step-000009.parquet", [5.0])
    store(run_dir, "evaluations/dev-000010.parquet", [0.5, None, 1.0, -1.0])
    store(run_dir, "rollouts/step-000002.parquet", [6.0])
    found = report(run_dir)
    shown = [(sample.why, sample.prompt) for sample in found.samples]
    assert shown == [("Highest reward, 1", "question 2"), ("Lowest reward, -1", "question 3")]
    assert found.samples_from.startswith("Of 3 responses in evaluations/dev-000010.parquet. More in a terminal: moerl ")


def test_a_long_response_is_cut_in_the_middle_and_says_so(run_dir: Path) -> None:
    store(run_dir, "rollouts/step-000001.parquet", [1.0], "a" * 2000 + "the end")
    (sample,) = report(run_dir).samples
    assert len(sample.response) < 600
    assert "characters ...]" in sample.response
    assert sample.response.endswith("the end")


def test_an_episode_of_several_sessions_is_one_sample(run_dir: Path) -> None:
    write_dump(run_dir / "rollouts/step-000003.parquet")
    found = report(run_dir)
    assert [(each.why, len(each.sessions)) for each in found.samples] == [
        ("Highest reward, 1", 3),
        ("Lowest reward, 0", 1),
    ]
    assert found.samples_from.startswith("Of 4 responses in 2 episodes in rollouts/step-000003.parquet.")
    store(run_dir, "rollouts/step-000004.parquet", [1.0])
    assert report(run_dir).samples[0].sessions == ()


def test_a_run_without_responses_and_one_with_a_damaged_file_say_so(run_dir: Path) -> None:
    found = report(run_dir)
    assert found.samples == ()
    assert "dump.rollouts_every=N" in found.samples_from
    store(run_dir, "rollouts/step-000001.parquet", [None])
    assert report(run_dir).samples_from == "rollouts/step-000001.parquet holds no response with a reward."
    (run_dir / "rollouts/step-000001.parquet").write_bytes(b"PAR1 nonsense")
    assert report(run_dir).samples_from.startswith("rollouts/step-000001.parquet cannot be read: ")


def test_evaluations_join_the_steps_under_names_of_their_own(run_dir: Path) -> None:
    rows = [{"stage": "evaluation", "step": 0, "accuracy/mean": 0.25}, {**ROW, "accuracy/mean": 0.5}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = {step.step: step.metrics for step in report(run_dir).steps}
    assert steps[0] == {"evaluation/accuracy/mean": 0.25}
    assert steps[1]["accuracy/mean"] == 0.5
