"""One SGLang server as a child process: started, probed, stopped. Runs in the process that manages it.

The server's options, keys included, are in a file of a folder that only its owner can read; command lines are public.
Its output goes to a log there, and its ranks meet in a file there: a port would take writes from every user of the
machine. It dies with its manager, however that ends (Linux).
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from moerl.config.rollouts import CPU_POOL_TOKENS
from moerl.contract.files import atomic_file, discard
from moerl.contract.trajectory import MAX_KEPT_IDS
from moerl.errors import EngineError
from moerl.http.client import HttpClient, NoAnswerError, Request
from moerl.machine.server_environment import server_environment
from moerl.processes.host import end_group, start_logged
from moerl.rollout.fleet.endpoint import Endpoint, require_private, write_endpoint
from moerl.rollout.sglang.handshake import UNSYNCED
from moerl.rollout.sglang.install import python_of, site_packages
from moerl.rollout.sglang.patches import verify_installation

ENDPOINT_FILE = "server.json"
OPTIONS_FILE = "options.yaml"
LOG_FILE = "server.log"
_POLL_SECONDS = 0.2
_HEALTH_SECONDS = 5.0
_RENDEZVOUS = ".rendezvous-"
"""A file that the server's ranks meet in, one for each start."""
_PORT_TAKEN = (b"EADDRINUSE", b"address already in use", b"Address already in use")

# Parent-death signal, then the server's own entry point. A manager that died before the signal was set counts, too.
# Python 3.10 knows no other way to leave the current directory off the import path. Signals that are blocked by now
# (`moerl.processes.host`) stay ignored, whatever handlers the server wants: its processes inherit that.
_BOOT = """
import sys
sys.path[:] = filter(None, sys.path)
import ctypes, os, runpy, signal
spared, handle = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.signal
for number in spared:
    handle(number, signal.SIG_IGN)
signal.signal = lambda number, handler: signal.SIG_IGN if number in spared else handle(number, handler)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv.pop(1)):
        sys.exit("the manager of this server is gone")
else:
    sys.argv.pop(1)
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server: the model that it serves, and how."""

    model: Path
    """Hugging Face directory."""
    environment: Path
    """Folder that `moerl sglang install` made."""
    device: str = "cuda"
    """cuda or cpu."""
    tensor: int = 1
    """Tensor-parallel ranks, each on a GPU (or core) of its own."""
    expert: int = 1
    """Groups of these ranks that share the experts."""
    first_device: int = 0
    """GPUs (or cores) that other servers have; this server takes those that follow."""
    dtype: str = "bfloat16"
    """Dtype of weights and activations."""
    max_running: int = 64
    """Requests side by side, at most."""
    max_pool_tokens: int | None = None
    """Tokens in the key-value pool; None takes what memory allows on GPUs, `CPU_POOL_TOKENS` on CPU."""
    memory_share: float | None = None
    """Share of a GPU's memory, for weights and pool; None leaves it to SGLang."""
    sleeps: bool = False
    """True if the server can give the memory of weights and pool back (`UpdateCalls.sleep`)."""
    chunked_prefill_tokens: int | None = None
    """Longest piece of a prefill; None leaves it to SGLang."""
    vocab_size: int | None = None
    """Ids below it can be sampled; None for all that the model has an embedding for."""
    passed_on: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Other arguments of the server by name, with underscores."""
    policy_version: int = 0
    """Version of the weights in `model`; -1 if the trainer sends its own before anything is sampled."""
    host: str = "127.0.0.1"
    """Loopback or private address."""
    port: int = 0
    """0 takes a free one."""


class SGLangServer:
    """A running server; `stop` it, or use it as a context. `endpoint` says where it is and how to be let in."""

    def __init__(self, options: ServerOptions, folder: Path) -> None:
        """Starts the process and returns at once; `wait_until_ready` comes next.

        Args:
            folder: for options, keys and log; made if needed, and closed to others. One server at a time.

        Raises:
            EngineError: a public address, an environment without this version's patches, no model, or another user's
                folder.
        """
        require_private(options.host)
        verify_installation(site_packages(options.environment))
        if not (options.model / "config.json").is_file():
            raise EngineError(
                f"model to serve: {options.model}",
                seen="no config.json",
                expected="a Hugging Face directory",
                remedy="give the directory of the model",
            )
        _make_private(folder)
        port = options.port or free_port(options.host)
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.folder = folder
        self.log = folder / LOG_FILE
        # Hexadecimal: SGLang takes a value that begins with a dash for an option.
        keys = [secrets.token_hex(32) for _ in range(2)]
        with atomic_file(folder / OPTIONS_FILE, mode=0o600) as temporary:
            temporary.write_text(yaml.safe_dump(launch_options(options, port) | dict(zip(_KEYS, keys, strict=True))))
        command = [str(python_of(options.environment)), "-c", _BOOT, str(os.getpid())]
        self.log.touch()
        self.log.chmod(0o600)
        self._log_start = self.log.stat().st_size
        self._process = start_logged(
            [*command, "--config", str(folder / OPTIONS_FILE)],
            self.log,
            env=_environment(options, folder),
            # Its sockets in the file system, which take pickles, are the owner's alone, too.
            umask=0o077,
        )
        self.endpoint = Endpoint(f"http://{host}:{port}", *keys, pid=self._process.pid)
        write_endpoint(self.endpoint, folder / ENDPOINT_FILE)

    def wait_until_ready(self, timeout_seconds: float) -> None:
        """Returns when the server serves.

        Raises:
            EngineError: it ended, or is not ready in time. The end of its log is a note; `stop` it then.
        """
        deadline = time.monotonic() + timeout_seconds
        while not answers_health(self.endpoint):
            self.require_running()
            if time.monotonic() > deadline:
                raise self._failure("not ready", f"ready within {timeout_seconds} s")
            time.sleep(_POLL_SECONDS)

    def require_running(self) -> None:
        """Raises EngineError if the process has ended; the end of its log is a note."""
        if self._process.poll() is not None:
            raise self._failure(f"ended with status {self._process.returncode}", "a server that runs")

    @property
    def lost_a_port(self) -> bool:
        """True if it found a port taken that was free when it was chosen; SGLang listens on some seconds later."""
        log = self.log.read_bytes()[self._log_start :]
        return any(text in log for text in _PORT_TAKEN)

    def stop(self) -> None:
        """Kills the server and all its processes: there is nothing of theirs to be kept. Twice does no harm."""
        end_group(self._process)
        discard(self.folder / ENDPOINT_FILE)
        _remove_rendezvous(self.folder)

    def __enter__(self) -> SGLangServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _failure(self, seen: str, expected: str) -> EngineError:
        tail = self.log.read_bytes()[-3000:].decode(errors="replace")
        error = EngineError("SGLang server", seen=seen, expected=expected, remedy=f"read {self.log}")
        error.add_note(f"last lines of {self.log}:\n{tail}")
        return error


_KEYS = ("api-key", "admin-api-key")


def _make_private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise EngineError(
            f"server folder {folder}: another user's",
            seen=f"owner {folder.stat().st_uid}",
            expected=f"owner {os.getuid()}; keys are kept there",
            remedy="choose another folder",
        )
    folder.chmod(0o700)


def _environment(options: ServerOptions, folder: Path) -> dict[str, str]:
    _remove_rendezvous(folder)
    made = server_environment(options.device, options.tensor, first_device=options.first_device, host=options.host)
    meeting = folder.resolve() / f"{_RENDEZVOUS}{secrets.token_hex(8)}"
    return made | {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{meeting}"}


def _remove_rendezvous(folder: Path) -> None:
    """Removes meeting files, also those of servers that were killed with their manager."""
    for left in folder.glob(f"{_RENDEZVOUS}*"):
        discard(left)


def launch_options(options: ServerOptions, port: int) -> dict[str, Any]:
    """Returns SGLang's options by name; `docs/sglang.md` says why those are there that no key names.

    Raises:
        EngineError: `options.passed_on` has one that is set here.
    """
    chosen: dict[str, Any] = {
        "model-path": str(options.model),
        "host": options.host,
        "port": port,
        "device": options.device,
        "dtype": options.dtype,
        "tensor-parallel-size": options.tensor,
        "expert-parallel-size": options.expert,
        "max-running-requests": options.max_running,
        "weight-version": UNSYNCED if options.policy_version < 0 else str(options.policy_version),
        "enable-return-routed-experts": True,
        "sampling-backend": "pytorch",
        "sampling-mask-max-tokens": MAX_KEPT_IDS,
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        # A line of log for every request and every step of an update takes a tenth of the server process's time.
        "log-level-http": "warning",
    }
    if options.max_pool_tokens is not None:
        chosen["max-total-tokens"] = options.max_pool_tokens
    if options.chunked_prefill_tokens is not None:
        chosen["chunked-prefill-size"] = options.chunked_prefill_tokens
    if options.vocab_size is not None:
        chosen["json-model-override-args"] = json.dumps({"sampled_vocab_size": options.vocab_size})
    if options.device != "cpu":
        chosen["base-gpu-id"] = options.first_device
        if options.memory_share is not None:
            chosen["mem-fraction-static"] = options.memory_share
        if options.sleeps:
            chosen["enable-memory-saver"] = True
    else:
        chosen.setdefault("max-total-tokens", CPU_POOL_TOKENS)
        chosen |= {
            "attention-backend": "torch_native",
            "cuda-graph-backend-decode": "disabled",
            "cuda-graph-backend-prefill": "disabled",
            # Or an idle scheduler keeps a core busy that the trainer needs.
            "sleep-on-idle": True,
            # Taking in one response costs as much as taking in many: half a step of decoding.
            "min-free-slots-delay": max(1, options.max_running // 8),
        }
    return chosen | _passed_on(options, chosen)


def _passed_on(options: ServerOptions, chosen: Mapping[str, Any]) -> dict[str, Any]:
    passed = {name.replace("_", "-"): value for name, value in options.passed_on.items()}
    for name in passed:
        if name in chosen:
            raise EngineError(
                f"rollout.server_args.{name.replace('-', '_')}: set by moerl for servers on {options.device}",
                seen=passed[name],
                expected=f"no value; it is {chosen[name]}",
                remedy="leave it away",
            )
    return passed


def answers_health(endpoint: Endpoint) -> bool:
    """Returns whether a server answers its health probe now. Waits; not in an event loop."""

    async def ask() -> bool:
        try:
            async with (
                HttpClient(max_connections=1) as client,
                client.ask(Request("GET", f"{endpoint.url}/health"), _HEALTH_SECONDS) as answer,
            ):
                # Its status is all there is to know: nothing else of the answer is read.
                return answer.status == 200
        except NoAnswerError:
            return False

    return asyncio.run(ask())


def free_port(host: str) -> int:
    """Returns a port that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
