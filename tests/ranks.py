"""Megatron ranks that stay alive between tests: importing Megatron takes seconds, building a tiny model little.

`Ranks(2).run(function, *args, tensor=2)` calls the module-level `function(layout, *args)` in each of two processes that
hold the asked-for Megatron layout (`where`; sizes as in `ParallelConfig`), and returns the results in rank order.
Arguments and results are pickled.

One process imports everything, once for all tests of a worker. A rank is a fork of it, and a fork of that holds one
layout and is replaced with it: a layout leaves no group and no thread behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from waiting import Work

_PR_SET_CHILD_SUBREAPER = 36
RANK_ENV = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


class Ranks:
    """Processes are started by the first call, and anew by the call after a failure.

    first: a module of `tests/` whose `load` they call before they import Megatron.
    """

    def __init__(self, world_size: int, first: str = "") -> None:
        self.world_size, self.first = world_size, first
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._processes: list[int] = []
        self._connections: list[Connection] = []
        self._calls = 0

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float = 120.0, **sizes: int) -> list[Any]:
        """Results by rank; the exception of a rank is raised again here with that rank's traceback as a note.

        timeout_seconds: of work (`waiting.Work`), after which `TimeoutError` says where each rank is.
        """
        if not self._processes:
            for rank in range(self.world_size):
                self._start(rank)
        self._calls += 1
        call = {
            "file": sys.modules[function.__module__].__file__,
            "module": function.__module__,
            "function": function.__qualname__,
            "args": pickle.dumps(args),
            "sizes": sizes,
            "rendezvous": f"file://{self._folder}/rendezvous{self._calls}",
        }
        for connection in self._connections:
            connection.send(call)
        answers: list[dict[str, Any]] = []
        try:
            answers = self._answers(timeout_seconds)
            return [_unwrap(answer) for answer in answers]
        except BaseException:
            # Ranks that did not fail may wait for the one that did; an answer that comes later is not the next call's.
            if self.world_size > 1 or not answers:
                self._stop()
            raise

    def close(self) -> None:
        self._stop()
        shutil.rmtree(self._folder)

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        with (self._folder / f"output{rank}").open("wb") as output:
            self._processes.append(_importer(self.first).fork(rank, self.world_size, theirs.fileno(), output.fileno()))
        theirs.close()
        self._connections.append(ours)

    def _answers(self, timeout_seconds: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        work = Work()
        while len(answers) < self.world_size:
            for rank, connection in enumerate(self._connections):
                if rank not in answers and connection.poll(0.01):
                    try:
                        answers[rank] = connection.recv()
                    except EOFError:
                        raise RuntimeError(f"rank {rank} died: {self._output(rank)}") from None
            if any("error" in answer for answer in answers.values()):
                return sorted(answers.values(), key=lambda answer: "error" not in answer)
            if work.seconds() > timeout_seconds:
                self._write_tracebacks()
                raise TimeoutError("\n".join(f"rank {rank}: {self._output(rank)}" for rank in range(self.world_size)))
        return [answers[rank] for rank in range(self.world_size)]

    def _write_tracebacks(self) -> None:
        """Adds to each rank's output where its threads are."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGUSR1)
        time.sleep(1.0)

    def _output(self, rank: int) -> str:
        return (self._folder / f"output{rank}").read_text()[-4000:]

    def _stop(self) -> None:
        for process in self._processes:
            # The rank and its fork are a process group of their own; nobody has to wait for one that has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
                while True:
                    os.killpg(process, 0)
                    time.sleep(0.005)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


class _Importer:
    """A process that has imported everything, and forks ranks."""

    def __init__(self, first: str) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(os.getpid()), first],
                env={**os.environ, **RANK_ENV},
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        path = pickle.dumps(sys.path)
        self._socket.sendall(len(path).to_bytes(4) + path)

    def fork(self, rank: int, world_size: int, connection: int, output: int) -> int:
        """The process id, and that of its group, of a new rank that listens at a connection."""
        socket.send_fds(self._socket, [f"{rank} {world_size}".encode()], [connection, output])
        return int.from_bytes(self._socket.recv(8))


@functools.cache
def _importer(first: str) -> _Importer:
    return _Importer(first)


def _import_and_fork(connection: socket.socket, parent: int, first: str) -> None:
    length = int.from_bytes(connection.recv(4))
    path = b""
    while len(path) < length:
        path += connection.recv(length - len(path))
    sys.path[:] = pickle.loads(path)  # noqa: S301 - of the tests
    from moerl.processes.parent import die_with

    die_with(parent)
    if first:
        importlib.import_module(first).load()
    import torch

    from moerl.trainer.bridge import import_bridge

    import_bridge()
    importlib.import_module("moerl.trainer.trainer")
    torch.set_num_threads(1)
    # A fork has torch's pool without its threads. The first thread that computes in the fork replaces the pool; a
    # second one that comes meanwhile dies of "Invalid thread pool!", as workers of gloo did. Here only one thread runs.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    faulthandler.register(signal.SIGUSR1)
    # Ranks that end are nobody's to wait for; nor are their forks, which may be left to a process 1 that takes seconds.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    while True:
        message, fds, _, _ = socket.recv_fds(connection, 64, 2)
        if not message:
            return
        if os.fork():
            for fd in fds:
                os.close(fd)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        die_with(os.getppid())
        for number in (1, 2):
            os.dup2(fds[1], number)
        connection.sendall(os.getpid().to_bytes(8))
        connection.close()
        rank, world_size = map(int, message.split())
        _rank_main(Connection(fds[0]), rank, world_size)
        os._exit(0)


def _unwrap(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        error: BaseException = pickle.loads(answer["error"])  # noqa: S301 - written by this module
        error.add_note(answer["traceback"])
        raise error
    return pickle.loads(answer["value"])  # noqa: S301 - written by this module


def _rank_main(connection: Connection, rank: int, world_size: int) -> None:
    """Hands calls on to a fork of this process that holds their layout."""
    context = multiprocessing.get_context("fork")
    fork, pipe, sizes = None, None, None
    with contextlib.suppress(EOFError):
        while True:
            call = connection.recv()
            if fork is None or pipe is None or call["sizes"] != sizes:
                if fork is not None:
                    fork.kill()
                    fork.join()
                pipe, theirs = Pipe()
                sizes = call["sizes"]
                fork = context.Process(target=_fork_main, args=(theirs, pipe, rank, world_size), daemon=True)
                fork.start()
                theirs.close()
            pipe.send(call)
            connection.send_bytes(pipe.recv_bytes())


def _fork_main(connection: Connection, parents_end: Connection, rank: int, world_size: int) -> None:
    parents_end.close()
    layout = None
    modules: dict[str, Any] = {}
    with contextlib.suppress(EOFError):
        while True:
            call = connection.recv()
            try:
                layout = layout or _layout(call, rank, world_size)
                function = getattr(_module(modules, call), call["function"])
                args = pickle.loads(call["args"])  # noqa: S301 - written by this module
                answer = {"value": pickle.dumps(function(layout, *args))}
            except BaseException as error:  # noqa: BLE001 - process boundary: the caller raises it again
                answer = {"error": _portable(error), "traceback": f"in rank {rank}:\n{traceback.format_exc()}"}
            connection.send(answer)


def _layout(call: dict[str, Any], rank: int, world_size: int) -> Any:
    from moerl.contract.parallel import ParallelDims
    from moerl.trainer import groups

    names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    sizes = dict.fromkeys(names, 1) | call["sizes"]
    data = world_size // (sizes["tensor"] * sizes["pipeline"] * sizes["context"])
    dims = ParallelDims(**sizes, data=data)
    return groups.start(rank=rank, rendezvous=call["rendezvous"], dims=dims, seed=1)


def _module(modules: dict[str, Any], call: dict[str, Any]) -> Any:
    """Imports a test module from its file, under the name pytest gave it, which need not be importable."""
    if call["file"] not in modules:
        spec = importlib.util.spec_from_file_location(call["module"], call["file"])
        assert spec is not None
        assert spec.loader is not None
        module = modules[call["file"]] = importlib.util.module_from_spec(spec)
        sys.modules[call["module"]] = module
        spec.loader.exec_module(module)
    return modules[call["file"]]


def _portable(error: BaseException) -> bytes:
    """The error pickled; a RuntimeError with its text where it does not survive that."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301 - written a line before
    except (TypeError, AttributeError, pickle.PickleError):
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data


if __name__ == "__main__":
    _import_and_fork(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
