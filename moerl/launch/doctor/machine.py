"""Ports, room, locks and speed of this machine. Every probe is undone: no file, no socket stays."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from moerl.contract.files import discard, write_all
from moerl.errors import ending
from moerl.launch.checks.containers import has_pyxis
from moerl.launch.checks.outcome import Check, Level, green

AREA = "machine"
MIB, GIB = 2**20, 2**30
LEAST_BYTES, ENOUGH_BYTES = GIB, 10 * GIB
"""Room at the run root under which a look is a fault, or a note, if no run says how much it needs."""
PROBE_BYTES = 64 * MIB
SLOW_DISK, SLOW_LOOPBACK = 50e6, 200e6
"""Bytes per second under which checkpoints wait for the disk, and processes for each other's messages."""
FEW_PORTS = 1000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CHUNK = bytes(MIB)


def check_port_range(text: str) -> Check:
    """Checks that the kernel gives out enough ports, and that one of them can be reached. text: as `port_range`."""
    name = "loopback ports"
    first, last = map(int, text.split())
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 10.0):
            pass
    except OSError as error:
        remedy = "mend the loopback interface, or end what holds its ports"
        return Check(AREA, name, "red", f"127.0.0.1: {error}", "a free port that can be reached", remedy)
    if last - first + 1 < FEW_PORTS:
        remedy = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
        return Check(AREA, name, "yellow", f"{first} to {last}", f"{FEW_PORTS} ports at least", remedy)
    return green(AREA, name, f"{first} to {last} are given out; one was taken and reached")


def port_range() -> str:
    """Returns the kernel's first and last port for sockets that ask for any, as text; the widest if it says none."""
    return _RANGE.read_text() if _RANGE.is_file() else "1024 65535"


def check_port(port: int, host: str = "127.0.0.1") -> Check:
    """Checks that a port is free."""
    try:
        with socket.socket() as probe:
            # As servers do, so that one that has just ended is not in the way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        remedy = f"end what listens there (`ss -ltnp 'sport = :{port}'`), or choose another port"
        seen = f"{host}:{port}: {error.strerror or error}"
        return Check(AREA, f"port {port}", "red", seen, "a port that can be taken", remedy)
    return green(AREA, f"port {port}", f"free on {host}")


def room_for_checkpoints(run_dir: Path) -> int:
    """Returns the bytes that a run may have in checkpoints: those that are free, and those of the checkpoints that are
    there, which new ones replace."""
    there = sum(path.stat().st_size for path in (run_dir / "checkpoints").rglob("*") if path.is_file())
    return shutil.disk_usage(existing(run_dir)).free + there


def check_room(folder: Path) -> Check:
    """Checks the room for checkpoints, journal and dumps at the folder of runs, if no run is named."""
    name = "room for runs"
    usage = shutil.disk_usage(existing(folder))
    status = os.statvfs(existing(folder))
    seen = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} at {folder}"
    remedy = "make room, or choose run_dir on another disk"
    if status.f_files and not status.f_favail:
        return Check(AREA, name, "red", f"{seen}, and no file more", "room for files", remedy)
    expected = f"{ENOUGH_BYTES / GIB:.0f} GiB"
    level: Level = "red" if usage.free < LEAST_BYTES else "yellow" if usage.free < ENOUGH_BYTES else "green"
    return green(AREA, name, seen) if level == "green" else Check(AREA, name, level, seen, expected, remedy)


def check_locks(folder: Path) -> Check:
    """Checks that a run directory can be locked, so that no second run writes there."""
    name = "file locks"
    try:
        with _probe_file(folder) as path, path.open("wb") as one, path.open("wb") as other:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return green(AREA, name, f"work at {folder}")
            seen = "two processes can hold the same lock"
    except OSError as error:
        seen = error.strerror or str(error)
    remedy = "choose run_dir on another file system, or mount this one with locks (Lustre: -o flock)"
    return Check(AREA, name, "red", f"{folder}: {seen}", "a directory to write to, with flock", remedy)


def disk_rate(folder: Path, num_bytes: int = PROBE_BYTES) -> float:
    """Returns bytes per second of one writer. Writes a file through to the disk, and removes it. Raises OSError."""
    with _probe_file(folder) as path, path.open("wb", buffering=0) as file:
        began = time.perf_counter()
        for start in range(0, num_bytes, len(_CHUNK)):
            write_all(file.fileno(), _CHUNK[: num_bytes - start])
        os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - began)


def check_disk(folder: Path, num_bytes: int = PROBE_BYTES) -> tuple[Check, float | None]:
    """Returns the look at the disk, and its rate in bytes per second; None if nothing could be written."""
    name = "disk"
    try:
        rate = disk_rate(folder, num_bytes)
    except OSError as error:
        seen = f"{folder}: {error.strerror or error}"
        remedy = "make room or raise the limit (quota, ulimit -f), or choose run_dir on another disk"
        return Check(AREA, name, "red", seen, f"{num_bytes / MIB:g} MiB written", remedy), None
    return judge_rate(name, rate, SLOW_DISK, "move runs to a faster disk, or save less often"), rate


def check_loopback(num_bytes: int = PROBE_BYTES) -> Check:
    """Measures the rate of bytes that this process sends to itself over 127.0.0.1."""
    try:
        rate = _loopback_rate(num_bytes)
    except OSError as error:
        return Check(AREA, "loopback", "red", str(error), "a connection to 127.0.0.1", "mend the loopback interface")
    return judge_rate("loopback", rate, SLOW_LOOPBACK, "end what keeps the cores busy")


def check_slurm(pyxis: bool | str) -> Check:
    """Returns the look at SLURM's srun. pyxis: as `has_pyxis` answers."""
    if isinstance(pyxis, str):
        return Check(AREA, "SLURM", "yellow", pyxis, "srun that lists its options", "mend the configuration of SLURM")
    with_it = "runtime: pyxis of a site file works" if pyxis else "runtime: pyxis of a site file needs it"
    return green(AREA, "SLURM", f"srun {'with' if pyxis else 'without'} the plugin pyxis; {with_it}")


def judge_rate(name: str, bytes_per_second: float, slow: float, remedy: str) -> Check:
    """Judges a measured rate: a slow one is worth a note and never a fault, because load passes."""
    seen = f"{bytes_per_second / 1e6:,.0f} MB/s"
    if bytes_per_second < slow:
        return Check(AREA, name, "yellow", seen, f"{slow / 1e6:,.0f} MB/s", remedy)
    return green(AREA, name, seen)


def machine_checks(folder: Path, ports: Sequence[int], *, has_run: bool) -> tuple[list[Check], float | None]:
    """Returns all looks at ports, disk, loopback and SLURM if it is here, and the rate of the disk as `check_disk`.

    Args:
        folder: folder where runs are written.
        has_run: True if a run is named, whose own check looks at the room.
    """
    disk, rate = check_disk(folder)
    room = [*([] if has_run else [check_room(folder)]), check_locks(folder), disk]
    slurm = [] if shutil.which("srun") is None else [check_slurm(has_pyxis())]
    return [check_port_range(port_range()), *map(check_port, ports), *room, check_loopback(), *slurm], rate


def existing(folder: Path) -> Path:
    """Returns the folder, or the nearest above it that exists: the folder of a run is made when the run starts."""
    return next(path for path in (folder, *folder.parents) if path.exists())


@contextlib.contextmanager
def _probe_file(folder: Path) -> Iterator[Path]:
    path = existing(folder) / f".moerl-doctor-{uuid.uuid4().hex}"
    with ending(lambda: discard(path)):
        path.touch(exist_ok=False)
        yield path


def _loopback_rate(num_bytes: int) -> float:
    """Returns bytes per second from one thread to another. Raises OSError."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname(), num_bytes))
        sender.start()
        try:
            server.settimeout(30.0)
            connection, _ = server.accept()
            with connection:
                connection.settimeout(60.0)
                began, got = time.perf_counter(), 0
                while data := connection.recv(MIB):
                    got += len(data)
        finally:
            sender.join()
    if got < num_bytes:
        raise ConnectionError(f"127.0.0.1 carried {got} of {num_bytes} bytes")
    return got / (time.perf_counter() - began)


def _send(address: tuple[str, int], num_bytes: int) -> None:
    with contextlib.suppress(OSError), socket.create_connection(address, 30.0) as connection:
        for start in range(0, num_bytes, len(_CHUNK)):
            connection.sendall(_CHUNK[: num_bytes - start])
