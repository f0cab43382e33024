"""`moerl status`: what it reads from a run directory, whoever is or was at work there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moerl.buffer.ledger import LEDGER_FILE, Ledger
from moerl.errors import ConfigError, MoerlError
from moerl.launch.run_lock import run_lock
from moerl.launch.status import run_status
from moerl.trainer.checkpoint import CHECKPOINTS


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("{}")
    ledger = Ledger()
    for number in range(3):
        ledger.issue(number, 8)
    ledger.quarantine(0, "routing_rows")
    ledger.train(0, 7)
    ledger.filter(1, "equal_rewards")
    (tmp_path / LEDGER_FILE).write_text(json.dumps({"step": 4, "steps": 9, **ledger.snapshot()}))
    return tmp_path


def told(run_dir: Path, capsys: pytest.CaptureFixture[str], *names: str) -> str:
    for name in names:
        (run_dir / CHECKPOINTS / name).mkdir(parents=True)
    assert run_status(run_dir) == 0
    return capsys.readouterr().out


def test_every_rollout_is_told_of_by_its_end(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(run_dir, capsys, "1-rl-000002", "1-rl-000004")
    for line in (
        "checkpoints    2, the newest 1-rl-000004",
        "step           4 of 9, done",
        "rollouts       24 asked for",
        "  trained      7\n",
        "  filtered     8 (equal_rewards 8)",
        "  quarantined  1 (routing_rows 1)",
        "  pending      8\n",
    ):
        assert line in text


def test_a_run_is_running_while_its_lock_is_held(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"stopped; go on with `moerl train resume={run_dir}`" in told(run_dir, capsys)
    with run_lock(run_dir):
        assert "state          running, process " in told(run_dir, capsys)
    (run_dir / "summary.json").write_text("{}")
    assert "state          finished" in told(run_dir, capsys)


def test_a_run_before_its_first_step_has_no_ledger(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / LEDGER_FILE).unlink()
    assert "no step of reinforcement learning is done yet" in told(run_dir, capsys)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"step": 1, "steps": 2, "issued": []}'])
def test_a_damaged_ledger_is_named(text: str, run_dir: Path) -> None:
    (run_dir / LEDGER_FILE).write_text(text)
    with pytest.raises(MoerlError, match=r"status: .*ledger.json cannot be read"):
        run_status(run_dir)


def test_sums_that_are_not_right_are_named(run_dir: Path) -> None:
    stored = json.loads((run_dir / LEDGER_FILE).read_text())
    (run_dir / LEDGER_FILE).write_text(json.dumps(stored | {"trained": 6}))
    with pytest.raises(MoerlError, match="the sums are not right"):
        run_status(run_dir)


def test_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        run_status(tmp_path)
