"""Saving during training: a checkpoint is copied to host memory at once, and written while training goes on.

Runs in every trainer rank. One checkpoint is in flight at most. A crash before the commit leaves the previous one.

    training thread      `save`, `poll`, `wait`; `save` waits for the checkpoint in flight
    checkpoint-writer    one thread per checkpoint and rank: writes this rank's files and hashes them, and on rank 0
                         commits the checkpoint. Ranks meet over the saver's own process group, because the training
                         thread uses the others. An error is raised on every rank by `wait`, `save`, or the first
                         `poll` after the end
"""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from moerl.contract.sealed import FileFacts, describe
from moerl.errors import CheckpointError
from moerl.trainer import platform, sharded_state
from moerl.trainer.checkpoint import CheckpointStore
from moerl.trainer.collectives import gather_bytes, share_bytes
from moerl.trainer.sharded_state import StagedState

WRITE_TIMEOUT = datetime.timedelta(hours=2)
"""Longest that ranks wait for one another's files."""


class _Described(msgspec.Struct):
    """Report of a rank on the files that it wrote: no rank reads them all."""

    files: dict[str, FileFacts]
    problem: str = ""


class Saver:
    """Writer of the checkpoints of one run; every method is called by all ranks together.

    Args:
        store: of the checkpoints; the same directory for every rank.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._group: Any = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self._in_flight: Future[None] | None = None

    def save(self, name: str, staged: StagedState, state: dict[str, Any]) -> None:
        """Begins to write a checkpoint, after the one in flight; returns when its writing has begun.

        Args:
            staged: this rank's share.
            state: plain JSON for the manifest, which gets that of rank 0.

        Raises:
            CheckpointError: the disk has no room for it, or the one before could not be written.
        """
        self.wait()
        self._begin(name, staged)
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._in_flight = pool.submit(self._write, name, staged, state)
        pool.shutdown(wait=False)

    def poll(self) -> None:
        """Notices a failed write, on all ranks in the same step, without waiting for one that goes on.

        Raises:
            CheckpointError: the checkpoint in flight could not be written.
        """
        if self._in_flight is None:
            return
        done = torch.tensor([int(self._in_flight.done())], device=platform.device())
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        if int(done):
            self.wait()

    def wait(self) -> None:
        """Returns when nothing is in flight.

        Raises:
            CheckpointError: the checkpoint in flight could not be written.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def _begin(self, name: str, staged: StagedState) -> None:
        """Makes the directory, unless the file system has less room than the checkpoint may take."""
        answer: tuple[int, str] = (0, "")
        if self._is_main:
            try:
                answer = (shutil.disk_usage(self._store.begin(name)).free, "")
            except OSError as error:
                answer = (0, f"rank 0: {error}")
        free, problem = json.loads(share_bytes(json.dumps(answer).encode(), self._group))
        if problem:
            raise sharded_state.unwritten(self._store.partial(name), problem)
        total = torch.tensor([staged.num_bytes])
        dist.all_reduce(total, group=self._group)
        needed = int(total)
        if needed <= free:
            return
        self._abandon(name)
        raise CheckpointError(
            f"the disk is too full for the checkpoint {name}; the one before it is whole",
            seen=f"{free} bytes free in {self._store.folder}",
            expected=f"{needed} bytes",
            remedy="free space or lower checkpoint.keep, then resume the run",
        )

    @property
    def _is_main(self) -> bool:
        return dist.get_rank(self._group) == 0

    # --- in the writing thread ---------------------------------------------------------------------------------------

    def _write(self, name: str, staged: StagedState, state: dict[str, Any]) -> None:
        folder = self._store.partial(name)
        try:
            paths = sharded_state.write(staged, folder, self._group)
            try:
                mine = _Described(describe(folder, paths))
            except OSError as error:
                mine = _Described({}, f"rank {dist.get_rank(self._group)}: {error}")
            gathered = gather_bytes(msgspec.json.encode(mine), self._group)
            described = [msgspec.json.decode(each, type=_Described) for each in gathered]
            problem = self._commit(name, state, described) if self._is_main else ""
            problem = share_bytes(problem.encode(), self._group).decode()
            if problem:
                raise sharded_state.unwritten(folder, problem)
        except CheckpointError:
            self._abandon(name)
            raise
        except RuntimeError as error:
            # gloo raises this for a rank that is gone.
            self._abandon(name)
            raise sharded_state.unwritten(folder, " ".join(str(error).split())[:300]) from error

    def _abandon(self, name: str) -> None:
        if self._is_main:
            self._store.abandon(name)

    def _commit(self, name: str, state: dict[str, Any], described: Sequence[_Described]) -> str:
        """Commits the checkpoint, on rank 0; returns what went wrong, empty if nothing did."""
        problems = [each.problem for each in described if each.problem]
        if problems:
            return "; ".join(problems)
        files = {file: facts for each in described for file, facts in each.files.items()}
        try:
            self._store.commit(name, state, files)
        except OSError as error:
            return f"rank 0: {error}"
        except CheckpointError as error:
            return str(error)
        return ""
