"""The SGLang environment, and the files and sockets of servers: who can read keys, who can reach what listens."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moerl.errors import EngineError
from moerl.http.keys import is_private
from moerl.launch.checks.outcome import Check, Level, fault, green
from moerl.rollout.fleet.endpoint import read_endpoint
from moerl.rollout.sglang.install import device_of, site_packages
from moerl.rollout.sglang.patches import verify_installation
from moerl.rollout.sglang.server import ENDPOINT_FILE

AREA = "servers"
_LISTENS = "0A"
PROGRAMS = re.compile(r"(?:^|/)(moerl|sglang|raylet|gcs_server)(?:$|[.:])|^(ray)::|/site-packages/(ray)/")
"""Pattern of programs whose sockets are checked, in a word of a command line; the group is the program's name."""

LAUNCHERS = ("srun", "mpirun", "ssh")
"""Programs that listen themselves, for the processes that they start."""


def check_environment(environment: Path, *, has_gpus: bool) -> Check:
    """Checks the environment of SGLang servers if no run asks for one: a missing one is no fault, a broken one a
    note."""
    name = "SGLang environment"
    if not environment.exists():
        return green(AREA, name, f"none at {environment}; rollout=sglang alone needs one")
    try:
        device = device_of(environment)
        patches = verify_installation(site_packages(environment))
    except EngineError as error:
        return fault("yellow", AREA, name, error)
    if device == "cuda" and not has_gpus:
        remedy = "moerl sglang install --device cpu --env DIR; or run on a machine with GPUs"
        return Check(AREA, name, "yellow", f"{environment}: made for GPUs", "one for this machine, of CPUs", remedy)
    said = f"sglang {patches.version} for {device}, patches {patches.fingerprint}: as released else"
    return green(AREA, name, said)


def check_server_files(files: Iterable[Path]) -> Check:
    """Checks that files with addresses and keys of servers have both keys, and that their owner alone can read them."""
    name, wrong, here = f"{ENDPOINT_FILE} files", list[EngineError](), [*files]
    for file in here:
        try:
            read_endpoint(file)
        except EngineError as error:
            wrong.append(error)
    if wrong:
        return fault("red", AREA, name, wrong[0])
    return green(AREA, name, f"{len(here)}, each with both keys and for its owner alone" if here else "none")


def server_files(folder: Path) -> list[Path]:
    """Lists the files of servers below a folder of runs, as `moerl serve` and runs with servers of their own write
    them."""
    return sorted(path for depth in ("*", "*/*", "*/sglang/*") for path in folder.glob(f"{depth}/{ENDPOINT_FILE}"))


def check_token_files(files: Sequence[Path]) -> Check:
    """Checks that their owner alone can read files with tokens of services."""
    there = [file for file in files if file.is_file()]
    wide = [(file, status) for file in there if not is_private(status := file.stat())]
    if wide:
        seen = ", ".join(
            f"{file} has mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}" for file, status in wide
        )
        remedy = f"chmod 600 {' '.join(str(file) for file, _ in wide)}; others may have read them: make new tokens"
        return Check(AREA, "token files", "red", seen, "mode 0600, your own", remedy)
    return green(AREA, "token files", f"{len(there)}, each for its owner alone" if there else "none")


def token_files(home: Path, hub: Path | None) -> list[Path]:
    """Lists the paths at which libraries of a run keep tokens. hub: folder of the Hugging Face hub, if it is set."""
    return [
        (hub or home / ".cache" / "huggingface") / "token",
        home / ".netrc",
        home / ".config" / "wandb" / "settings",
    ]


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket, and its process."""

    pid: int
    """Process that has the socket open."""
    program: str
    """Name of its program, as `PROGRAMS` finds it."""
    host: str
    """IPv4 or IPv6 address; 0.0.0.0 or :: = all addresses of the machine."""
    port: int
    """TCP port."""


def check_binds(listeners: Iterable[Listener], *, others_are_used: bool = True) -> Check:
    """Checks that no process of ours listens on all addresses of the machine.

    Args:
        others_are_used: False for a run that starts its own servers and cluster: a process that listens on all
            addresses is then worth knowing of, and no fault.
    """
    here = list(listeners)
    wide = [each for each in here if ipaddress.ip_address(each.host).is_unspecified]
    if wide:
        seen = ", ".join(f"{each.program} (process {each.pid}) on {each.host}:{each.port}" for each in wide)
        remedy = "end it, and start it on 127.0.0.1 or this machine's own address in the cluster's network (`--host`)"
        level: Level = "red" if others_are_used else "yellow"
        return Check(AREA, "listening sockets", level, seen, "loopback or a private address, never all", remedy)
    return green(AREA, "listening sockets", f"{len(here)} of moerl, SGLang and Ray, none of them on all addresses")


def own_listeners(programs: re.Pattern[str] = PROGRAMS) -> list[Listener]:
    """Returns the listening TCP sockets of this user's processes of these programs, in any network namespace; Linux."""
    found: list[Listener] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid != os.getuid() or int(folder.name) == os.getpid():
                continue
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            program = program_of(words, programs)
            if program is not None:
                sockets = {inode: at for table in ("tcp", "tcp6") for inode, at in listening(_table(folder, table))}
                found += [Listener(int(folder.name), program, *sockets[i]) for i in _inodes(folder) if i in sockets]
        except OSError:  # it has ended, or is not ours to look at
            continue
    return sorted(set(found), key=lambda each: (each.port, each.pid))


def program_of(words: Sequence[str], programs: re.Pattern[str] = PROGRAMS) -> str | None:
    """Returns the program that a command line runs; None if it is not one of `programs`. A launcher, whose command line
    has that of another process in it, is none."""
    if Path(words[0]).name in LAUNCHERS:
        return None
    match = next((match for word in words if (match := programs.search(word))), None)
    return None if match is None else next(filter(None, match.groups()))


def listening(table: str) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yields inode, and address and port, of the listening sockets in the text of ``/proc/PID/net/tcp`` or ``tcp6``."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTENS:
            host, port = fields[1].split(":")
            yield fields[9], (_address(host), int(port, 16))


def _table(folder: Path, name: str) -> str:
    path = folder / "net" / name
    return path.read_text() if path.exists() else ""


def _inodes(folder: Path) -> Iterator[str]:
    for descriptor in (folder / "fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _address(text: str) -> str:
    """Reads an address: hexadecimal words of four bytes, each in the machine's own byte order."""
    packed = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
