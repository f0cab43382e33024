"""Finished groups on disk: all come back, torn ends are left out, damage is named, and what is trained is forgotten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from factories import SPEC
from journals import group, written

from moerl.buffer.journal import FinishedGroup, Journal
from moerl.errors import MoerlError


def test_every_group_comes_back_as_it_was(tmp_path: Path) -> None:
    written(tmp_path, 4, 2).close()
    found = Journal(tmp_path, SPEC).read()
    assert list(found) == [4, 2]
    for number in found:
        assert found[number].refused == group(number).refused
        for back, sent in zip(found[number].trajectories, group(number).trajectories, strict=True):
            assert back.rewards == sent.rewards
            assert back.token_ids.tolist() == sent.token_ids.tolist()
            assert back.expert_ids.tolist() == sent.expert_ids.tolist()
            assert back.kept.ids.tolist() == sent.kept.ids.tolist()


def test_a_group_without_any_response_comes_back_too(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SPEC)
    journal.append(FinishedGroup(3, [], {"a": "x", "b": "y"}))
    journal.close()
    found = Journal(tmp_path, SPEC).read()[3]
    assert (list(found.trajectories), found.refused, found.newest_version) == ([], {"a": "x", "b": "y"}, -1)


def test_whatever_a_crash_tears_off_the_groups_before_it_are_there(tmp_path: Path) -> None:
    written(tmp_path, 0, 1).close()
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    first = len(data)
    while len(Journal(tmp_path, SPEC).read()) == 2:
        first -= 1
        path.write_bytes(data[:first])
    for length in [*range(0, first, 97), first]:
        path.write_bytes(data[:length])
        assert list(Journal(tmp_path, SPEC).read()) in ([], [0])


def test_any_damaged_byte_is_named(tmp_path: Path) -> None:
    written(tmp_path, 0, 1).close()
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in [*range(32), *rng.integers(0, len(data), 200).tolist()]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :])
        with pytest.raises(MoerlError, match="is damaged"):
            Journal(tmp_path, SPEC).read()


def test_segments_go_when_no_checkpoint_asks_for_their_groups(tmp_path: Path) -> None:
    journal = written(tmp_path, 0, 1)
    for step, numbers in ((1, (2, 3)), (2, (4, 5))):
        journal.begin(step)
        for number in numbers:
            journal.append(group(number))
    journal.forget(needed={3}, first_new=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001.journal", "000002.journal"]
    journal.begin(3)
    journal.forget(needed=set(), first_new=6)
    assert list(tmp_path.iterdir()) == []


def test_records_of_another_model_are_refused(tmp_path: Path) -> None:
    written(tmp_path, 0).close()
    with pytest.raises(MoerlError, match=r"journal .* is damaged; seen: .*spec_mismatch"):
        Journal(tmp_path, replace(SPEC, num_experts=SPEC.num_experts + 1)).read()
