"""Responses of a run in the terminal."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moerl import cli


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    rows = [
        {
            "set": name,
            "prompt_id": f"{name}:{i}",
            "prompt": f"What is {i}?",
            "text": f"response {name} {i}\x1b[2J",
            "num_sampled": i,
            "finish_reason": "stop",
            "reward_reward": float(i),
            "reward_form": float(-i),
        }
        for name in ("a", "b")
        for i in range(4)
    ]
    (tmp_path / "evaluations").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "evaluations" / "dev-000001.parquet")
    return tmp_path


def test_the_best_and_the_worst_are_shown_with_their_rewards(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["samples", str(run_dir), "--count", "1", "--set", "b"]) == 0
    shown = capsys.readouterr().out
    assert "4 responses, by reward_reward" in shown
    assert "--- highest: b:3  reward 3  form -3  (3 tokens, stop)\nprompt:\n  | What is 3?\nresponse:\n" in shown
    assert "--- lowest: b:0" in shown
    assert "b:1" not in shown
    assert "\x1b" not in shown


def test_any_reward_may_sort(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["samples", str(run_dir), "--by", "reward_form", "--count", "1", "--best"]) == 0
    assert "highest: a:0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--set", "c"], "no responses of the set c; seen: a, b"),
        (["--by", "reward_x"], "--by: no such column; seen: reward_x"),
        (["--of", "rollouts/none.parquet"], "no responses; seen: rollouts/none.parquet"),
    ],
)
def test_what_is_not_there_is_named(arguments: list[str], part: str, run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["samples", str(run_dir), *arguments]) == 2
    assert part in capsys.readouterr().err


def test_a_broken_file_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    (run_dir / "evaluations" / "dev-000001.parquet").write_bytes(b"PAR1")
    assert cli.main(["samples", str(run_dir)]) == 2
    assert "dev-000001.parquet: cannot be read" in capsys.readouterr().err
