"""Waits of a trainer rank for others in a weight update, each with an end. Runs in every trainer rank.

A rank that dies or hangs would leave the others in a transfer or a collective for as long as the process group waits,
half an hour. Here each wait has an end, and the error names the ranks that did not come:

    a transfer        `step_seconds` from the start of its bucket
    an agreement      two times that: another rank may take one whole step for its bucket or its sink

Messages go through the process group's store, which outlives connections (a file, for ranks on one machine): a rank
that failed writes why, and the others quote it; if no rank knows which one is missing, each writes that it is there.

With gloo a transfer that timed out closes every connection of its rank, and a rank that dies closes them as well: its
peers notice at once. With NCCL they do not notice, and its `Work.wait` only orders streams: the host asks the work
whether it is done until time is up. In both cases the process group cannot be used any more. The run ends and is
resumed from its checkpoint; engines keep the version they had.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store  # pyright: ignore[reportPrivateUsage]

from moerl.errors import WeightSyncError

_NUMBERS = itertools.count()
_POLL_SECONDS = 2e-4
_LISTEN_SECONDS = 0.5
"""Seconds after which a rank that waits for an agreement looks again whether another one has given up."""
_GRACE_SECONDS = 2.0
"""Seconds that a rank that lost contact waits for the reason from one that knows it."""


class Peers:
    """The ranks of the default process group. Built on all of them together, as often and in the same order.

    Args:
        rank: this rank.
        device: of the weights.
        step_seconds: longest time of each step of an update.
    """

    def __init__(self, rank: int, device: torch.device, step_seconds: float) -> None:
        self.rank, self.device, self.step_seconds = rank, device, step_seconds
        self._prefix = f"weights/{next(_NUMBERS)}"
        self._agreements = 0
        self._lost = ""

    def until(self) -> float:
        """Returns the time by `time.monotonic` at which a step that begins now must be done."""
        return time.monotonic() + self.step_seconds

    @contextlib.contextmanager
    def contact(self, until: float, doing: Callable[[], str]) -> Iterator[None]:
        """Surrounds the start or the end of a transfer.

        Args:
            until: end of the step, from the method `until`.
            doing: returns words on what this rank does, and with which rank.

        Raises:
            WeightSyncError: the block failed, or was not done in time. The process group cannot be used any more.
        """
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            is_late = time.monotonic() >= until
            seen = f"nothing for {self.step_seconds:g} s" if is_late else _first_line(error)
            self._give_up(doing(), seen, "" if is_late else self._listen(_LISTEN_SECONDS), error)

    def meet(self, start: Callable[[], dist.Work | None], until: float, doing: str, members: Sequence[int]) -> None:
        """Runs a collective from start to end. Unlike a transfer, a collective can be waited for several times, and
        between waits this rank reads messages of others. Its failure does not say which rank is missing, so every
        member writes that it is there.

        Raises:
            WeightSyncError: as `contact`.
        """
        error = self._run(start, until)
        if error is None:
            return
        is_late = time.monotonic() >= until
        seen = f"not done in time, {self.step_seconds:g} s a step" if is_late else _first_line(error)
        self._write(f"here/{self.rank}", "here")
        self._write("roll", "call")
        known = self._listen(_GRACE_SECONDS)
        missing = [rank for rank in members if not self._heard(f"here/{rank}")]
        seen = f"{seen}, no word from ranks {missing}" if missing else seen
        self._give_up(doing, "" if known else seen, known, error)

    def finish(self, work: dist.Work | None, until: float) -> None:
        """Waits for a transfer or a collective. Raises `TimeoutError` or `RuntimeError`, which `contact` and `meet`
        turn into errors that name ranks."""
        assert work is not None
        if self.device.type == "cuda":
            while not work.is_completed():
                if time.monotonic() >= until:
                    raise TimeoutError
                time.sleep(_POLL_SECONDS)
            work.wait()
            return
        # gloo takes 0 for no limit.
        work.wait(timedelta(milliseconds=max(1.0, 1e3 * (until - time.monotonic()))))

    def agree(self, problem: BaseException | None, step: str) -> None:
        """Raises on every rank if any has a problem: on that rank the problem, on others an error that quotes it.

        Raises:
            WeightSyncError: also if ranks are missing, or were lost before.
        """
        if self._lost:
            raise WeightSyncError(
                "weight update: trainer ranks have lost one another in an earlier one",
                seen=self._lost,
                expected="a process group of all ranks",
                remedy="resume the run from its last checkpoint",
            )
        failed = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=self.device)
        failed[self.rank] = int(problem is not None)
        self._agreements += 1
        if len(failed) > 1:
            if problem is not None:
                self._write(f"{self._agreements}/{self.rank}", str(problem))
            until = self.until() + self.step_seconds
            try:
                self.meet(lambda: dist.all_reduce(failed, async_op=True), until, step, range(len(failed)))
            except WeightSyncError as lost:
                if problem is not None:
                    lost.add_note(f"and {problem}")
                raise
        if problem is not None:
            raise problem
        ranks = failed.nonzero()[:, 0].tolist()
        if ranks:
            raise WeightSyncError(
                f"weight update: {step} failed on other ranks",
                seen=f"ranks {ranks}; rank {ranks[0]}: {self._heard(f'{self._agreements}/{ranks[0]}')}",
                expected="success on all ranks",
                remedy="see to the error of the first of them; engines keep the version they had",
            )

    # --- lost contact -------------------------------------------------------------------------------------------------

    def _run(self, start: Callable[[], dist.Work | None], until: float) -> RuntimeError | TimeoutError | None:
        """Runs a collective. Returns the error if it failed, took too long, or others have given up; else None."""
        work: dist.Work | None = None
        while True:
            was_over = False
            try:
                work = work or start()
                was_over = work is not None and work.is_completed()
                self.finish(work, min(until, time.monotonic() + _LISTEN_SECONDS))
                return None
            except (RuntimeError, TimeoutError) as error:
                if work is None or was_over:
                    return error
                # It may have succeeded just after the wait for it ended: wait once more.
                if work.is_completed():
                    continue
                if time.monotonic() >= until or self._heard("lost") or self._heard("roll"):
                    return error

    def _give_up(self, doing: str, seen: str, known: str, error: BaseException) -> None:
        self._lost = f"{doing} ({seen or known})"
        if not known:
            self._write("lost", f"rank {self.rank}: {self._lost}")
        raise WeightSyncError(
            f"weight update: {doing}",
            seen="; ".join(filter(None, (seen, known))),
            expected=f"every step within weights.step_seconds = {self.step_seconds:g}",
            remedy="a rank that died or hangs has said more in its output; resume from the last checkpoint."
            " Engines keep the version they had",
        ) from error

    # --- the store ---------------------------------------------------------------------------------------------------

    def _write(self, key: str, text: str) -> None:
        try:
            _get_default_store().set(f"{self._prefix}/{key}", text)
        except dist.DistError:
            # The store may have died with the rank that is missing; the own error does not depend on it.
            return

    def _heard(self, key: str) -> str:
        """Returns the text under a key; empty if there is none, or the store is gone."""
        try:
            store, name = _get_default_store(), f"{self._prefix}/{key}"
            return store.get(name).decode() if store.check([name]) else ""
        except dist.DistError:
            return ""

    def _listen(self, seconds: float) -> str:
        """Waits `seconds` at most until a rank has written why contact was lost; returns its text, else an empty
        one."""
        until = time.monotonic() + seconds
        while not (text := self._heard("lost")) and time.monotonic() < until:
            time.sleep(_LISTEN_SECONDS / 10)
        return text


def _first_line(error: BaseException | None) -> str:
    """Returns the first line of an error of torch.distributed, without the place in its source before the message and
    the advice after it."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\] ", "", line).partition(". This is typically")[0]
