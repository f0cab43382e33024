"""Several nodes and one folder: processes of this machine with names of their own, some with a wrong clock."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from moerl.launch.doctor.shared import (
    FOLDER,
    FORGOTTEN_SECONDS,
    Exchange,
    Probe,
    check_clocks,
    check_presence,
    exchange,
    node_name,
    skew_of,
)

LONG = 120.0
"""More than two threads need to see each other on a machine under load."""


def together(folder: Path, skews: dict[str, float], nodes: int | None = None) -> dict[str, Exchange]:
    """A look of several nodes at the same time, each with a clock that is wrong by so many seconds."""

    def node(name: str, skew: float) -> Exchange:
        count = nodes or len(skews)
        return exchange(folder, name, "host", nodes=count, seconds=LONG, clock=lambda: time.time() + skew)

    with ThreadPoolExecutor(len(skews)) as pool:
        started = {name: pool.submit(node, name, skew) for name, skew in skews.items()}
        return {name: each.result() for name, each in started.items()}


def plant(folder: Path, node: str, clock: float, *, waits: bool = False, age: float = 0.0) -> Path:
    """The file of a node that is gone."""
    path = folder / FOLDER / f"{node}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.encode(Probe(node, node, f"look of {node}", clock, waits, {})))
    written = time.time() - age
    os.utime(path, (written, written))
    return path


def test_nodes_that_start_together_see_each_other_and_agree_on_the_time(tmp_path: Path) -> None:
    for name, done in together(tmp_path, {"a": 0.0, "b": 0.0, "c": 0.0}).items():
        assert [check(done).level for check in (check_presence, check_clocks)] == ["green", "green"], name
        assert check_presence(done).seen == "3 of 3: a, b, c"


def test_a_clock_that_is_ahead_and_one_that_is_behind_are_named_by_every_node(tmp_path: Path) -> None:
    found = together(tmp_path, {"a": 0.0, "b": 600.0, "c": -900.0})
    for done in found.values():
        assert check_presence(done).level == "green"
        assert check_clocks(done).level == "red"
    skews = {name: skew_of(found["a"].me, seen) for name, seen in found["a"].others.items()}
    for name, skew in (("b", 600.0), ("c", -900.0)):
        seen, uncertain = skews[name]
        assert abs(seen - skew) <= uncertain + 0.1
        # Processes of one machine differ by what polling takes, also under load.
        assert uncertain < 60.0


def test_a_clock_a_little_ahead_is_a_note(tmp_path: Path) -> None:
    plant(tmp_path, "b", time.time() + 30.0)
    found = check_clocks(exchange(tmp_path, "a", "host", nodes=1, seconds=LONG))
    assert found.level == "yellow"
    assert "b +" in found.seen


def test_a_file_with_a_clock_far_ahead_is_named_in_one_look(tmp_path: Path) -> None:
    plant(tmp_path, "b", time.time() + 3600.0)
    found = check_clocks(exchange(tmp_path, "a", "host", nodes=1, seconds=LONG))
    assert found.level == "red"
    assert "at least" in found.seen
    assert "chrony" in found.remedy


def test_a_node_that_never_shows_up_is_missed(tmp_path: Path) -> None:
    plant(tmp_path, "b", time.time())
    done = exchange(tmp_path, "a", "host", nodes=3, seconds=1.0)
    found = check_presence(done)
    assert found.level == "red"
    assert found.seen == "2 of 3: a, b"
    assert found.expected == "3 nodes within 1 s"


def test_a_node_of_an_earlier_look_does_not_count(tmp_path: Path) -> None:
    plant(tmp_path, "old", time.time() - 300.0, age=300.0)
    plant(tmp_path, "killed", time.time(), waits=True)
    found = check_presence(exchange(tmp_path, "a", "host", nodes=3, seconds=1.0))
    assert found.level == "red"
    assert found.seen.startswith("1 of 3: a; of earlier looks: ")
    assert "killed" in found.seen
    assert "old (300 s ago)" in found.seen or "old (301 s ago)" in found.seen


def test_a_node_that_starts_late_is_waited_for(tmp_path: Path) -> None:
    found: list[Exchange] = []
    waiting = threading.Thread(
        target=lambda: found.append(exchange(tmp_path, "a", "host", nodes=2, seconds=LONG)), daemon=True
    )
    waiting.start()
    while not list(tmp_path.glob(f"{FOLDER}/*.json")):
        time.sleep(0.01)
    # One look, as by a node without --nodes.
    exchange(tmp_path, "b", "host", nodes=1, seconds=LONG)
    waiting.join(LONG)
    assert check_presence(found[0]).seen == "2 of 2: a, b"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "torn.json").write_text('{"node": "b"')
    found = check_presence(exchange(tmp_path, "a", "host", nodes=2, seconds=0.2))
    assert (found.level, "cannot be read: torn.json" in found.seen) == ("red", True)


def test_files_of_yesterday_are_removed(tmp_path: Path) -> None:
    old = plant(tmp_path, "old", time.time(), age=FORGOTTEN_SECONDS + 60.0)
    exchange(tmp_path, "a", "host", nodes=1, seconds=LONG)
    assert not old.exists()
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_a_node_writes_one_file_however_often_it_looks(tmp_path: Path) -> None:
    for _ in range(3):
        exchange(tmp_path, "a", "host", nodes=1, seconds=LONG)
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_tasks_of_one_host_have_names_of_their_own() -> None:
    assert node_name("n1", None, None) == "n1"
    assert node_name("n1", None, "3") == "n1-3"
    assert node_name("n1", "left", "3") == "left"
