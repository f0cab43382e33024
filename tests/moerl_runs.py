"""Runs of the command line in processes that start fast: importing torch and Megatron takes seconds, a tiny run little.

`Runs` starts one process that imports everything and then forks for each run; a fork parses its arguments, trains and
exits as a fresh `moerl` would. `fault` is a function call from `faults.py`, made in the fork before the run begins.
`moerl` starts the real command instead.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from waiting import Work, output_of

ENVIRONMENT = {
    # One thread: sums in a fixed order, and nothing that a fork could lose.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "COLUMNS": "200",
}
IMPORTED = (
    *("moerl.cli", "moerl.config.load", "moerl.config.help_text", "moerl.orchestration.commands"),
    *("moerl.launch.checks.listed", "moerl.diagnostics.report.page"),
    *("pandas", "pyarrow.pandas_compat", "reasoning_gym", "matplotlib.figure", "matplotlib.backends.backend_agg"),
)
"""Modules that runs need, most of them only in the middle."""
START_SECONDS = 240.0
RUN_SECONDS = 240.0


@dataclass(frozen=True)
class Finished:
    """How a run ended: exit status (negative: the signal that killed it) and everything it printed."""

    status: int
    output: str


Fault = tuple[str, Mapping[str, Any]]
"""Name of a function in `faults.py` and its keyword arguments."""


class Runs:
    """The process that forks; started by the first run.

    Args:
        is_refused_as_others: modes of files hold for it, even if it is root's.
    """

    def __init__(self, folder: Path, *, is_refused_as_others: bool = False) -> None:
        self._folder, self._output = folder, folder / "output"
        self._is_refused_as_others = is_refused_as_others
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(
        self,
        *arguments: str,
        fault: Fault | None = None,
        path: Sequence[Path] = (),
        cwd: Path | None = None,
        timeout_seconds: float = RUN_SECONDS,
        draws: bool = False,
    ) -> Finished:
        """`moerl *arguments` in a fork. path: folders put in front of the import path. cwd: a folder of all runs.
        draws: the run draws its curves, which takes a quarter of a tiny one."""
        if self._connection is None:
            self.start()
        assert self._connection is not None
        self._connection.send(
            {
                "arguments": list(arguments),
                "fault": fault,
                "cwd": str(cwd or self._folder),
                "path": [str(each) for each in path],
                "timeout_seconds": timeout_seconds,
                "draws": draws,
                "output": str(self._output),
            }
        )
        work = Work()
        while not self._connection.poll(0.05):
            if work.seconds() < START_SECONDS + timeout_seconds:
                continue
            raise TimeoutError(f"moerl {' '.join(arguments)}: no answer; {self._output.read_text()[-4000:]}")
        status = self._connection.recv()
        output = self._output.read_text()
        if status is None:
            raise TimeoutError(f"moerl {' '.join(arguments)} ran for {timeout_seconds} s:\n{output[-4000:]}")
        return Finished(status, output)

    @property
    def pid(self) -> int:
        """Id of the process that forks; 0 before the first run."""
        return self._process.pid if self._process is not None else 0

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def start(self) -> None:
        """Starts it; it ends with the thread that does this."""
        ours, theirs = Pipe()
        self._process = subprocess.Popen(
            # The thread that Arrow's allocator starts for itself survives a fork; Python warns of any thread.
            [sys.executable, "-W", "ignore", __file__, str(theirs.fileno()), str(os.getpid())]
            + ["--without-capabilities"] * self._is_refused_as_others,
            env={**os.environ, **ENVIRONMENT},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._connection = ours


def moerl(
    *arguments: str,
    cwd: Path | None = None,
    path: Sequence[Path] = (),
    command: Sequence[str] = (str(Path(sys.executable).with_name("moerl")),),
    timeout_seconds: float = START_SECONDS + RUN_SECONDS,
) -> Finished:
    """The installed command, as a user starts it. path: as PYTHONPATH."""
    with subprocess.Popen(
        [*command, *arguments],
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(str(each) for each in path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = output_of(process, timeout_seconds)
        finally:
            process.terminate()
    return Finished(process.returncode, output)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of a run, as far as they must be the same again."""
    from moerl.telemetry.metrics import METRICS
    from moerl.telemetry.sinks import read_rows

    changing = {name for name, metric in METRICS.items() if not metric.deterministic}
    return [{name: row[name] for name in row if name not in changing} for row in read_rows(run_dir / "metrics.jsonl")]


def summary(run_dir: Path) -> dict[str, Any]:
    """`summary.json` without what depends on the machine's speed and memory."""
    figures = json.loads((run_dir / "summary.json").read_text())
    return {name: value for name, value in figures.items() if name not in ("wall_seconds", "peak_rss_bytes")}


REWARD = """
def score(row, response):
    return sum(each.isdigit() for each in response) / (1 + len(response))
"""


@dataclass(frozen=True)
class Sums:
    """A JSONL of sums with a reward that differs from answer to answer, so that every step has a gradient."""

    folder: Path

    @classmethod
    def write(cls, folder: Path) -> Sums:
        problems = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(12) for b in range(12)]
        (folder / "sums.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
        (folder / "sums_reward.py").write_text(REWARD)
        return cls(folder)

    def train(self, run_dir: Path, task: Sequence[str] = ()) -> list[str]:
        """`moerl train recipe=tiny` on these sums, or on another task: several steps of each stage, and all that
        carries state."""
        sums = (
            "task=jsonl",
            f"task.path='{self.folder / 'sums.jsonl'}'",
            "task.reward=sums_reward:score",
            "task.heldout_fraction=0.2",
            "task.dev_fraction=0.2",
        )
        return [
            "train",
            "recipe=tiny",
            *(task or sums),
            "sft.steps=6",
            # Load balancing is judged per microbatch, and these differ between one rank and two.
            "sft.moe_aux_loss_coef=0.0",
            "rl.moe_aux_loss_coef=0.0",
            "rl.steps=5",
            "rl.minibatches=2",
            "algorithm.kl_coef=0.01",
            "rollout.max_new_tokens=10",
            "rollout.max_running=16",
            "checkpoint.every=2",
            f"run_dir='{run_dir}'",
        ]


@dataclass(frozen=True)
class DoneRun:
    """A run directory and how the run ended that left it."""

    folder: Path
    finished: Finished


# --- in the forking process ------------------------------------------------------------------------------------------


def _serve(connection: Connection, parent: int, *, is_refused_as_others: bool) -> None:
    _die_with(parent)
    if is_refused_as_others:
        _give_capabilities_up()
    _import_everything()
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            os._exit(_run(call))
        connection.send(_wait(child, call["timeout_seconds"]))


_PR_SET_SECUREBITS, _NOROOT = 28, 0b11
"""SECBIT_NOROOT, and its lock."""


def _give_capabilities_up() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # Without this, programs that root starts have all of them again.
    if os.geteuid() == 0 and libc.prctl(_PR_SET_SECUREBITS, _NOROOT, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    version_3, no_capabilities = struct.pack("Ii", 0x20080522, 0), bytes(24)
    if libc.capset(version_3, no_capabilities):
        raise OSError(ctypes.get_errno(), "capset")


def _import_everything() -> None:
    import importlib

    from moerl.cli import MODULES_OF_RUNS
    from moerl.trainer import bridge, megatron_patches, platform

    platform.prepare()
    megatron_patches.apply()
    bridge.import_bridge()
    for name in (*IMPORTED, *MODULES_OF_RUNS):
        importlib.import_module(name)
    _do_once_what_every_run_does_first()


def _do_once_what_every_run_does_first() -> None:
    """Fills caches that a process fills in its first run: of recipes, fonts, compiled kernels, and names of weights."""
    import io
    from functools import cache

    import torch
    from transformers import conversion_mapping

    from moerl.config import help_text
    from moerl.diagnostics.plots import new_figure
    from moerl.kernels import host

    help_text.recipe_values = cache(help_text.recipe_values)
    for recipe in ("tiny", "laptop"):
        help_text.recipe_text([f"recipe={recipe}"], None)
    conversion_mapping.get_checkpoint_conversion_mapping("qwen3_moe")
    y, scales = host.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6)
    host.rms_norm_backward(y, torch.ones(4), scales, y)
    figure = new_figure(2.0, 2.0)
    figure.subplots(1, 1).set_yscale("log")
    figure.savefig(io.BytesIO())


def _wait(child: int, timeout_seconds: float) -> int | None:
    """The exit status, None if so many seconds of work were too few and the child was killed."""
    work = Work()
    while work.seconds() < timeout_seconds:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run(call: dict[str, Any]) -> int:
    parent = os.getppid()
    _die_with(parent)
    # Tests that were started in the background ignore it, and so would the run.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(call["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(call["cwd"])
    sys.path[:0] = call["path"]
    status = 70
    try:
        if not call["draws"]:
            from moerl.orchestration import reporting

            reporting.draw_curves = lambda *_: []
        if call["fault"] is not None:
            import faults

            name, arguments = call["fault"]
            getattr(faults, name)(**arguments)
        from moerl.cli import main

        status = main(call["arguments"])
    except BaseException:  # noqa: BLE001 - process boundary: the caller sees the status and the output
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _die_with(parent: int) -> None:
    from moerl.processes.parent import die_with

    die_with(parent)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]), is_refused_as_others=len(sys.argv) > 3)
