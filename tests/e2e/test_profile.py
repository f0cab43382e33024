"""The trace of a step of a run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from moerl_runs import DoneRun, Runs, rows


def test_the_trace_of_a_step_has_the_parts_of_the_step_and_changes_no_digit(
    forked: Runs, tiny: DoneRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    finished = forked.run("train", "recipe=tiny", f"run_dir='{run}'", "trainer.profile_steps=[2]")
    assert finished.status == 0, finished.output
    assert "trace of step 2: " in finished.output
    assert [file.name for file in (run / "profile").iterdir()] == ["step-000002.json.gz"]
    events = json.loads(gzip.decompress((run / "profile" / "step-000002.json.gz").read_bytes()))["traceEvents"]
    named = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"rollout", "scoring", "training", "replay", "forward and backward", "proof", "update", "sync"} <= named
    assert rows(run) == rows(tiny.folder)


def test_a_run_without_steps_to_profile_leaves_no_trace(tiny: DoneRun) -> None:
    assert not (tiny.folder / "profile").exists()
