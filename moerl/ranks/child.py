"""The process of one rank, as whoever started it sees it: the controller, or the rank's actor on another node."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from moerl.config.schema import RunConfig
from moerl.config.threads import rank_threads
from moerl.config.torch_start import tf32_variables
from moerl.contract.files import discard
from moerl.processes.parent import CONTROLLER
from moerl.processes.spared import start_spared

# -P: a torch.py or json.py in the user's directory is not what we import.
PROGRAM = (sys.executable, "-P", "-m", "moerl.ranks.process")


class Child:
    """A process and our end of its socket.

    Args:
        program: to which the descriptor of its socket is added, then those in `given`.
        environment: all of it but the variable `CONTROLLER`.
        log: file that its output is added to; its folder is made.
        inherited: descriptors that it gets besides.
    """

    def __init__(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        given: Sequence[int] = (),
        inherited: Sequence[int] = (),
    ) -> None:
        self.log = log
        self.socket, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log.open("ab") as output:
            self.process = start_spared(
                [*program, str(theirs.fileno()), *(str(each) for each in given)],
                env={**environment, CONTROLLER: str(os.getpid())},
                pass_fds=(theirs.fileno(), *given, *inherited),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def end(self) -> None:
        """Kills it; without output there is no log."""
        self.process.kill()
        self.process.wait()
        self.socket.close()
        remove_empty(self.log)

    def describe_end(self, seconds: float) -> str:
        """How it ended; seconds: to wait for that."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"


def rank_variables(config: RunConfig) -> dict[str, str]:
    """Returns the variables of a rank's process that follow from the configuration, wherever the process is."""
    return {"OMP_NUM_THREADS": str(rank_threads(config, "sft")), **tf32_variables(config.trainer.tf32)}


def describe_output(log: Path) -> str:
    """Says, for errors, where the output of a rank is."""
    wrote = log.exists() and log.stat().st_size > 0
    return f"its output is in {log}" if wrote else "it wrote nothing"


def remove_empty(log: Path) -> None:
    """Removes the log of a process that wrote nothing; one that cannot be removed does no harm."""
    if log.exists() and log.stat().st_size == 0:
        discard(log)


def remove_empty_folders(logs: Sequence[Path]) -> None:
    """Removes the folders of logs if nothing is left in them."""
    for folder in {log.parent for log in logs}:
        with contextlib.suppress(OSError):  # another has come, or nothing can be removed
            folder.rmdir()


def log_of(run_dir: Path, rank: int) -> Path:
    """The log of a rank in a run directory."""
    return run_dir / "logs" / f"rank-{rank}.log"
