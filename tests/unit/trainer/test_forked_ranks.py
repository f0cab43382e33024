"""The ranks of tests are forks of a process that has computed with torch."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
from ranks import Ranks


def exit_status_of_a_fork(layout: Any) -> int:
    """The number of threads that a fork has asked torch for before its first statement, as its exit status."""
    import torch

    asked = 0

    def set_num_threads(number: int) -> None:
        nonlocal asked
        asked += number

    before, torch.set_num_threads = torch.set_num_threads, set_num_threads
    try:
        process = os.fork()
        if process == 0:
            os._exit(asked)
    finally:
        torch.set_num_threads = before
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_a_fork_renews_the_pool_of_threads_before_a_second_thread_can_ask_for_it(one_process: Ranks) -> None:
    assert one_process.run(exit_status_of_a_fork) == [1]


class _EndOfTest(BaseException):
    pass


def answer_late(layout: Any) -> int:
    time.sleep(1.0)
    return 77


def test_an_answer_that_comes_after_the_end_of_a_test_is_not_that_of_the_next_call() -> None:
    def end(*_: object) -> None:
        raise _EndOfTest

    ranks = Ranks(1)
    ranks.run(exit_status_of_a_fork)
    before = signal.signal(signal.SIGUSR2, end)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    with pytest.raises(_EndOfTest):
        ranks.run(answer_late)
    signal.signal(signal.SIGUSR2, before)
    assert ranks.run(exit_status_of_a_fork) == [1]
    ranks.close()


def wait_for_nobody(layout: Any) -> None:
    time.sleep(600)


def test_a_rank_that_hangs_is_ended_and_says_where_it_was() -> None:
    ranks = Ranks(1)
    ranks.run(exit_status_of_a_fork)  # the time limit is not that of a start
    # Two signals may come at once; the lines of their dumps are then mixed.
    with pytest.raises(TimeoutError, match="wait_for_nobody"):
        ranks.run(wait_for_nobody, timeout_seconds=0.5)
    ranks.close()
