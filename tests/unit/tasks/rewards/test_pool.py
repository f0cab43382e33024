"""Rewards beside the caller: several processes, a queue, and an end of all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually, is_alive

from moerl.contract.ports import Prompt
from moerl.errors import ConfigError, RewardError
from moerl.tasks.rewards.pool import RewardPool
from moerl.tasks.rewards.process import RewardProcess

ROOT = Path(__file__).parents[4]

MEETS = """
import os, sys, time
from pathlib import Path

def meet(row, response):
    # Returns once as many calls as `row` says are under way at the same time.
    folder = Path(row["folder"])
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < row["calls"]:
        time.sleep(0.01)
    return {"reward": float(response), "process": os.getpid()}

def hang(row, response):
    Path(row["folder"], str(os.getpid())).touch()
    while True:
        time.sleep(3600)

def fail(row, response):
    if response == "crash":
        os._exit(7)
    return 1.0

def fail_together(rows, responses):
    if "crash" in responses:
        os._exit(7)
    if "hang" in responses:
        time.sleep(3600)
    if "raise" in responses:
        raise KeyError("no such dish")
    if "short" in responses:
        return []
    return [float(response) for response in responses]

async def await_together(row, response):
    return fail_together([row], [response])[0]
"""

Open = Callable[..., RewardPool]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Makes the folder in which calls say that they are under way, and beside it the module with the functions."""
    (tmp_path / "meets.py").write_text(MEETS)
    (tmp_path / "calls").mkdir()
    return tmp_path / "calls"


@pytest.fixture
def open_pool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.syspath_prepend(folder.parent)
    opened: list[RewardPool] = []

    def make(
        function: str, num_workers: int, seconds: float = 60.0, *, many: bool = False, batch_size: int = 1
    ) -> RewardPool:
        processes = [RewardProcess(function, seconds, 1 << 32, many=many) for _ in range(num_workers)]
        opened.append(RewardPool(processes, batch_size))
        return opened[-1]

    yield make
    for pool in opened:
        pool.close()


def prompt(row: dict[str, Any]) -> Prompt:
    return Prompt("", "", row)


def pids(folder: Path, count: int) -> list[int]:
    eventually(lambda: len(list(folder.iterdir())) == count)
    return [int(path.name) for path in folder.iterdir()]


def test_calls_run_side_by_side_and_each_future_has_its_own_rewards(open_pool: Open, folder: Path):
    pool = open_pool("meets:meet", 3)
    row = {"folder": str(folder), "calls": 3}
    futures = [pool.submit(prompt(row), str(i)) for i in range(7)]
    assert [future.result()["reward"] for future in futures] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert {future.result()["process"] for future in futures} == {float(pid) for pid in pids(folder, 3)}


def test_one_call_after_another_needs_one_process(open_pool: Open, folder: Path):
    pool = open_pool("meets:meet", 3)
    row = {"folder": str(folder), "calls": 1}
    for _ in range(3):
        pool.submit(prompt(row), "0").result()
        eventually(lambda: pool._num_idle == 1)
    assert len(pids(folder, 1)) == 1


def test_a_call_does_not_wait_for_its_rewards(open_pool: Open, folder: Path):
    pool = open_pool("meets:meet", 1)
    future = pool.submit(prompt({"folder": str(folder), "calls": 2}), "0")
    pids(folder, 1)
    assert not future.done()
    (folder / "0").touch()
    assert future.result()["reward"] == 0.0


def test_a_call_that_fails_fails_alone(open_pool: Open):
    pool = open_pool("meets:fail", 2)
    futures = [pool.submit(prompt({}), "crash" if i == 1 else "") for i in range(4)]
    with pytest.raises(RewardError, match="ended with code 7"):
        futures[1].result()
    assert [futures[i].result()["reward"] for i in (0, 2, 3)] == [1.0] * 3


@pytest.mark.parametrize(("function", "many"), [("fail_together", True), ("await_together", False)])
@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("crash", "its process ended with code 7"),
        ("hang", "time limit passed"),
        ("raise", "KeyError: 'no such dish'"),
        ("short", "not a list of 1 rewards: 0 of them|IndexError"),
    ],
)
def test_a_response_that_fails_a_batch_fails_alone(
    open_pool: Open, function: str, many: bool, response: str, message: str
):
    pool = open_pool(f"meets:{function}", 1, 1.5, many=many, batch_size=8)
    # The first call keeps the process busy, so that the others come together.
    futures = [pool.submit(prompt({}), each) for each in ("0", "1", response, "3", "4")]
    with pytest.raises(RewardError, match=message):
        futures[2].result()
    assert [futures[i].result()["reward"] for i in (0, 1, 3, 4)] == [0.0, 1.0, 3.0, 4.0]


def test_a_function_that_cannot_be_imported_is_named_by_every_call(open_pool: Open):
    pool = open_pool("no_such_module_here:f", 2)
    for future in [pool.submit(prompt({}), "") for _ in range(3)]:
        with pytest.raises(ConfigError, match="cannot import no_such_module_here:f"):
            future.result()


def test_a_cancelled_call_is_left_out(open_pool: Open, folder: Path):
    pool = open_pool("meets:meet", 1)
    row = {"folder": str(folder), "calls": 2}
    first, second, third = (pool.submit(prompt(row), str(i)) for i in range(3))
    assert second.cancel()
    (folder / "0").touch()
    assert (first.result()["reward"], third.result()["reward"]) == (0.0, 2.0)


def test_closing_ends_calls_that_hang_and_those_that_wait(open_pool: Open, folder: Path):
    pool = open_pool("meets:hang", 2, 3600.0)
    futures = [pool.submit(prompt({"folder": str(folder)}), "") for _ in range(4)]
    running = pids(folder, 2)
    pool.close()
    assert not any(is_alive(pid) for pid in running)
    assert [future.cancelled() for future in futures] == [False, False, True, True]
    for future in futures[:2]:
        with pytest.raises(RewardError, match="gave no answer"):
            future.result()
    assert not any(thread.is_alive() for thread in pool._threads)


def test_every_process_of_a_pool_ends_when_the_run_is_killed(folder: Path):
    code = (
        "from moerl.contract.ports import Prompt\n"
        "from moerl.tasks.rewards.pool import RewardPool\n"
        "from moerl.tasks.rewards.process import RewardProcess\n"
        "pool = RewardPool([RewardProcess('meets:hang', 600.0, 1 << 32) for _ in range(2)])\n"
        f"calls = [pool.submit(Prompt('', '', {{'folder': {str(folder)!r}}}), '') for _ in range(2)]\n"
        "calls[0].result()\n"
    )
    paths = {**os.environ, "PYTHONPATH": f"{folder.parent}:{ROOT}"}
    with subprocess.Popen([sys.executable, "-c", code], env=paths) as run:
        running = pids(folder, 2)
        run.kill()
    for pid in running:
        eventually(lambda pid=pid: not is_alive(pid))
