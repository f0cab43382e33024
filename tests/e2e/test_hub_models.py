"""Runs that start from a model of a hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from moerl_runs import DoneRun, Runs
from small_hub import client_environment, commit_of, hub

from moerl.config.load import CONFIG_FILE, load_resolved

pytestmark = pytest.mark.slow

COMMIT, MOVED = commit_of("main"), "c" * 40
FEW = ["recipe=tiny", "model=pretrained", "sft.steps=0", "evaluation.dev_problems=4", "evaluation.heldout_problems=4"]


@dataclass
class Hub:
    models: dict[str, Any]
    heads: dict[str, str]
    asked: list[str]
    runs: Runs

    def move(self) -> None:
        """The branch main gets a commit that no run can start from; the one before stays."""
        files = self.models["owner/tiny"]["main"]
        self.models["owner/tiny"] = {"main": {**files, "config.json": b"{}"}, COMMIT: files}
        self.heads["main"] = MOVED


@pytest.fixture
def tiny_hub(tiny: DoneRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {file.name: file.read_bytes() for file in (tiny.folder / "cold_start").iterdir()}
    models, heads = {"owner/tiny": {"main": files}}, dict[str, str]()
    with hub(models, kind="models", heads=heads) as (address, asked):
        for name, value in client_environment(address, tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        for name in ("HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        runs = Runs(tmp_path)  # reads the environment as it starts
        yield Hub(models, heads, asked, runs)
        runs.close()


def test_a_run_from_a_name_goes_on_from_its_commit_and_is_exported(tiny_hub: Hub, tmp_path: Path) -> None:
    run = tmp_path / "run"
    began = tiny_hub.runs.run(
        "train", *FEW, "model.path=owner/tiny", "rl.steps=1", "checkpoint.every=1", f"run_dir='{run}'"
    )
    assert began.status == 0, began.output
    shown = f"model owner/tiny of the hub, commit {COMMIT}: {tmp_path}/home/hub/models--owner--tiny/snapshots/{COMMIT}"
    assert began.output.count(shown) == 1
    stored = load_resolved(run / CONFIG_FILE).model
    assert (stored.hub, stored.commit) == ("owner/tiny", COMMIT)
    tiny_hub.move()
    tiny_hub.asked.clear()
    resumed = tiny_hub.runs.run("train", f"resume={run}", "rl.steps=2")
    assert resumed.status == 0, resumed.output
    assert (load_resolved(run / CONFIG_FILE).model, tiny_hub.asked) == (stored, [])
    exported = tiny_hub.runs.run("export", str(run), "--output", str(tmp_path / "exported"))
    assert exported.status == 0, exported.output
    assert (tmp_path / "exported" / "tokenizer.json").is_file()


def test_a_name_is_evaluated(tiny_hub: Hub, tmp_path: Path) -> None:
    measured = tiny_hub.runs.run("eval", *FEW, "model.path=owner/tiny@main", f"run_dir='{tmp_path / 'run'}'")
    assert measured.status == 0, measured.output
    assert f"model owner/tiny@main of the hub, commit {COMMIT}: " in measured.output
