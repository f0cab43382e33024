"""Journals after crashes, full disks and lost power: exactly the groups that were written whole come back."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from disks import full_disk
from factories import SPEC
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import group, written

from moerl.buffer.journal import FinishedGroup, Journal
from moerl.errors import MoerlError


def small(number: int) -> FinishedGroup:
    return FinishedGroup(number, [], {f"rl/{number}/{i}": "no_answer" for i in range(number % 3 + 1)})


def read(folder: Path) -> list[int]:
    return sorted(Journal(folder, SPEC).read())


def resumed(folder: Path, *numbers: int, step: int = 0) -> Journal:
    """Opens a journal as a resumed run does, which reads first; then appends groups."""
    journal = Journal(folder, SPEC)
    journal.read()
    journal.begin(step)
    for number in numbers:
        journal.append(group(number))
    return journal


def tear(folder: Path, num_bytes: int, *, zeros: int = 0) -> None:
    """Cuts the end of the only segment off; zeros: NUL bytes in its place."""
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[: -num_bytes or None] + bytes(zeros))


@pytest.mark.parametrize("zeros", [0, 7, 5000])
def test_after_a_torn_end_the_second_and_the_third_resume_find_every_whole_group(tmp_path: Path, zeros: int) -> None:
    written(tmp_path, 0, 1).close()
    tear(tmp_path, 9, zeros=zeros)
    assert read(tmp_path) == [0]
    resumed(tmp_path, 2).close()
    assert read(tmp_path) == [0, 2]
    tear(tmp_path, 300, zeros=zeros)
    resumed(tmp_path, 3, 4).close()
    assert read(tmp_path) == [0, 3, 4]


def test_an_append_after_one_that_a_full_disk_broke_off_is_not_behind_its_torn_record(tmp_path: Path) -> None:
    journal = written(tmp_path, 0)
    (path,) = tmp_path.iterdir()
    with full_disk(path.stat().st_size + 100), pytest.raises(MoerlError, match=f"cannot write {path}"):
        journal.append(group(1))
    journal.append(group(2))
    assert read(tmp_path) == [0, 2]
    journal.close()
    assert read(tmp_path) == [0, 2]


def test_closing_writes_nothing_of_a_record_that_a_full_disk_broke_off(tmp_path: Path) -> None:
    journal = written(tmp_path, 0)
    (path,) = tmp_path.iterdir()
    size = path.stat().st_size
    with full_disk(size + 100), pytest.raises(MoerlError, match="cannot write"):
        journal.append(group(1))
    journal.close()
    assert path.stat().st_size == size + 100
    assert read(tmp_path) == [0]


@pytest.mark.parametrize(("torn", "times"), [(1, 1), (23, 1), (24, 2), (200, 2), (-3, 2), (-1, 1)])
def test_groups_that_an_older_version_wrote_behind_torn_records_come_back(
    tmp_path: Path, torn: int, times: int
) -> None:
    """Versions before this one did not cut the end back."""
    records: list[bytes] = []
    for number in range(3):
        written(tmp_path / str(number), number).close()
        (path,) = (tmp_path / str(number)).iterdir()
        records.append(path.read_bytes())
    folder = tmp_path / "journal"
    folder.mkdir()
    (folder / "000000.journal").write_bytes(records[0] + records[1][:torn] * times + records[2])
    assert read(folder) == [0, 2]
    resumed(folder, 3).close()
    assert read(folder) == [0, 2, 3]


def test_a_flipped_bit_before_the_end_is_damage_and_nothing_is_cut(tmp_path: Path) -> None:
    written(tmp_path, 0, 1).close()
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    for at in (0, 5, 30, len(data) // 4, len(data) // 2 + 40, len(data) - 40):
        flipped = bytes([*data[:at], data[at] ^ 1, *data[at + 1 :]])
        path.write_bytes(flipped)
        journal = Journal(tmp_path, SPEC)
        with pytest.raises(MoerlError, match="is damaged"):
            journal.read()
        journal.begin(0)
        with pytest.raises(MoerlError, match="is damaged"):
            journal.append(group(2))
        assert path.read_bytes() == flipped


def test_how_much_of_an_unfinished_record_was_left_out_can_be_told(tmp_path: Path) -> None:
    written(tmp_path, 0, 1).close()
    tear(tmp_path, 9)
    journal = Journal(tmp_path, SPEC)
    journal.read()
    assert journal.torn_bytes == (tmp_path / "000000.journal").stat().st_size - len(_of_one(tmp_path / "other"))


def _of_one(folder: Path) -> bytes:
    written(folder, 0).close()
    return (folder / "000000.journal").read_bytes()


def test_a_journal_that_cannot_be_cut_back_is_named_and_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 0, 1).close()
    tear(tmp_path, 9)
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    journal = resumed(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(MoerlError, match=f"cannot write {path}; seen: Read-only file system"):
        journal.append(group(2))
    journal.close()
    assert path.read_bytes() == before
    monkeypatch.undo()
    journal.append(group(2))
    assert read(tmp_path) == [0, 2]


def test_the_cut_is_on_the_disk_before_anything_is_written_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 0, 1).close()
    tear(tmp_path, 9)
    (path,) = tmp_path.iterdir()
    whole, synced = len(_of_one(tmp_path.with_name("other"))), list[int]()
    original = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(path.stat().st_size), original(handle))[1])
    resumed(tmp_path, 2).close()
    assert synced == [whole]


# --- any sequence of appends, tears and resumes ----------------------------------------------------------------------

APPEND = st.tuples(st.just("append"), st.just(0), st.just(0))
BROKEN_OFF = st.tuples(st.just("broken off"), st.integers(0, 60), st.just(0))
TEAR = st.tuples(st.just("tear"), st.integers(0, 400), st.sampled_from([0, 1, 30, 4096]))
RESUME = st.tuples(st.just("resume"), st.integers(0, 2), st.just(0))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(APPEND, APPEND, BROKEN_OFF, TEAR, RESUME), max_size=14))
def test_whatever_is_appended_torn_and_resumed_exactly_the_whole_groups_come_back(
    actions: list[tuple[str, int, int]],
) -> None:
    with TemporaryDirectory() as name:
        folder, number, step = Path(name), 0, 0
        whole: dict[Path, dict[int, bytes]] = {}
        journal = Journal(folder, SPEC)
        journal.begin(step)
        for what, amount, zeros in actions:
            path = folder / f"{step:06d}.journal"
            if what == "append":
                before = b"".join(whole.get(path, {}).values())
                journal.append(small(number))
                data = path.read_bytes()
                assert data.startswith(before)
                whole.setdefault(path, {})[number] = data[len(before) :]
                number += 1
            elif what == "broken off":
                size = sum(map(len, whole.get(path, {}).values()))
                with full_disk(size + amount), pytest.raises(MoerlError):
                    journal.append(small(number))
                number += 1
            else:
                journal.close()
                if what == "tear" and path.exists():
                    data = path.read_bytes()
                    data = data[: max(0, len(data) - amount)] + bytes(zeros)
                    path.write_bytes(data)
                    whole[path] = surviving(whole.get(path, {}), data)
                step = amount if what == "resume" else step
                journal = Journal(folder, SPEC)
                assert sorted(journal.read()) == sorted(n for each in whole.values() for n in each)
                journal.begin(step)
        journal.close()
        assert read(folder) == sorted(n for each in whole.values() for n in each)


def surviving(records: dict[int, bytes], data: bytes) -> dict[int, bytes]:
    """Returns the records that are whole in `data`, to which they were written one after the other."""
    kept, at = dict[int, bytes](), 0
    for number, record in records.items():
        if data[at : at + len(record)] == record:
            kept[number] = record
        at += len(record)
    return kept
