"""A user's reward function behind a process boundary: it may hang, crash, print and read without harm."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scored_process import ScoredProcess
from waiting import eventually, is_alive, status_of

from moerl.errors import ConfigError, RewardError
from moerl.tasks.rewards import child
from moerl.tasks.rewards.child import RewardChild

Start = Callable[..., ScoredProcess]


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


def test_a_process_that_was_killed_between_calls_fails_no_sample(start: Start):
    process = start()
    pid = int(process.score({}, "pid")["reward"])
    os.kill(pid, 9)
    eventually(lambda: not is_alive(pid))
    assert process.score({"value": 1}, "x")["reward"] == 1.0


@pytest.mark.parametrize("whom", ["worker", "guard"])
def test_a_process_that_is_killed_in_a_call_is_asked_again(start: Start, tmp_path: Path, whom: str):
    process = start("odd_rewards:killed")
    assert process.score({"folder": str(tmp_path), "times": 1, "whom": whom}, "x")["reward"] == 1.0


def test_a_function_whose_process_is_killed_whenever_it_is_asked_fails_its_sample(start: Start, tmp_path: Path):
    process = start("odd_rewards:killed")
    with pytest.raises(RewardError, match="its process ended by signal SIGKILL"):
        process.score({"folder": str(tmp_path), "times": 9, "whom": "worker"}, "x")
    assert len(list(tmp_path.glob("call-*"))) == 2
    assert process.score({"folder": str(tmp_path), "times": 2, "whom": "worker"}, "x")["reward"] == 1.0


def test_a_process_that_is_killed_while_it_imports_is_asked_again(start: Start, tmp_path: Path):
    (tmp_path / "killed_at_import.py").write_text(
        "import os, pathlib\n"
        f"seen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        "if not seen.exists():\n"
        "    seen.touch()\n"
        "    os.kill(os.getpid(), 9)\n"
        "def score(row, response):\n"
        "    return 0.5\n"
    )
    assert start("killed_at_import:score").score({}, "x")["reward"] == 0.5


def test_a_function_that_ends_by_itself_is_not_called_again(start: Start, tmp_path: Path):
    process = start("odd_rewards:killed")
    with pytest.raises(RewardError, match="its process ended with code 7"):
        process.score({"folder": str(tmp_path), "times": 1, "whom": "nobody"}, "x")
    assert len(list(tmp_path.glob("call-*"))) == 1


def test_the_kernel_ends_a_reward_before_the_run_where_memory_ends(start: Start):
    assert start("odd_rewards:out_of_memory_score").score({}, "x")["reward"] == 1000.0


def test_a_hang_deep_inside_is_given_up_as_soon_as_it_has_said_where(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(child, "DUMP_SECONDS", 3600.0)
    process = start("odd_rewards:deep", timeout_seconds=1.0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(process.score, {}, "x")
        try:
            error = asked.exception(timeout=60.0)
        finally:
            process.stop()
    assert "time limit passed; its process was killed, in deep (" in str(error)


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
    process = ScoredProcess("math:gcd", 60.0, 1 << 32)
    process.start()
    started = process._child
    assert isinstance(started, RewardChild)
    popen = started._process
    assert popen.stdin is not None
    popen.stdin.close()
    assert status_of(popen, 60.0) == 0


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("float('nan')", "is not finite: "),
        ("{'reward': float('inf')}", "is not finite: "),
        ("{'reward': 10**400}", "reward' is not finite"),
        ("1e30", "beyond 1e\\+12"),
        ("'1.0'", "of type str, not a number: '1.0'"),
        ("None", "None .the function returned nothing."),
        ("[1.0]", "of type list"),
        ("(each for each in [1.0])", "a generator"),
        ("__import__('numpy').ones(2)", "of type ndarray"),
        ("{'reward': '1'}", "'reward' is of type str"),
        ("{1: 1.0, 'reward': 1.0}", "a name that is no text: 1"),
        ("{'score': 1.0}", "without 'reward': {'score': 1.0}"),
        ("{'reward': 1.0, 'accuracy': 0.5}", "an accuracy that is neither 0 nor 1"),
        ("{'reward': 1.0, 'a b': 1.0}", "a name that no metric can have; seen: 'a b'"),
        ("{'reward': 1.0, 'a\\x1b[2J': 1.0}", "a name that no metric can have"),
        ("{'reward': 1.0, 'a' * 65: 1.0}", "a name that no metric can have"),
        ("{'reward': 1.0, 'unscored': 1.0}", "a name that no metric can have; seen: 'unscored'"),
        ("'x' * 10_000_000", "of type str"),
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
        ("__import__('numpy').bool_(True)", {"reward": 1.0, "accuracy": 1.0}),
        (
            "{'reward': __import__('numpy').array(2), 'accuracy': __import__('numpy').bool_(0)}",
            {"reward": 2.0, "accuracy": 0.0},
        ),
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
        start(function).start()


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


def test_a_function_of_other_arguments_is_named_by_its_definition(start: Start):
    with pytest.raises(
        RewardError, match=r"takes 0 positional arguments but 2 were given, in none \(.*odd_rewards\.py:\d+\)"
    ):
        start("odd_rewards:none").score({}, "x")


def test_an_error_from_a_library_names_the_users_own_line_too(start: Start):
    with pytest.raises(
        RewardError, match=r"JSONDecodeError.*, in returns \(.*odd_rewards.py:\d+\), below it raw_decode"
    ):
        start("odd_rewards:returns").score({}, "__import__('json').loads('x')")


def test_a_hang_says_where(start: Start):
    with pytest.raises(RewardError, match=r"time limit passed.*, in behave \(.*odd_rewards\.py:9\)"):
        start(timeout_seconds=1.0).score({}, "hang")


def test_async_calls_of_a_request_run_side_by_side_and_fail_one_by_one(start: Start):
    results = start("odd_rewards:later").score_all([{"calls": 3}] * 3, ["1", "raise", "0.5"])
    assert [isinstance(result, RewardError) for result in results] == [False, True, False]
    assert "KeyError: 'no such dish', in later (" in str(results[1])
    assert results[2] == {"reward": 0.5, "accuracy": 0.0}


def test_a_function_of_many_gets_all_rows_at_once(start: Start):
    process = start("odd_rewards:batch", many=True)
    results = process.score_all([{"value": 1}, {"value": 0}], ["a", "b"])
    assert [each["reward"] for each in results if isinstance(each, dict)] == [1.0, 0.0]
    assert [each["together"] for each in results if isinstance(each, dict)] == [2.0, 2.0]
    with pytest.raises(RewardError, match="not a list of 2 rewards: 1 of them"):
        process.score_all([{"value": 1}, {"value": 0}], ["short", "b"])
