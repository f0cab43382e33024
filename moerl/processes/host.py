"""The one place that starts processes on this machine, and that ends them. Standard library alone.

    start_spared     a child that a run waits for: stop signals leave it alone, and it leads a group of its own
    start_logged     a child whose output is appended to a log; `moerl.processes.child` adds a socket to it
    start_guarded    a command of others between two guards (`moerl.processes.guard`), for example a reward function
    run_command      a command that ends by itself, for its output

Stop signals are the controller's alone: systemd, srun, scancel and every other stop of a cgroup send them to all
processes of a run at once, and a child that died of one would fail the run before its checkpoint is written. So a child
ends when the controller says so, or with the controller.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from moerl.processes.spared import sparing

Process = subprocess.Popen[bytes]
"""A child that is started here."""
PIPE = subprocess.PIPE

EXIT_SECONDS = 5.0
"""Longest time that a guard has to end everything."""

_GUARD = Path(__file__).with_name("guard.py")


def start_spared(command: Sequence[str], **options: Any) -> Process:
    """Starts a child that stop signals do not reach from its first instruction on: they are blocked, and its session
    is not that of the terminal. Processes that the child starts inherit both.

    A script that cannot import this module learns from its signal mask which signals are meant.

    Args:
        options: those of `subprocess.Popen`.
    """
    process: Process | None = None
    try:
        with sparing():
            process = cast("Process", subprocess.Popen(list(command), start_new_session=True, **options))
        return process
    except BaseException:
        # The handler of a signal that came meanwhile has raised: nobody will know of the child.
        if process is not None:
            end(process)
        raise


def start_logged(command: Sequence[str], log: Path | None, *, is_spared: bool = True, **options: Any) -> Process:
    """Starts a child without input.

    Args:
        log: file that its output is appended to; the folder is made. None = the standard error of this process.
        is_spared: False for a program that handles stop signals itself; it has a session of its own, too, and whoever
            started it passes them on.
        options: others of `subprocess.Popen`.
    """
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with open(2 if log is None else log, "ab", closefd=log is not None) as output:
        options |= {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        if is_spared:
            return start_spared(command, **options)
        return cast("Process", subprocess.Popen(list(command), start_new_session=True, **options))


def start_guarded(command: Sequence[str], memory_bytes: int, status: int, **options: Any) -> Process:
    """Starts a command between two guards (`moerl.processes.guard`); returns the first guard.

    Args:
        command: begins with the path of a program.
        memory_bytes: most memory of each of its processes.
        status: descriptor of a pipe that gets the process ids of second guard and command; the command has it, too.
        options: those of `subprocess.Popen`. Everything ends if nobody holds the other end of `stdin`.
    """
    guard = [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), str(status), str(memory_bytes)]
    return start_spared([*guard, *command], pass_fds=[status], **options)


def run_command(
    command: Sequence[str], seconds: float | None = None, *, is_spared: bool = True, folder: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command without input to its end; returns its status and what it wrote.

    Args:
        seconds: longest time that it may take; None = any.
        is_spared: False for a command that is to end by the stop signals of the terminal.
        folder: its working directory; None = that of this process.

    Raises:
        OSError: the command cannot be started; `TimeoutError`: it took longer, and was killed.
    """
    start = start_spared if is_spared else subprocess.Popen[bytes]
    with start(list(command), stdin=subprocess.DEVNULL, stdout=PIPE, stderr=PIPE, cwd=folder) as process:
        try:
            output, said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise TimeoutError(f"{command[0]} has not ended after {seconds:g} s") from error
        except BaseException:  # an interrupt, too, leaves nothing running
            process.kill()
            raise
    decoded = (part.decode(errors="replace") for part in (output, said))
    return subprocess.CompletedProcess(list(command), process.returncode, *decoded)


def wait_for(process: Process, seconds: float) -> int | None:
    """Waits up to `seconds` for the end of a process; returns its exit status, None if it still runs."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    return None


def end(process: Process) -> None:
    """Kills a process, and waits until it has ended. Does no harm to one that has."""
    process.kill()
    process.wait()


def end_group(process: Process) -> None:
    """Kills a process and what it has started in its group, and waits until it has ended. Twice does no harm."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_guarded(process: Process, status: Callable[[], bytes]) -> None:
    """Ends a command that `start_guarded` started, and all that it has started, and waits for that.

    status: returns all that the pipe got.
    """
    process.send_signal(signal.SIGUSR2)
    code = wait_for(process, EXIT_SECONDS)
    if code is None:
        end(process)
    if code is None or code < 0:
        # Perhaps something killed a guard: the other one ends all, or nobody is left to end the command's group.
        guard, _, command = status().partition(b"\n")[0].partition(b" ")
        if guard.isdigit():
            with contextlib.suppress(OSError), open(os.pidfd_open(int(guard)), "rb") as handle:
                select.select([handle], [], [], EXIT_SECONDS)
        if command.isdigit():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(int(command), signal.SIGKILL)
