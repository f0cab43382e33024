"""A user's reward function behind a process boundary: it may hang, crash, print and read without harm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import eventually, is_alive

from moerl.errors import ConfigError, RewardError
from moerl.tasks.reward_process import RewardProcess

MODULE = """
import os, subprocess, sys, time

state = {"calls": 0}

def behave(row, response):
    state["calls"] += 1
    if response == "hang":
        time.sleep(3600)
    if response == "start a process":
        return subprocess.Popen(["sleep", "3600"]).pid
    if response == "crash":
        os._exit(7)
    if response == "exit":
        sys.exit(3)
    if response == "print":
        print("not a reply")
        os.write(1, b"{}\\n")
    if response == "read":
        return len(sys.stdin.read())
    if response == "count":
        return state["calls"]
    if response == "pid":
        return os.getpid()
    return row["value"]

def returns(row, response):
    return eval(response)

not_a_function = 3
"""

Start = Callable[..., RewardProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_rewards.py").write_text(MODULE)
    (tmp_path / "breaks_at_import.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "dies_at_import.py").write_text("import os\nos._exit(9)\n")
    started: list[RewardProcess] = []

    def begin(function: str = "odd_rewards:behave", timeout_seconds: float = 60.0) -> RewardProcess:
        started.append(RewardProcess(function, timeout_seconds))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def test_a_value_comes_back(start: Start):
    assert start().score({"value": 0.25}, "x") == {"reward": 0.25, "accuracy": 0.0}


def test_one_process_serves_many_calls(start: Start):
    process = start()
    assert [process.score({}, "count")["reward"] for _ in range(3)] == [1.0, 2.0, 3.0]


def test_a_function_that_hangs_fails_its_sample_and_the_next_call_works(start: Start):
    process = start(timeout_seconds=1.0)
    with pytest.raises(RewardError, match=r"time limit passed.*a reward within 1 s"):
        process.score({}, "hang")
    assert process.score({"value": 1}, "x")["reward"] == 1.0


def test_what_the_function_has_started_ends_with_it(start: Start):
    process = start()
    pid = int(process.score({}, "start a process")["reward"])
    process.close()
    eventually(lambda: not is_alive(pid))


def test_a_function_that_crashes_fails_its_sample_and_the_next_call_works(start: Start):
    process = start()
    with pytest.raises(RewardError, match="its process ended with code 7"):
        process.score({}, "crash")
    with pytest.raises(RewardError, match="its process ended with code 3"):
        process.score({}, "exit")
    assert process.score({"value": 1}, "x")["reward"] == 1.0


def test_a_process_that_died_between_calls_fails_one_sample(start: Start):
    process = start()
    pid = int(process.score({}, "pid")["reward"])
    os.kill(pid, 9)
    eventually(lambda: not is_alive(pid))
    with pytest.raises(RewardError, match="its process ended with code -9"):
        process.score({}, "x")
    assert process.score({"value": 1}, "x")["reward"] == 1.0


def test_what_the_function_prints_is_not_taken_for_a_reply(start: Start):
    assert start().score({"value": 2}, "print")["reward"] == 2.0


def test_the_function_cannot_read_the_requests(start: Start):
    assert start(timeout_seconds=30.0).score({}, "read")["reward"] == 0.0


def test_large_texts_pass_both_ways(start: Start):
    assert start().score({"value": 1, "text": "\u00e9" * 300_000}, "y" * 300_000)["reward"] == 1.0


def test_closing_ends_the_process(start: Start):
    process = start()
    pid = int(process.score({}, "pid")["reward"])
    process.close()
    eventually(lambda: not is_alive(pid))


def test_the_process_ends_when_nobody_holds_its_pipe_any_more():
    process = RewardProcess("math:gcd", 60.0)
    child = process._child
    assert child is not None
    popen = child._process
    assert popen.stdin is not None
    popen.stdin.close()
    assert popen.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("float('nan')", "reward is not finite"),
        ("{'reward': float('inf')}", "reward is not finite"),
        ("'1.0'", "TypeError: expected a number"),
        ("None", "TypeError: expected a number"),
        ("[1.0]", "TypeError: expected a number"),
        ("{'reward': '1'}", "TypeError: expected a number"),
        ("{1: 1.0, 'reward': 1.0}", "TypeError: expected a number"),
        ("{'score': 1.0}", "holds no 'reward'"),
        ("{'reward': 1.0, 'accuracy': 0.5}", "accuracy is neither 0 nor 1"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_result_that_is_not_a_finite_reward_is_refused(start: Start, expression: str, message: str):
    with pytest.raises(RewardError, match=message):
        start("odd_rewards:returns").score({}, expression)


@pytest.mark.parametrize(
    ("expression", "rewards"),
    [
        ("True", {"reward": 1.0, "accuracy": 1.0}),
        ("3", {"reward": 3.0, "accuracy": 1.0}),
        ("__import__('numpy').float32(0.5)", {"reward": 0.5, "accuracy": 0.0}),
        ("{'reward': -1, 'accuracy': True}", {"reward": -1.0, "accuracy": 1.0}),
    ],
)
def test_numbers_of_every_kind_are_rewards(start: Start, expression: str, rewards: dict[str, float]):
    assert start("odd_rewards:returns").score({}, expression) == rewards


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module_here:f", "ModuleNotFoundError"),
        ("odd_rewards:missing", "has no function 'missing'"),
        ("odd_rewards:not_a_function", "has no function 'not_a_function'"),
        ("breaks_at_import:f", "RuntimeError: no licence"),
        ("dies_at_import:f", "ended with code 9"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused(start: Start, function: str, message: str):
    with pytest.raises(ConfigError, match=f"cannot import {function}; seen: .*{message}"):
        start(function)


def test_a_module_in_the_current_directory_is_found_behind_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "only_here.py").write_text("def score(row, response):\n    return 0.5\n")
    (here / "odd_rewards.py").write_text("raise RuntimeError('not this one')\n")
    assert start("only_here:score").score({}, "")["reward"] == 0.5
    assert start().score({"value": 1}, "")["reward"] == 1.0


@pytest.mark.parametrize("function", ["odd_rewards", "odd_rewards.behave", ":f", "odd_rewards:", "m:f()"])
def test_a_name_of_another_form_is_refused(start: Start, function: str):
    with pytest.raises(ConfigError, match="does not name a function"):
        start(function)
