"""Two ranks through the command line: the same run as with one, nothing left behind, and a rank that dies."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from moerl_runs import DoneRun, Runs, Sums, moerl
from run_checks import assert_close, processes_of

FAULT_IN_ONE_RANK = """
import os, sys
if os.environ.get("RANK") == "1":
    sys.path.insert(0, {tests!r})
    import faults
    faults.{fault}
"""
DEATHS = {
    "in an update": 'kill("moerl.trainer.optimizer:Optimizer.update", call=6 + 2 * 3 - 1)',
    "while weights are gathered": "kill_in_gather(update=1 + 3)",
}
"""Both in the third step."""


def work_among_strange_modules(folder: Path, sums: Sums) -> None:
    """A directory to start a run in, with the reward function, and with modules that no rank may import."""
    folder.mkdir()
    shutil.copy(sums.folder / "sums_reward.py", folder)
    for name in ("json", "numpy", "torch", "transformers"):
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} of the current directory')")


@pytest.mark.slow
@pytest.mark.parametrize("fault", DEATHS.values(), ids=DEATHS)
def test_a_rank_that_dies_is_named_the_other_is_stopped_and_the_run_goes_on(
    fault: str, sums: Sums, undisturbed: DoneRun, tmp_path: Path
) -> None:
    run, faulty, here = tmp_path / "run", tmp_path / "faulty", tmp_path / "here"
    faulty.mkdir()
    work_among_strange_modules(here, sums)
    tests = str(Path(__file__).parents[1])
    (faulty / "sitecustomize.py").write_text(FAULT_IN_ONE_RANK.format(tests=tests, fault=fault))
    died = moerl(*sums.train(run), "parallel.expert=2", cwd=here, path=[faulty])
    assert died.status == 1, died.output
    log = run / "logs" / "rank-1.log"
    assert "error: rank 1 of the trainer was lost in" in died.output, died.output
    assert "seen: killed by SIGKILL; it wrote nothing" in died.output
    assert died.output.endswith(f"go on from the last checkpoint: moerl train resume={run}\n")
    assert not log.exists()
    assert processes_of(run) == []
    finished = moerl("train", f"resume={run}", cwd=here)
    assert finished.status == 0, finished.output
    assert "rl: going on from step 2" in finished.output
    assert processes_of(run) == []
    assert not list(run.glob(".rendezvous*"))
    files = [path.name for path in (run / "checkpoints" / "1-rl-000005").glob("*.distcp")]
    assert sorted(files) == ["__0_0.distcp", "__1_0.distcp"]
    assert_close(run, undisturbed.folder)


def test_tensor_parallel_ranks_train_as_one(forked: Runs, sums: Sums, undisturbed: DoneRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = forked.run(*sums.train(run), "parallel.tensor=2", path=[sums.folder])
    assert finished.status == 0, finished.output
    assert processes_of(run) == []
    assert_close(run, undisturbed.folder)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["peak_rss_bytes"] > json.loads((undisturbed.folder / "summary.json").read_text())["peak_rss_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tensor=2", "parallel.expert=2", "trainer.recompute=full"),
        ("parallel.pipeline=2", "parallel.expert=2", "weights.transport=disk", "weights.senders=4"),
        ("parallel.pipeline=2", "parallel.virtual_pipeline=2", "trainer.distributed_optimizer=overlap"),
        ("parallel.context=2", "trainer.recompute=selective"),
    ],
    ids=["TP2xEP2", "PP2xEP2", "PP2-VPP2", "CP2"],
)
def test_a_run_in_any_layout_is_the_run_of_one_process(
    layout: tuple[str, ...], sums: Sums, undisturbed: DoneRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    finished = moerl(*sums.train(run), *layout, path=[sums.folder])
    assert finished.status == 0, finished.output
    assert processes_of(run) == []
    assert_close(run, undisturbed.folder)


@pytest.mark.slow
def test_a_run_goes_on_with_more_ranks(sums: Sums, undisturbed: DoneRun, tmp_path: Path, forked: Runs) -> None:
    run = tmp_path / "run"
    update = "moerl.trainer.optimizer:Optimizer.update"
    killed = forked.run(*sums.train(run), fault=("kill", {"place": update, "call": 6 + 2 * 3 - 1}), path=[sums.folder])
    assert killed.status == -signal.SIGKILL, killed.output
    finished = moerl("train", f"resume={run}", "parallel.tensor=2", path=[sums.folder])
    assert finished.status == 0, finished.output
    assert "rl: going on from step 2" in finished.output
    assert_close(run, undisturbed.folder)
