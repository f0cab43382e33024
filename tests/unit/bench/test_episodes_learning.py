"""Curves and conclusions of the benchmark of learning, from runs that are there."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, which finds its own modules beside it."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("episodes_learning")


def run_of(
    folder: Path, *dev: float, heldout: tuple[float, float], names: Sequence[str] = (), minutes: float = 2.0
) -> Path:
    """A finished run with these accuracies on dev problems, and on held-out ones before and after."""
    folder.mkdir()
    rows: list[dict[str, Any]] = [
        {"stage": "evaluation", "step": 10 * i, "accuracy/mean": each} for i, each in enumerate(dev)
    ]
    rows[0]["heldout/accuracy"], rows[-1]["heldout/accuracy"] = heldout
    rows.insert(1, {"stage": "rl", "step": 1, "accuracy/mean": 9.0, **dict.fromkeys(names, 0.25)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"wall_seconds": 60.0 * minutes}))
    return folder


def test_accuracies_are_means_over_seeds_and_must_rise_with_each(learning: Any, tmp_path: Path) -> None:
    folders = [
        run_of(tmp_path / "a", 0.1, 0.3, heldout=(0.2, 0.4)),
        run_of(tmp_path / "b", 0.3, 0.5, heldout=(0.3, 0.6)),
    ]
    _, before, after, *dev = learning.results("guess", folders)
    assert (before.value, after.value, after.holds) == (pytest.approx(0.25), pytest.approx(0.5), True)
    assert after.spread == pytest.approx(0.2)
    assert [(each.name, each.value) for each in dev] == [
        ("guess: dev problems, step 0", pytest.approx(0.2)),
        ("guess: dev problems, step 10", pytest.approx(0.4)),
    ]
    folders.append(run_of(tmp_path / "c", 0.3, 0.5, heldout=(0.3, 0.3)))
    assert not learning.results("guess", folders)[2].holds


def test_the_slowest_run_counts_and_may_take_ten_minutes(learning: Any, tmp_path: Path) -> None:
    folders = [run_of(tmp_path / "a", 0.1, 0.3, heldout=(0.2, 0.4), minutes=9.5)]
    assert learning.results("guess", folders)[0].holds
    folders.append(run_of(tmp_path / "b", 0.1, 0.3, heldout=(0.2, 0.4), minutes=10.5))
    slowest = learning.results("guess", folders)[0]
    assert (slowest.value, slowest.holds) == (pytest.approx(10.5), False)


def test_an_image_has_a_chart_of_each_recipe_and_runs_that_ended_are_not_repeated(
    learning: Any, tmp_path: Path
) -> None:
    folders = [run_of(tmp_path / "a", 0.1, 0.3, heldout=(0.2, 0.4))]
    learning.train("no such recipe", 1, folders[0], [])
    learning.draw({"guess": folders, "self_play": folders}, tmp_path / "image.png")
    assert (tmp_path / "image.png").read_bytes()[:4] == b"\x89PNG"


def test_calls_of_tools_are_those_of_sampled_episodes(learning: Any, tmp_path: Path) -> None:
    folders = [run_of(tmp_path / name, 0.1, 0.3, heldout=(0.2, 0.4), names=[learning.CALLS]) for name in "ab"]
    found = {each.name: each.value for each in learning.results("calculator", folders)}
    assert found["calculator: tool calls of a sampled episode, last step"] == 0.25
    learning.draw({"calculator": folders}, tmp_path / "image.png")
    assert (tmp_path / "image.png").exists()
