"""A trace of one step with named ranges, as Perfetto opens it. Runs in rank 0 of the trainer.

Ranges cost nothing while no trace is recorded.
"""

from __future__ import annotations

import gzip
import shutil
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from moerl.contract.files import atomic_file, writing
from moerl.reading import open_regular

_recording: list[Path] = []
"""File of the trace that is recorded in this process; empty if none is."""


def named(name: str) -> AbstractContextManager[object]:
    """Returns a context that is a range of this name in the trace, if one is recorded."""
    return record_function(name) if _recording else nullcontext()


class Profiler:
    """Traces of single steps, one file each: ``<folder>/step-<step>.json.gz``.

    One trace at a time; all calls come from one thread.

    Args:
        folder: made when the first trace is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._profile: profile | None = None
        self._rollout = ExitStack()

    def begin(self, step: int) -> None:
        """Starts the trace of a step, and in it the range `rollout`. A trace that was not ended is dropped."""
        self.drop()
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
        self._profile.start()
        _recording.append(self._folder / f"step-{step:06d}.json.gz")
        self._rollout.enter_context(record_function("rollout"))

    def end_rollout(self) -> None:
        """Ends the range `rollout`, if it is open: the step's batch is there."""
        self._rollout.close()

    def end(self) -> None:
        """Ends the trace and writes its file. Raises `MoerlError` if the file system refuses."""
        self.end_rollout()
        assert self._profile is not None, "no trace is recorded"
        ended, self._profile = self._profile, None
        ended.stop()
        file = _recording.pop()
        with writing(file), atomic_file(file) as compressed, TemporaryDirectory(dir=file.parent) as folder:
            plain = Path(folder) / "trace.json"
            ended.export_chrome_trace(str(plain))
            with open_regular(plain) as source, gzip.open(compressed, "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target)

    def drop(self) -> None:
        """Ends the trace without a file, if one is recorded: the step failed, or the rank ends."""
        self.end_rollout()
        if self._profile is not None:
            _recording.clear()
            self._profile.stop()
            self._profile = None
