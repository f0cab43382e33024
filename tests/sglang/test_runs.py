"""Whole runs of `moerl train` with a live server: the rollouts of the embedded engine, also where the server is killed.

The tiny model ties its embeddings and pads them beyond the tokenizer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import sglang_live
from listening import listening, open_to_others
from report_pages import needs_chromium, report_of_page
from transformers import AutoTokenizer
from waiting import output_of

from moerl.contract.disk import read_parquet
from moerl.contract.trajectory import Trajectory
from moerl.rollout.fleet.endpoint import read_endpoint
from moerl.rollout.sglang.server import ServerOptions

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

STEPS = 5


@dataclass(frozen=True)
class Finished:
    """A run that ended well. open_to_others: sockets that it listened on, where `train` was asked to look."""

    folder: Path
    output: str
    open_to_others: tuple[str, ...] = ()

    def rollouts(self, step: int) -> dict[str, Trajectory]:
        trajectories = read_parquet(self.folder / "rollouts" / f"step-{step:06d}.parquet")
        found = {trajectory.lineage.rollout_id: trajectory for trajectory in trajectories}
        assert len(found) == len(trajectories)
        return found

    @property
    def steps(self) -> list[dict[str, float]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["stage"] == "rl"]


def train(folder: Path, *overrides: str, steps: int = STEPS, fault: Callable[[int], None] | None = None) -> Finished:
    """`moerl train recipe=tiny`; `fault` happens to the first server's pid when the first rollouts are on disk. By then
    weights were sent, and all sockets are there."""
    found: tuple[str, ...] = ()
    command = [sys.executable, "-m", "moerl", "train", "recipe=tiny", f"rl.steps={steps}", f"run_dir={folder}"]
    with subprocess.Popen(
        [*command, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        while fault is not None and process.poll() is None:
            if (folder / "rollouts" / "step-000001.parquet").exists():
                assert len({pid for pid, _, _ in listening(process.pid)}) > 2
                found = tuple(open_to_others(process.pid))
                fault(read_endpoint(folder / "sglang" / "0" / "server.json").pid)
                break
            time.sleep(0.02)
        output, _ = output_of(process, 500)
    assert process.returncode == 0, output
    return Finished(folder, output, found)


@pytest.fixture(scope="module")
def served(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("runs") / "served"
    return train(folder, "rollout=sglang", f"rollout.environment={environment}", fault=lambda pid: None)


def test_a_run_listens_where_nobody_else_can_reach_it(served: Finished):
    assert served.open_to_others == ()


def test_a_server_and_the_embedded_engine_sample_the_same_rollouts(served: Finished, tmp_path: Path):
    embedded = train(tmp_path / "embedded", steps=1)
    theirs = embedded.rollouts(1)
    ours = served.rollouts(1)
    assert ours.keys() == theirs.keys()
    for rollout_id, trajectory in ours.items():
        assert trajectory.token_ids.tolist() == theirs[rollout_id].token_ids.tolist()


def test_servers_that_sleep_while_the_trainer_works_sample_the_same_rollouts(
    served: Finished, environment: Path, tmp_path: Path
):
    colocated = ("rollout=sglang", "rollout.placement=colocated", "rollout.memory_share=0.4", "trainer.sleep=true")
    slept = train(tmp_path / "slept", *colocated, f"rollout.environment={environment}")
    assert "lost" not in slept.output
    for step in range(1, STEPS + 1):
        theirs = served.rollouts(step)
        for rollout_id, trajectory in slept.rollouts(step).items():
            assert trajectory.token_ids.tolist() == theirs[rollout_id].token_ids.tolist()
    assert all(step["seconds/sleep"] > 0.0 for step in slept.steps)
    assert all("seconds/sleep" not in step for step in served.steps)


@needs_chromium
def test_the_report_of_a_served_run_opens_in_order(served: Finished, tmp_path: Path):
    report = report_of_page(served.folder / "report.html", tmp_path / "profile")
    assert report.verdict.level == "good", report.verdict
    assert ("Sampler", "sglang") in report.facts
    assert [step.metrics["mismatch/logprob_abs_max"] for step in report.steps if step.step] == [
        metrics["mismatch/logprob_abs_max"] for metrics in served.steps
    ]


def test_the_trainer_agrees_with_the_server_in_every_step(served: Finished):
    assert len(served.steps) == STEPS
    for metrics in served.steps:
        assert metrics["mismatch/logprob_abs_max"] <= 1e-5
        assert metrics["mismatch/tokens_with_different_experts"] == 0
        assert metrics["quarantine/count"] == 0
        assert 0 < metrics["rollout/prefix_hit_rate"] < 1


@pytest.mark.parametrize("interrupt", ["retract", "abort_resume", "drain"])
def test_rollouts_that_are_carried_over_updates_keep_what_each_version_gave_them(
    interrupt: str, environment: Path, tmp_path: Path
):
    run = train(
        tmp_path / "run",
        *("rollout=sglang", f"rollout.environment={environment}", f"weights.interrupt={interrupt}"),
        *("buffer.max_staleness=1", "rollout.max_new_tokens=96", "optimizer.lr=1e-3", "trainer.microbatch_tokens=2048"),
        "checkpoint.keep=9",
    )
    rollouts = [each for step in range(1, STEPS + 1) for each in run.rollouts(step).values()]
    versions = {each.lineage.rollout_id: each.policy_versions[each.sampled] for each in rollouts}
    assert len(versions) == len(rollouts) == STEPS * 16
    assert all((np.diff(each) >= 0).all() for each in versions.values())
    mixed = sum(each[0] != each[-1] for each in versions.values())
    assert mixed == 0 if interrupt == "drain" else mixed > 0
    assert all(metrics["staleness/age_max"] <= 1 for metrics in run.steps)
    assert all(metrics["quarantine/count"] == 0 for metrics in run.steps)
    # Those of one version alone are what its weights give, whatever was updated around them.
    latest = max(int(each[0]) for each in versions.values() if each[0] == each[-1])
    assert latest > 0
    exported, moerl = tmp_path / "version", [sys.executable, "-m", "moerl"]
    subprocess.run([*moerl, "export", str(run.folder), "--step", str(latest), "--output", str(exported)], check=True)
    judged = [*moerl, "verify", str(run.folder / "rollouts"), "--model", str(exported), "--version", str(latest)]
    subprocess.run([*judged, "--tolerance", "1e-4"], check=True)


def test_an_evaluation_on_a_server_of_other_weights_is_one_of_the_model_it_names(
    served: Finished, environment: Path, tmp_path: Path
):
    # It was started from the cold start, and calls those weights version 0, too.
    model, cold = served.folder / "final_model", served.folder / "cold_start"
    options = ServerOptions(
        cold,
        environment,
        "cpu",
        dtype="float32",
        max_pool_tokens=8192,
        vocab_size=len(AutoTokenizer.from_pretrained(model)),
    )
    with sglang_live.running(options, tmp_path / "server") as server:
        named = ("rollout=sglang_server", f"rollout.server='{server.folder / 'server.json'}'")
        command = [sys.executable, "-m", "moerl", "eval", "recipe=tiny", "model=pretrained", f"model.path='{model}'"]
        done = subprocess.run(
            [*command, *named, f"run_dir='{tmp_path / 'run'}'"],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = json.loads((served.folder / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("heldout/accuracy", "heldout/length_mean"):
        assert row[name] == last[name]


def test_a_run_ends_its_server_and_keeps_its_log(served: Finished):
    assert not (served.folder / "sglang" / "0" / "server.json").exists()
    assert "max_total_num_tokens=" in (served.folder / "sglang" / "0" / "server.log").read_text()


def test_a_run_whose_server_is_killed_trains_on_every_rollout_once(served: Finished, environment: Path, tmp_path: Path):
    killed = train(tmp_path / "killed", "rollout=sglang", f"rollout.environment={environment}", fault=kill)
    assert "server 'sglang-0' is lost" in killed.output
    require_every_rollout_once(killed, served)


def test_a_run_goes_on_while_one_of_two_servers_stands_still_for_half_a_minute(
    served: Finished, environment: Path, tmp_path: Path
):
    servers = ("rollout=sglang", f"rollout.environment={environment}", "rollout.servers=2", "rollout.probe_seconds=3")
    stopped = train(tmp_path / "stopped", *servers, fault=stand_still)
    require_every_rollout_once(stopped, served)


def test_a_run_with_two_senders_gives_a_server_that_took_the_place_of_a_killed_one_the_parts_of_both(
    served: Finished, environment: Path, tmp_path: Path
):
    server = ("rollout=sglang", f"rollout.environment={environment}")
    senders = ("parallel.pipeline=2", "weights.senders=2")
    killed = train(tmp_path / "killed", *server, *senders, fault=kill)
    assert "server 'sglang-0' is lost" in killed.output
    assert "server 'sglang-0': going on" in killed.output
    assert killed.open_to_others == ()
    require_every_rollout_once(killed, served)


def kill(pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)


def stand_still(pid: int) -> None:
    def go_on() -> None:
        # By then it may be lost, and replaced.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGCONT)

    os.killpg(pid, signal.SIGSTOP)
    threading.Timer(30.0, go_on).start()


def require_every_rollout_once(killed: Finished, served: Finished) -> None:
    assert [metrics["weights/version"] for metrics in killed.steps] == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        seen, expected = killed.rollouts(step), served.rollouts(step)
        assert seen.keys() == expected.keys()
        for rollout_id, trajectory in seen.items():
            assert set(trajectory.policy_versions[trajectory.sampled].tolist()) == {step - 1}
            if step <= 2:
                assert trajectory.token_ids.tolist() == expected[rollout_id].token_ids.tolist()
    for metrics in killed.steps:
        assert metrics["mismatch/logprob_abs_max"] <= 1e-5
        assert metrics["quarantine/count"] == 0
