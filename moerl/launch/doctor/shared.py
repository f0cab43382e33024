"""Check that several nodes see one folder, and how far their clocks are apart. Each node runs this; nobody leads.

A node keeps one file in ``FOLDER/.moerl-doctor/``: its name, its clock as it wrote, and what it heard of the others.
Hearing is: own clock, when a new file of another node was first seen, less the clock in it. That is the difference of
the clocks and the time the file took. With both directions, a_hears_b = a - b + delay and b_hears_a = b - a + delay',

    skew of b = b - a = (b_hears_a - a_hears_b) / 2,  uncertain by (b_hears_a + a_hears_b) / 2

as in NTP (RFC 5905, section 8). If a alone has heard b, a knows by how much b is ahead at least.
"""

from __future__ import annotations

import contextlib
import errno
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from moerl.contract.files import atomic_file
from moerl.launch.checks.outcome import Check, Level, green
from moerl.reading import read_file

AREA = "shared folder"
FOLDER = ".moerl-doctor"
POLL_SECONDS, WRITE_SECONDS = 0.1, 0.5
NOTE_SECONDS, FAULT_SECONDS = 2.0, 60.0
"""Skew of clocks from which it is worth a note (logs of nodes cannot be put in order), and from which it is a fault
(certificates and tokens are refused)."""
FORGOTTEN_SECONDS = 3600.0
"""Age at which a file of an earlier look is removed; by the file system's own times."""


class Probe(msgspec.Struct, forbid_unknown_fields=True):
    """Content of a node's file in the folder."""

    node: str
    """Name that no other node has."""
    host: str
    """Host name of the node."""
    look: str
    """Id of this start of the command."""
    clock: float
    """Seconds since 1970 by the node's own clock, when it wrote the file."""
    waits: bool
    """True if the node goes on until it has seen others."""
    heard: dict[str, float]
    """By `look` of other nodes: smallest (own clock - their `clock`) that this node saw, in seconds."""


@dataclass(slots=True)
class SeenNode:
    """Another node, as this node sees it."""

    probe: Probe
    """Content of its file when it was last read."""
    age_seconds: float
    """Time of our own file less that of its file, by the file system."""
    hears: float
    """Smallest (own clock - its clock as written), in seconds."""
    present: bool = False
    """True if its command runs at the same time as this one."""


@dataclass(slots=True)
class Exchange:
    """Result of a look over a shared folder."""

    me: Probe
    """Content of this node's own file."""
    nodes: int
    """Nodes that are expected, this one included."""
    seconds: float
    """Longest wait for other nodes."""
    others: dict[str, SeenNode] = field(default_factory=dict[str, SeenNode])
    """Other nodes whose files were read, by name; files of earlier looks included."""
    unreadable: set[str] = field(default_factory=set[str])
    """Names of files that hold no `Probe`."""

    @property
    def present(self) -> list[SeenNode]:
        """Other nodes that take part."""
        return [seen for seen in self.others.values() if seen.present]


def exchange(
    folder: Path, node: str, host: str, *, nodes: int, seconds: float, clock: Callable[[], float] = time.time
) -> Exchange:
    """Takes part in a look over a shared folder.

    Ends when `nodes` nodes are present and each has heard all others, or after `seconds`. With nodes=1 it writes its
    file, reads the others, and does not wait.

    Args:
        node: a name that no other node has.

    Raises:
        OSError: the folder cannot be written or read.
    """
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    done = Exchange(Probe(node, host, uuid.uuid4().hex, clock(), nodes > 1, {}), nodes, seconds)
    file = place / f"{uuid.uuid5(uuid.NAMESPACE_DNS, node).hex}.json"
    end, next_write, written = time.monotonic() + seconds, 0.0, 0.0
    while True:
        if time.monotonic() >= next_write:
            written = _write(file, done.me, clock)
            next_write = time.monotonic() + WRITE_SECONDS
        _read_others(place, written, done, clock)
        if _is_complete(done) or time.monotonic() >= end:
            # The others need to know that they were heard.
            written = _write(file, done.me, clock)
            for path in place.glob("*.json"):
                with contextlib.suppress(FileNotFoundError):
                    if written - path.stat().st_mtime > FORGOTTEN_SECONDS:
                        path.unlink()
            return done
        time.sleep(POLL_SECONDS)


def check_presence(done: Exchange) -> Check:
    """Checks that as many nodes as expected see the folder."""
    name = "nodes that see it"
    names = sorted([done.me.node, *(seen.probe.node for seen in done.present)])
    seen = f"{len(names)} of {max(done.nodes, len(names))}: {', '.join(names)}"
    old = [each for each in done.others.values() if not each.present]
    if old and len(names) < done.nodes:
        seen += "; of earlier looks: " + ", ".join(f"{e.probe.node} ({e.age_seconds:.0f} s ago)" for e in old)
    if done.unreadable:
        seen += f"; cannot be read: {', '.join(sorted(done.unreadable))}"
    if len(names) >= done.nodes:
        return green(AREA, name, seen)
    remedy = "look at the nodes that are not named: does the command run there, and is this the same file system?"
    return Check(AREA, name, "red", seen, f"{done.nodes} nodes within {done.seconds:g} s", remedy)


def check_clocks(done: Exchange) -> Check:
    """Compares the clocks of the other nodes with this one's."""
    skews = {seen.probe.node: skew_of(done.me, seen) for seen in done.others.values()}
    if not skews:
        return green(AREA, "clocks", "no other node to compare with")
    certain = {node: max(0.0, abs(skew) - uncertain) for node, (skew, uncertain) in skews.items()}
    largest = max(certain.values())
    texts = [
        f"{node} {skew:+.1f} s" + (f" (within {uncertain:.1f})" if uncertain else " at least")
        for node, (skew, uncertain) in sorted(skews.items())
        if uncertain or skew > 0.0
    ]
    seen = ", ".join(texts) or "no other node is ahead; it takes --nodes on each to know who is behind"
    level: Level = "red" if largest > FAULT_SECONDS else "yellow" if largest > NOTE_SECONDS else "green"
    if level == "green":
        return green(AREA, "clocks", seen)
    remedy = "start the time service (chrony, systemd-timesyncd) on the nodes that are named"
    return Check(AREA, "clocks", level, f"against {done.me.node}: {seen}", f"{NOTE_SECONDS:g} s apart at most", remedy)


def skew_of(me: Probe, seen: SeenNode) -> tuple[float, float]:
    """Returns the other node's clock less ours, and by how much that is uncertain, both in seconds. If the other node
    has not heard us, the first is a lower bound, 0 at least, and the second 0."""
    hears_me = seen.probe.heard.get(me.look)
    if hears_me is None:
        return max(0.0, -seen.hears), 0.0
    # Delays are never negative; their sum may come out so by the grain of the clocks.
    return (hears_me - seen.hears) / 2, max(1e-3, (hears_me + seen.hears) / 2)


def _read_others(place: Path, own_time: float, done: Exchange, clock: Callable[[], float]) -> None:
    """Reads the files of other nodes into `done`. own_time: time of our own file, by the file system."""
    done.unreadable.clear()
    for path in sorted(place.glob("*.json")):
        try:
            probe, written = msgspec.json.decode(read_file(path), type=Probe), path.stat().st_mtime
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            continue  # removed or replaced meanwhile; the latter as NFS says it
        except (ValueError, RecursionError):
            done.unreadable.add(path.name)
            continue
        if probe.node == done.me.node:
            continue
        _take_in(done, probe, clock() - probe.clock, own_time - written)


def _take_in(done: Exchange, probe: Probe, hears: float, age: float) -> None:
    before = done.others.get(probe.node)
    if before is None or before.probe.look != probe.look:
        # A node that waits writes again and again. One that came and went counts, if that was within our own wait.
        is_new = not probe.waits and abs(age) <= done.seconds
        done.others[probe.node] = SeenNode(probe, age, hears, present=is_new)
    elif before.probe.clock != probe.clock:
        before.probe, before.hears, before.age_seconds = probe, min(before.hears, hears), age
        before.present = True
    seen = done.others[probe.node]
    seen.present = seen.present or done.me.look in probe.heard
    if seen.present:
        done.me.heard[probe.look] = seen.hears


def _is_complete(done: Exchange) -> bool:
    """Returns True if enough nodes are present, and each that waits has heard as many, this one among them."""
    if done.nodes == 1:
        return True
    waiting = [seen.probe.heard for seen in done.present if seen.probe.waits]
    return len(done.present) + 1 >= done.nodes and all(
        done.me.look in heard and len(heard) + 1 >= done.nodes for heard in waiting
    )


def _write(file: Path, probe: Probe, clock: Callable[[], float]) -> float:
    """Writes our own file; returns its time, by the file system."""
    probe.clock = clock()
    with atomic_file(file) as temporary:
        temporary.write_bytes(msgspec.json.encode(probe))
        return temporary.stat().st_mtime


def node_name(host: str, named: str | None, task: str | None) -> str:
    """Returns the name of this node: as given, else its host, followed by the number of the launcher's task, if any."""
    return named or (f"{host}-{task}" if task else host)
