"""Progress display of a run."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console
from waiting import eventually

from moerl.telemetry.progress import HeartbeatProgress, LiveProgress, Pace, duration_text, figures_text, make_progress

METRICS = {
    "reward/mean": 0.5,
    "accuracy/mean": 0.25,
    "mismatch/logprob_abs_mean": 7e-4,
    "throughput/tokens_per_second": 4321.0,
    "optimizer/lr": 1.0,
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=20)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_figures_worth_watching_come_in_a_fixed_order():
    assert figures_text(METRICS) == "reward 0.500  accuracy 0.250  mismatch 7.0e-04  tokens/s 4,321"
    assert figures_text({"sft/loss": 1.25}) == "loss 1.250"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (42, "42s"), (185, "3m05s"), (3720, "1h02m")])
def test_durations_read_easily(seconds: float, text: str):
    assert duration_text(seconds) == text


def test_the_time_left_comes_from_the_steps_of_this_process_only():
    pace = Pace(first_step=40, total_steps=50, now=100.0)
    assert pace.seconds_left(40, 100.0) is None
    assert pace.seconds_left(42, 104.0) == 16.0


def test_tokens_a_second_are_the_mean_over_the_steps_of_this_process(plain: Console):
    """One slow step, then a fast one: 40 tokens in 4 s, then 60 in 1 s."""
    rows = [
        {"throughput/tokens_per_second": 10.0, "seconds/step": 4.0, "sft/loss": 2.0},
        {"throughput/tokens_per_second": 60.0, "seconds/step": 1.0, "sft/loss": 1.0},
    ]
    live = live_console(80)
    for progress in (HeartbeatProgress(plain, heartbeat_seconds=0.0), LiveProgress(live)):
        with progress:
            progress.begin_stage("sft", done=0, total=9)
            for step, row in enumerate(rows, start=1):
                progress.update(step, row)
    for text in (text_of(plain), text_of(live)):
        assert "loss 1.000  tokens/s 20" in text
        assert "tokens/s 60" not in text


def test_the_mean_begins_anew_with_a_stage(plain: Console):
    progress = HeartbeatProgress(plain, heartbeat_seconds=0.0)
    for stage, mean in (("sft", 10.0), ("rl", 60.0)):
        progress.begin_stage(stage, done=0, total=9)
        progress.update(1, {"throughput/tokens_per_second": mean, "seconds/step": 4.0})
    assert "rl 1/9  tokens/s 60" in text_of(plain)


def test_heartbeats_tell_the_first_and_last_step_and_are_spaced_between(plain: Console):
    clock = Clock()
    with HeartbeatProgress(plain, heartbeat_seconds=10.0, clock=clock) as progress:
        progress.begin_stage("rl", done=0, total=9)
        for step in range(1, 10):
            clock.now += 4.0
            progress.update(step, METRICS)
    lines = text_of(plain).splitlines()
    assert lines[0] == "reinforcement learning: 9 of 9 steps to do"
    assert [line.split("  ")[0] for line in lines[1:]] == ["rl 1/9", "rl 4/9", "rl 7/9", "rl 9/9"]
    assert lines[1].endswith("tokens/s 4,321  ETA 32s")


def test_heartbeats_of_a_stage_that_goes_on_say_how_much_is_left(plain: Console):
    HeartbeatProgress(plain).begin_stage("sft", done=30, total=50)
    assert text_of(plain) == "cold start: 20 of 50 steps to do\n"


def test_notes_are_not_wrapped_and_not_read_as_markup(plain: Console):
    note = "checkpoint [bold]runs/a[0]/checkpoints/0-rl-000010[/bold]"
    HeartbeatProgress(plain).note(note)
    assert text_of(plain) == f"{note}\n"


def live_console(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


@pytest.mark.parametrize("width", [80, 160])
def test_the_live_display_shows_stage_step_figures_and_time_left(width: int):
    console, clock = live_console(width), Clock()
    with LiveProgress(console, clock) as progress:
        progress.begin_stage("sft", done=0, total=3)
        progress.begin_stage("rl", done=0, total=10)
        clock.now = 6.0
        progress.update(2, METRICS)
        progress.note("evaluation [0]: 0.5")
    text = text_of(console)
    for part in ("reinforcement learning", "2/10", figures_text(METRICS), "ETA 24s", "evaluation [0]: 0.5"):
        assert part in text


def test_figures_that_do_not_fit_are_cut_and_leave_the_rest_in_place():
    console, clock = live_console(60), Clock()
    with LiveProgress(console, clock) as progress:
        progress.begin_stage("rl", done=0, total=10)
        clock.now = 6.0
        progress.update(2, METRICS)
    text = text_of(console)
    assert "2/10" in text
    assert "ETA 24s" in text
    assert "mismatch 7.0e-04  tokens/s 4,…" in text


def test_a_stage_that_is_done_has_no_time_left():
    console = live_console(80)
    with LiveProgress(console, Clock()) as progress:
        progress.begin_stage("sft", done=0, total=2)
        progress.update(2, {"sft/loss": 1.0})
    assert "ETA" not in text_of(console)


def test_notes_after_the_end_are_the_last_lines_on_the_screen():
    console = live_console(80)
    with LiveProgress(console) as progress:
        progress.begin_stage("sft", done=0, total=2)
        progress.update(2, {"sft/loss": 1.0})
        progress.end()
        progress.note("run directory: " + "long/" * 30)
    assert text_of(console).endswith("run directory: " + "long/" * 30 + "\n")


def test_the_live_display_needs_a_stage_first():
    with pytest.raises(ValueError, match="before begin_stage"):
        LiveProgress(Console(file=io.StringIO(), force_terminal=True)).update(1, {})


def test_the_display_follows_the_kind_of_output(plain: Console):
    assert isinstance(make_progress(plain), HeartbeatProgress)
    assert isinstance(make_progress(Console(file=io.StringIO(), force_terminal=True)), LiveProgress)


# --- inside a long step ----------------------------------------------------------------------------------------------


def test_a_long_step_says_where_it_is_and_how_long_it_takes(plain: Console):
    clock = Clock()
    progress = HeartbeatProgress(plain, part_seconds=30.0, clock=clock)
    progress.begin_stage("rl", done=3, total=9)
    progress.begin_part("rollouts")
    progress.within(0, 64, 0)
    clock.now = 29.0
    progress.beat()
    clock.now = 31.0
    progress.beat()
    clock.now = 40.0
    progress.within(16, 64, 8000)
    progress.beat()
    clock.now = 62.0
    progress.beat()
    progress.begin_part("training")
    clock.now = 95.0
    progress.beat()
    assert text_of(plain).splitlines()[1:] == [
        "rl 4/9  rollouts 0 of 64  31s so far",
        "rl 4/9  rollouts 16 of 64  129 tokens/s  1m02s so far, 3m06s left",
        "rl 4/9  training  33s so far",
    ]


def test_a_step_that_ends_in_time_says_nothing_of_its_parts(plain: Console):
    clock = Clock()
    progress = HeartbeatProgress(plain, heartbeat_seconds=0.0, part_seconds=30.0, clock=clock)
    progress.begin_stage("rl", done=0, total=9)
    for step in range(1, 5):
        progress.begin_part("rollouts")
        progress.within(1, 4, 10)
        clock.now += 20.0
        progress.beat()
        progress.update(step, {"reward/mean": 0.5})
    assert not any("rollouts" in line for line in text_of(plain).splitlines())


def test_the_start_of_a_run_says_what_it_waits_for(plain: Console):
    clock = Clock()
    progress = HeartbeatProgress(plain, part_seconds=30.0, clock=clock)
    progress.begin_part("starting the engine")
    clock.now = 61.0
    progress.beat()
    assert text_of(plain) == "starting the engine  1m01s so far\n"


def test_lines_come_by_themselves_and_stop_at_the_end(plain: Console):
    with HeartbeatProgress(plain, part_seconds=0.01) as progress:
        progress.begin_part("rollouts")
        eventually(lambda: "rollouts" in text_of(plain))
    lines = text_of(plain)
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    assert text_of(plain) == lines


def test_the_live_display_moves_inside_a_step():
    console, clock = live_console(100), Clock()
    with LiveProgress(console, clock) as progress:
        progress.begin_stage("rl", done=0, total=10)
        progress.begin_part("training")
        clock.now = 65.0
        progress.within(2, 8)
        eventually(lambda: "training 2 of 8  1m05s so far, 3m15s left" in text_of(console))
