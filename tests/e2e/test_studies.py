"""The studies of docs/keep_routing_proof.md and docs/keep_sampling_mask.md, shortened."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import run_within

SCRIPTS = Path(__file__).parents[2] / "scripts"
SHORT = ("sft.steps=60", "sft.num_examples=3840", "rl.prompts_per_step=8")

pytestmark = pytest.mark.slow


def study(name: str, *arguments: str, folder: Path) -> Any:
    result = folder / "study.json"
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *SHORT, *arguments]
    kept = ["--runs", str(folder / "runs"), "--json", str(result)]
    done = run_within([*command, *kept], 900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(result.read_text())


def test_the_routing_study_compares_every_mode_at_every_age(tmp_path: Path) -> None:
    plot = tmp_path / "study.png"
    rows = study("routing_study", "--seeds", "4", "--plot", str(plot), folder=tmp_path)
    by_case = {(row["updates"], row["mode"]): row for row in rows}
    assert len(rows) == len(by_case) == 1 + 5 * 3
    for updates in (0, 1, 2, 4, 8):
        assert by_case[updates, "rollout"]["routers"] == 0
        assert by_case[updates, "off"]["routers"] > 0
        assert by_case[updates, "trainer"]["routers"] == by_case[0, "off"]["routers"]
    assert by_case[0, "rollout"]["k3"] < by_case[8, "rollout"]["k3"]
    assert by_case[0, "trainer"]["abs_mean"] == pytest.approx(by_case[0, "off"]["abs_mean"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_mask_study_shows_the_mass_that_a_trainer_without_masks_misses(tmp_path: Path) -> None:
    (values,) = study("mask_study", "rl.steps=2", "--top-p", "0.8", folder=tmp_path).values()
    assert values["kept mass"] < 0.99
    assert values["mean ratio, off"] == pytest.approx(values["kept mass"], abs=2e-3)
    assert values["mean ratio, on"] == pytest.approx(1.0, abs=1e-3)
    assert values["outside [0.9, 1.1], on"] < values["outside [0.9, 1.1], off"]
