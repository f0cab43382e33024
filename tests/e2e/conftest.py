"""Fixtures of end-to-end tests: forked runs, a task whose rewards differ, and runs that several tests look at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import Finished, Runs, moerl

REWARD = """
def score(row, response):
    return sum(each.isdigit() for each in response) / (1 + len(response))
"""


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    yield runs
    runs.close()


@dataclass(frozen=True)
class Sums:
    """A JSONL of sums with a reward that differs from answer to answer, so that every step has a gradient."""

    folder: Path

    @property
    def arguments(self) -> list[str]:
        """`recipe=tiny` on these sums: several steps of each stage, all that carries state switched on."""
        return [
            "train",
            "recipe=tiny",
            "task=jsonl",
            f"task.path='{self.folder / 'sums.jsonl'}'",
            "task.reward=sums_reward:score",
            "task.heldout_fraction=0.2",
            "task.dev_fraction=0.2",
            "sft.steps=6",
            "algorithm.steps=5",
            "algorithm.minibatches=2",
            "algorithm.kl_coef=0.01",
            "rollout.max_new_tokens=10",
            "rollout.max_running=16",
            "checkpoint.every=2",
        ]


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Sums:
    folder = tmp_path_factory.mktemp("sums")
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(12) for b in range(12)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums_reward.py").write_text(REWARD)
    return Sums(folder)


@dataclass(frozen=True)
class DoneRun:
    run_dir: Path
    finished: Finished


@pytest.fixture(scope="session")
def undisturbed(sums: Sums, tmp_path_factory: pytest.TempPathFactory) -> DoneRun:
    """The sums, trained by the command itself from beginning to end."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    finished = moerl(*sums.arguments, f"run_dir='{run_dir}'", path=[sums.folder])
    assert finished.status == 0, finished.output
    return DoneRun(run_dir, finished)
