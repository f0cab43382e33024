"""Runs a function in several real gloo processes, for tests of collectives.

`run_ranks(2, function, *args)` calls the module-level `function(rank, world_size, *args)` in each of two
fresh processes, in which the default process group is up (gloo over loopback, rendezvous through a file,
one thread), and returns their return values in rank order. Arguments and return values are pickled.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

START_SECONDS = 180.0
"""Limit for imports and rendezvous, generous because a loaded machine starts processes slowly."""

RANK_ENV = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 120.0) -> list[Any]:
    """Calls `function(rank, world_size, *args)` in `world_size` processes; returns the results by rank.

    The exception of the rank that failed first is raised again here, with that rank's traceback as a note. No rank
    outlives this call: one that runs `function` for longer than `timeout_seconds` ends with its stack, which the
    `TimeoutError` raised here carries.
    """
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder_name:
        folder = Path(folder_name)
        payload = {
            "file": sys.modules[function.__module__].__file__,
            "module": function.__module__,
            "function": function.__qualname__,
            "world_size": world_size,
            "timeout_seconds": timeout_seconds,
            "sys_path": sys.path,
            "args": pickle.dumps(args),
        }
        (folder / "payload").write_bytes(pickle.dumps(payload))
        ranks = [_start(folder, rank) for rank in range(world_size)]
        try:
            _wait(folder, ranks, timeout_seconds)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [_unpickle(_read(folder / f"result{rank}")["value"]) for rank in range(world_size)]


def _start(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    with (folder / f"stderr{rank}").open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, __file__, str(folder), str(rank)],
            env={**os.environ, **RANK_ENV},
            stdout=stderr,
            stderr=stderr,
        )


def _wait(folder: Path, ranks: list[subprocess.Popen[bytes]], timeout_seconds: float) -> None:
    """Returns once every rank has ended well; raises as soon as one has not."""
    # The ranks dump their stacks and end by themselves at their limits; this one only backs that up.
    deadline = time.monotonic() + START_SECONDS + timeout_seconds + 10
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        if any(process.poll() for process in ranks):
            break
        time.sleep(0.02)
    if all(process.poll() == 0 for process in ranks):
        return
    results = {rank: folder / f"result{rank}" for rank in range(len(ranks))}
    ended = {rank: _read(path) for rank, path in results.items() if path.exists()}
    failures = {rank: result for rank, result in ended.items() if "error" in result}
    if failures:
        # Later failures are mostly lost connections to the first one.
        rank = min(failures, key=lambda rank: failures[rank]["at"])
        error: BaseException = _unpickle(failures[rank]["error"])
        error.add_note(f"in rank {rank}:\n{failures[rank]['traceback']}")
        raise error
    stacks = "\n".join(f"rank {rank}: {(folder / f'stderr{rank}').read_text()[-4000:]}" for rank in range(len(ranks)))
    raise TimeoutError(f"ranks hung for {timeout_seconds} s or died; exit codes {[p.poll() for p in ranks]}\n{stacks}")


def _rank_main(folder: Path, rank: int) -> int:
    payload = _read(folder / "payload")
    faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    sys.path[:] = payload["sys_path"]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    result: dict[str, Any]
    try:
        function, args = _load(payload)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=payload["world_size"],
            timeout=timedelta(seconds=2 * START_SECONDS + 2 * payload["timeout_seconds"]),
        )
        # Ends a hang with this rank's stack; the group's own limit is longer, or one rank would only report
        # that it lost another.
        faulthandler.dump_traceback_later(payload["timeout_seconds"], exit=True)
        result = {"value": pickle.dumps(function(rank, payload["world_size"], *args))}
    except BaseException as error:  # noqa: BLE001 - process boundary: the caller raises it again
        result = {"error": _portable(error), "traceback": traceback.format_exc(), "at": time.time()}
    partial = folder / f"partial{rank}"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(folder / f"result{rank}")
    if "error" in result:
        # Without the orderly shutdown, which would wait for the other ranks.
        sys.stdout.flush()
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _load(payload: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Imports the test module from its file, under the name pytest gave it, which need not be importable."""
    spec = importlib.util.spec_from_file_location(payload["module"], payload["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[payload["module"]] = module
    spec.loader.exec_module(module)
    return getattr(module, payload["function"]), _unpickle(payload["args"])


def _read(path: Path) -> dict[str, Any]:
    return _unpickle(path.read_bytes())


def _unpickle(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301 - written by this module


def _portable(error: BaseException) -> bytes:
    """The error pickled; a RuntimeError with its text where it does not survive that."""
    try:
        data = pickle.dumps(error)
        _unpickle(data)
    except (TypeError, AttributeError, pickle.PickleError):
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data


if __name__ == "__main__":
    sys.exit(_rank_main(Path(sys.argv[1]), int(sys.argv[2])))
