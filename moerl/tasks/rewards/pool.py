"""A user's reward function in a bounded number of processes; no caller waits. Runs in the controller."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from moerl.contract.ports import Prompt
from moerl.errors import RewardError
from moerl.processes.host import EXIT_SECONDS
from moerl.tasks.rewards.process import MakeChild, RewardProcess, Rewards


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A response that waits for its rewards."""

    future: Future[Rewards]
    prompt: Prompt
    response: str


CLOSE_SECONDS = 4 * EXIT_SECONDS
"""Longest time that closing a pool waits for each of its processes to end."""


class RewardPool:
    """A `RewardPart` of processes that work side by side, each with one thread of this process that waits for it.

    A call waits in a queue until a process is free; only then its time limit begins. The queue has no limit of its own:
    it holds responses that the caller keeps anyway. A process is started when more calls wait than running processes
    are idle.

    Args:
        processes: one for each worker, at least one; none is started yet.
        batch_size: most responses of one call of a process. It gets those that wait, and waits for no more.

    Attributes:
        num_processes: processes that there will be, at most.
    """

    def __init__(self, processes: Sequence[RewardProcess], batch_size: int = 1) -> None:
        self._processes, self._batch_size = processes, batch_size
        self.num_processes = len(processes)
        self._threads: list[threading.Thread] = []
        self._queue: deque[_Call] = deque()
        self._num_idle = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def submit(self, prompt: Prompt, response: str) -> Future[Rewards]:
        """Has a response rewarded by one of the processes; returns at once. The future raises what
        `RewardProcess.score_all` raises, or returns as its error."""
        future: Future[Rewards] = Future()
        with self._changed:
            assert not self._is_closed, "a closed task rewards nothing"
            self._queue.append(_Call(future, prompt, response))
            if len(self._queue) > self._num_idle and len(self._threads) < len(self._processes):
                process = self._processes[len(self._threads)]
                # A daemon: a function that hangs does not hold up the end of the run.
                thread = threading.Thread(target=self._work, args=(process,), name="reward", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return future

    def place(self, make_child: MakeChild) -> None:
        """Runs the function in processes that `make_child` starts, from now on. Call while no reward is awaited."""
        with self._changed:
            assert not self._queue, "the pool is at work"
            assert self._num_idle == len(self._threads), "the pool is at work"
            for process in self._processes:
                process.place(make_child)

    def close(self) -> None:
        """Ends the processes and all that the function has started. Calls under way fail, those that wait are
        cancelled."""
        with self._changed:
            self._is_closed = True
            waiting = [call.future for call in self._queue]
            self._queue.clear()
            self._changed.notify_all()
        for future in waiting:
            future.cancel()
        for process in self._processes:
            process.stop()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def _work(self, process: RewardProcess) -> None:
        while calls := self._next_calls():
            wanted = [call for call in calls if call.future.set_running_or_notify_cancel()]
            for call, result in zip(wanted, _results(process, wanted), strict=True):
                if isinstance(result, Exception):
                    call.future.set_exception(result)
                else:
                    call.future.set_result(result)
        process.close()

    def _next_calls(self) -> list[_Call]:
        """Waits for a call; returns it and others that wait already, none if the pool is closed."""
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            self._num_idle -= 1
            return [self._queue.popleft() for _ in range(min(self._batch_size, len(self._queue)))]


def _results(process: RewardProcess, calls: Sequence[_Call]) -> Iterator[Rewards | Exception]:
    """Yields the rewards of each call, or its error, as they come. Calls that fail together are repeated one by one, so
    that no response fails because of another."""
    try:
        rows = [call.prompt.facts for call in calls]
        found = process.score_all(rows, [call.response for call in calls]) if calls else []
    except Exception as error:  # noqa: BLE001 - thread boundary: whoever asked for the reward gets it
        if isinstance(error, RewardError) and len(calls) > 1:
            for call in calls:
                yield from _results(process, [call])
        else:
            yield from [error] * len(calls)
    else:
        yield from found
