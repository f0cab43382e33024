"""Faults in a run: wrong data between engine and trainer is named and trains nothing; full disks lose nothing."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from moerl_runs import DoneRun, Fault, Finished, Runs, Sums, rows, summary


def train(forked: Runs, run: Path, *overrides: str, fault: Fault, draws: bool = False) -> Finished:
    return forked.run("train", "recipe=tiny", f"run_dir='{run}'", *overrides, fault=fault, draws=draws)


def rl_steps(run: Path) -> list[int]:
    return [row["step"] for row in rows(run) if row["stage"] == "rl"]


def reasons(run: Path) -> list[str]:
    return [json.loads(file.read_text())["reason"] for file in (run / "quarantine").glob("*/record.json")]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (("shift_routing", {"call": 3}), "checksum"),
        # Frames carry the batches of the cold start, too: six steps of it, then two minibatches in each step.
        pytest.param(("flip_bit_of_frame", {"call": 6 + 3}), "error: contract: ", marks=pytest.mark.slow),
        pytest.param(
            ("repeat_an_expert", {"call": 2}),
            "error: contract: repeated_expert in field 'expert_ids'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_damaged_batch_stops_the_run_before_its_update(
    fault: Fault, error: str, forked: Runs, sums: Sums, undisturbed: DoneRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    stopped = forked.run(*sums.train(run), fault=fault, path=[sums.folder])
    assert stopped.status == 1, stopped.output
    assert error in stopped.output
    assert "Traceback" not in stopped.output
    assert stopped.output.endswith(f"go on from the last checkpoint: moerl train resume={run}\n")
    assert rl_steps(run) == [1]
    # Nothing of the damaged step was kept: the run goes on as if it had never been.
    finished = forked.run("train", f"resume={run}", path=[sums.folder])
    assert finished.status == 0, finished.output
    assert rows(run) == rows(undisturbed.folder)
    weights = "final_model/model.safetensors"
    assert (run / weights).read_bytes() == (undisturbed.folder / weights).read_bytes()


def test_an_update_without_a_finite_gradient_is_skipped_and_its_batch_is_kept(forked: Runs, tmp_path: Path) -> None:
    from moerl.contract.disk import read_parquet

    run = tmp_path / "run"
    finished = train(forked, run, fault=("spoil_losses", {"calls": 1}))
    assert finished.status == 0, finished.output
    assert "WARNING: the gradient was not finite, update skipped (1 in a row" in finished.output
    (kept,) = (run / "skipped").glob("*.parquet")
    assert str(kept) in finished.output
    assert len(read_parquet(kept)) > 0
    first, *others = [row for row in rows(run) if row["stage"] == "rl"]
    assert first["optimizer/skipped"] == 1
    assert all(row["optimizer/skipped"] == 0 for row in others)


@pytest.mark.slow
def test_too_many_skipped_updates_in_a_row_end_the_run(forked: Runs, tmp_path: Path) -> None:
    stopped = train(
        forked, tmp_path / "run", "trainer.max_skipped_updates=1", fault=("spoil_losses", {"calls": 1_000_000})
    )
    assert stopped.status == 1
    assert "error: the gradient is not finite; seen: 2 skipped updates in a row" in stopped.output
    assert len(list((tmp_path / "run" / "skipped").glob("*.parquet"))) == 2


@pytest.mark.slow
def test_routing_of_the_row_before_is_a_replay_error(forked: Runs, tmp_path: Path) -> None:
    stopped = train(forked, tmp_path / "run", "--traceback", fault=("shift_routing", {"call": 1}))
    assert "moerl.errors.ReplayError" in stopped.output


UPDATES_OF_THE_COLD_START = 4
FIRST_ROW = "first differing row: rollout rl-000001/"
NOT_PROVED = "error: Keep Routing was not proved in layer 1, rank 0, microbatch 0, forward: checksum"
WRONG_ROUTING: dict[str, tuple[Fault, int, list[str]]] = {
    "rows": (("shift_routing", {"call": 2}), 1, [NOT_PROVED, FIRST_ROW]),
    "layers": (("shift_layers", {"call": 2}), 1, [NOT_PROVED, FIRST_ROW]),
    "trajectories of equal length": (("swap_trajectories", {"call": 2, "equal": True}), 1, [NOT_PROVED, FIRST_ROW]),
    "trajectories": (("swap_trajectories", {"call": 2, "equal": False}), 1, [NOT_PROVED, FIRST_ROW]),
    "prompts left to the router": (("leave_prompts_to_the_router", {"call": 2}), 1, [NOT_PROVED]),
    "rows cut off": (("cut_routing", {"call": 2}), 1, ["error: contract: wrong_shape in field 'expert_ids'"]),
    "prompts not captured": (
        ("drop_prompt_routing", {"only": "rl-000001/", "flagged": True}),
        1,
        ["error: rollout rl-000001/", "cannot be replayed", "rows without captured routing"],
    ),
    "prompts not sent": (
        ("drop_prompt_routing", {"only": "rl-000001/", "flagged": False}),
        1,
        ["quarantine_rate_exceeded", "{'wrong_shape': "],
    ),
    "a router without replay": (
        ("dead_router", {"how": "hook"}),
        0,
        ["error: layer 2 dispatched tokens without asking the replay hook"],
    ),
    "a router without gradient": (
        ("dead_router", {"how": "gradient"}),
        0,
        ["error: the router of layer 2 is dead: it would get no gradient"],
    ),
}
"""Faults in routing by name: the fault, the number of RL steps before its effect, and what the run says."""


ALIKE = {
    *("layers", "trajectories", "trajectories of equal length", "prompts left to the router", "prompts not sent"),
    *("a router without gradient", "rows cut off"),
}
"""Faults that are found as those beside them, or in tests of one process: slow."""


@pytest.mark.parametrize(
    ("fault", "num_right", "said"),
    [
        pytest.param(*each, id=name, marks=(pytest.mark.slow,) if name in ALIKE else ())
        for name, each in WRONG_ROUTING.items()
    ],
)
def test_a_run_with_wrong_routing_ends_before_an_update(
    fault: Fault, num_right: int, said: list[str], forked: Runs, tmp_path: Path
) -> None:
    run, updates = tmp_path / "run", tmp_path / "updates"
    counted: Fault = ("both", {"first": fault, "second": ("count_updates", {"file": str(updates)})})
    # Without a mismatch table in the second step it is the update's own proof that fails.
    stopped = train(forked, run, "mismatch.every=0", fault=counted)
    assert stopped.status == 1, stopped.output
    for words in said:
        assert words in stopped.output
    assert "Traceback" not in stopped.output
    assert len(updates.read_bytes()) == UPDATES_OF_THE_COLD_START + num_right
    assert rl_steps(run) == list(range(1, num_right + 1))
    written = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert written == ["0-sft-000003", "0-sft-000004", "1-rl-000001"][num_right:][:2]


def test_an_engine_that_does_not_come_back_from_a_bucket_ends_the_run_with_its_name(
    forked: Runs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    receive = "moerl.rollout.embedded:EmbeddedEngine.receive"
    stopped = train(forked, run, "weights.step_seconds=3", fault=("hang", {"place": receive, "call": 2}))
    assert stopped.status == 1, stopped.output
    assert "error: weight update: the engine of rank 0 has not come back from bucket 1" in stopped.output
    assert "expected: every step within weights.step_seconds = 3" in stopped.output
    assert rl_steps(run) == []


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        ("KeyboardInterrupt", 130, "\ninterrupted\n"),
        pytest.param("ZeroDivisionError", 70, "ZeroDivisionError: injected\n", marks=pytest.mark.slow),
        ("OSError", 1, "and try again; --traceback shows where it was raised\n"),
    ],
)
def test_whatever_ends_a_run_the_last_line_says_how_it_goes_on(
    error: str, status: int, said: str, forked: Runs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    update = "moerl.trainer.optimizer:Optimizer.update"
    stopped = train(forked, run, fault=("fail", {"place": update, "error": error, "call": 3}))
    assert stopped.status == status, stopped.output
    assert stopped.output.endswith(f"{said}go on from the last checkpoint: moerl train resume={run}\n")


@pytest.mark.parametrize(
    ("place", "call", "file"),
    [
        pytest.param(
            "moerl.orchestration.rollouts:Collector.dump", 2, "rollouts/step-000002.parquet", marks=pytest.mark.slow
        ),
        pytest.param("moerl.orchestration.reporting:Reporter.log", 6, "metrics.jsonl", marks=pytest.mark.slow),
        pytest.param("moerl.orchestration.reporting:draw_curves", 1, "", marks=pytest.mark.slow),
    ],
    ids=["a dump", "metrics", "curves"],
)
def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room(
    place: str, call: int, file: str, forked: Runs, tiny: DoneRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    # As much as its output may take.
    full: Fault = ("fill_disk", {"place": place, "call": call, "room_bytes": 4096})
    stopped = train(forked, run, fault=full, draws=True)
    assert stopped.status == 1, stopped.output
    path = run / file if file else run
    assert re.search(f"error: cannot write {path}; seen: .*File too large.*; expected: room", stopped.output)
    assert "Traceback" not in stopped.output
    assert "Exception in thread" not in stopped.output
    assert stopped.output.endswith(f"go on from the last checkpoint: moerl train resume={run}\n")
    finished = forked.run("train", f"resume={run}")
    assert finished.status == 0, finished.output
    assert rows(run) == rows(tiny.folder)


@pytest.mark.slow
def test_a_run_directory_that_turns_read_only_is_named_and_the_run_goes_on_once_it_can_be_written(
    forked: Runs, tiny: DoneRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    update = "moerl.trainer.optimizer:Optimizer.update"
    # In the first step, whose groups are in the journal, the layers' rows are the first that need a file.
    fault: Fault = ("turn_read_only", {"place": update, "call": 5, "folder": str(run)})
    stopped = train(forked, run, fault=fault)
    assert stopped.status == 1, stopped.output
    assert f"error: cannot write {run}/metrics.jsonl; seen: Read-only file system; expected: room" in stopped.output
    assert "Traceback" not in stopped.output
    assert stopped.output.endswith(f"go on from the last checkpoint: moerl train resume={run}\n")
    finished = forked.run("train", f"resume={run}")
    assert finished.status == 0, finished.output
    assert rows(run) == rows(tiny.folder)


def test_a_full_disk_at_the_journal_loses_no_group_at_the_second_resume(
    forked: Runs, tiny: DoneRun, tmp_path: Path
) -> None:
    run, append = tmp_path / "run", "moerl.buffer.journal:Journal.append"
    segment = run / "journal" / "000001.journal"
    # The second step's first two groups fit, and some of its third.
    stopped = train(forked, run, fault=("fill_disk", {"place": append, "call": 6, "room_bytes": 6000}))
    assert stopped.status == 1, stopped.output
    assert f"error: cannot write {segment}; seen: File too large" in stopped.output
    assert "Traceback" not in stopped.output
    assert segment.stat().st_size == 6000
    killed = forked.run("train", f"resume={run}", fault=("kill", {"place": append, "call": 1, "after": True}))
    assert killed.status == -signal.SIGKILL, killed.output
    assert "bytes of unfinished records; left out" in killed.output
    assert "finished groups that are taken from the journal: 2\n" in killed.output
    finished = forked.run("train", f"resume={run}")
    assert finished.status == 0, finished.output
    assert "finished groups that are taken from the journal: 3\n" in finished.output
    assert "unfinished records" not in finished.output
    assert rows(run) == rows(tiny.folder)


def test_a_damaged_line_of_metrics_is_named_before_the_run_goes_on(forked: Runs, tiny: DoneRun, tmp_path: Path) -> None:
    run = Path(shutil.copytree(tiny.folder, tmp_path / "run"))
    metrics = run / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole.replace("\n", "\n\x00\n", 1))
    refused = forked.run("train", f"resume={run}")
    assert refused.status == 1, refused.output
    assert f"error: {metrics}, line 2: not JSON; expected a row of metrics" in refused.output
    assert "starting Megatron" not in refused.output
    assert "Traceback" not in refused.output
    metrics.write_text(whole + '{"stage": "rl", "st')
    finished = forked.run("train", f"resume={run}")
    assert finished.status == 0, finished.output
    assert "note: metrics.jsonl ended with 19 bytes of an unfinished row; dropped" in finished.output
    assert metrics.read_text() == whole


def test_before_the_first_checkpoint_there_is_nothing_to_go_on_from(forked: Runs, tmp_path: Path) -> None:
    step = "moerl.trainer.trainer:MegatronTrainer.step"
    stopped = train(forked, tmp_path / "run", fault=("fail", {"place": step, "error": "KeyboardInterrupt"}))
    assert stopped.output.endswith("\ninterrupted\n")


def test_a_broken_answer_is_put_aside_and_the_run_goes_on(forked: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fault = ("break_records", {"only": "rl-000000/", "count": 2})
    finished = train(forked, run, "quarantine.max_rate=0.2", fault=fault)
    assert finished.status == 0, finished.output
    assert rl_steps(run) == [1, 2, 3]
    assert reasons(run) == ["logprob_positive"] * 2
    assert [row["quarantine/count"] for row in rows(run) if row["stage"] == "rl"] == [2, 2, 2]
    assert summary(run)["num_quarantined"] == 2
    assert f"2 trajectories broke the data contract: see {run / 'quarantine'}" in finished.output


def test_too_many_broken_answers_stop_the_run(forked: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped = train(forked, run, "quarantine.max_rate=0.1", fault=("break_records", {"only": "rl-", "count": 8}))
    assert stopped.status == 1, stopped.output
    assert "contract: quarantine_rate_exceeded" in stopped.output
    assert "{'logprob_positive': " in stopped.output
    assert rl_steps(run) == []
    assert set(reasons(run)) == {"logprob_positive"}


@pytest.mark.slow
def test_what_was_put_aside_is_still_counted_after_a_kill(forked: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    break_some: Fault = ("break_records", {"only": "rl-000000/", "count": 2})
    killed = train(
        forked,
        run,
        "quarantine.max_rate=0.2",
        fault=(
            "both",
            {"first": break_some, "second": ("kill", {"place": "moerl.orchestration.run:Run.log", "call": 6})},
        ),
    )
    assert killed.status == -signal.SIGKILL
    finished = forked.run("train", f"resume={run}", fault=("break_records", {"only": "rl-000002/", "count": 1}))
    assert finished.status == 0, finished.output
    assert [row["quarantine/count"] for row in rows(run) if row["stage"] == "rl"] == [2, 2, 3]
    assert summary(run)["num_quarantined"] == 3


@pytest.mark.slow
def test_a_step_without_any_valid_answer_stops_the_run(forked: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fault = ("break_records", {"only": "rl-000000/", "count": 16})
    stopped = train(forked, run, "quarantine.max_rate=1.0", fault=fault)
    assert stopped.status == 1
    assert "error: step 1: no response was admitted" in stopped.output
