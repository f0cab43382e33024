"""Recipes as shipped: when a run counts as proved."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
STEP = {"stage": "rl", "replay/rows_verified": 10.0, "replay/updates_unproved": 0.0, "seconds/step": 2.0}
STEPS = [{"stage": "sft", "seconds/step": 1.0}, STEP, STEP]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("_gpu_start")


def ended(start: Any, folder: Path, status: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of a run with this exit status and these metrics, by name."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = folder / "run.log"
    log.write_text("starting Megatron\nerror: no memory\n\n")
    process = SimpleNamespace(returncode=status)
    run = start.Run("tiny", folder, process, SimpleNamespace(name=str(log)), started=0.0, seconds=9.0)
    return {result.name: result for result in start.results_of(run)}


def test_a_run_that_ends_well_with_every_update_proved_counts_and_tells_its_times(start: Any, tmp_path: Path) -> None:
    found = ended(start, tmp_path, 0, STEPS)
    assert found["tiny: replay proved"].value == 1.0
    assert found["tiny: routing rows proved"].value == 20.0
    assert found["tiny: whole run"].value == 9.0
    assert found["tiny: step of GRPO"].value == 2.0
    assert all(result.holds for result in found.values())


@pytest.mark.parametrize(
    ("status", "rows", "why"),
    [
        (1, STEPS, "status 1, 2 of 2 steps proved: error: no memory"),
        (0, STEPS[:2], "status 0, 1 of 1 steps proved"),
        (0, [*STEPS, STEP | {"replay/updates_unproved": 1.0}], "status 0, 2 of 3 steps proved"),
        (0, [STEP, STEP | {"replay/rows_verified": 0.0}], "status 0, 1 of 2 steps proved"),
    ],
)
def test_a_run_that_failed_or_did_not_prove_every_update_does_not_count(
    status: int, rows: list[dict[str, Any]], why: str, start: Any, tmp_path: Path
) -> None:
    found = ended(start, tmp_path, status, rows)
    (name,) = [name for name in found if name.startswith("tiny: replay proved; ")]
    assert why in name
    assert (found[name].value, found[name].holds) == (0.0, False)


def test_runs_that_have_ended_are_kept_though_another_never_ends(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(recipe: str, folder: Path, device: str) -> Any:
        run_folder = folder / recipe
        run_folder.mkdir()
        (run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in STEPS))
        status = None if recipe == "laptop" else 0
        process = SimpleNamespace(returncode=status, poll=lambda: status)
        log = folder / f"{recipe}.log"
        log.touch()
        output = SimpleNamespace(name=str(log), close=lambda: None)
        return start.Run(recipe, run_folder, process, output, started=0.0)

    def sleep(seconds: float) -> None:
        raise InterruptedError

    answer = tmp_path / "answer.json"
    monkeypatch.setattr(importlib.import_module("_gpu_checks"), "_answer_path", answer)
    monkeypatch.setattr(start, "start", begin)
    monkeypatch.setattr(start, "time", SimpleNamespace(monotonic=lambda: 9.0, sleep=sleep))
    with pytest.raises(InterruptedError):
        start.check("cpu")
    names = [result["name"] for result in json.loads(answer.read_text())["results"]]
    assert [name for name in names if name.endswith("replay proved")] == ["tiny: replay proved", "demo: replay proved"]


def test_a_metric_that_is_not_finite_is_named(start: Any, tmp_path: Path) -> None:
    found = ended(start, tmp_path, 0, [*STEPS, STEP | {"loss": float("nan")}])
    result = found["tiny: metrics that are not finite (rl loss)"]
    assert (result.value, result.holds) == (1, False)
