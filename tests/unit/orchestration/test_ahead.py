"""A batch that is packed ahead is used where it is the one, and only there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from factories import make_trajectory

from moerl.contract.trajectory import Trajectory
from moerl.errors import ReplayError, closing
from moerl.orchestration.ahead import Ahead


class Pack:
    """Remembers what it packed, and in which thread. refuses: this batch."""

    def __init__(self) -> None:
        self.packed: list[tuple[Sequence[Trajectory], str]] = []
        self.refuses: Sequence[Trajectory] = ()

    def __call__(self, batch: Sequence[Trajectory]) -> list[Any]:
        self.packed.append((batch, threading.current_thread().name))
        if batch is self.refuses:
            raise ReplayError("no routing")
        return ["minibatch of", batch]


def batch_of(size: int) -> list[Trajectory]:
    return [make_trajectory(np.random.default_rng(0)) for _ in range(size)]


def test_the_batch_that_was_packed_ahead_is_not_packed_again():
    pack, batch = Pack(), batch_of(3)
    with closing(Ahead(lambda _: batch, pack)) as ahead:
        ahead.begin(1)
        assert ahead.packed(list(batch)) == ["minibatch of", batch]
        assert [name for _, name in pack.packed] == ["pack-ahead_0"]
        # And only once.
        ahead.packed(batch)
    assert len(pack.packed) == 2


@pytest.mark.parametrize("other", [None, 2, 3], ids=["none", "shorter", "equal but not the same"])
def test_another_batch_than_the_one_packed_ahead_is_packed_now(other: int | None):
    pack, batch = Pack(), batch_of(3)
    upcoming = None if other is None else batch_of(other)
    with closing(Ahead(lambda _: upcoming, pack)) as ahead:
        ahead.begin(1)
        assert ahead.packed(batch) == ["minibatch of", batch]
    assert pack.packed[-1] == (batch, threading.current_thread().name)


def test_a_batch_that_cannot_be_packed_is_refused_when_it_is_trained_and_no_other_is():
    pack, batch, other = Pack(), batch_of(3), batch_of(3)
    pack.refuses = batch
    with closing(Ahead(lambda _: batch, pack)) as ahead:
        ahead.begin(1)
        assert ahead.packed(other) == ["minibatch of", other]
        ahead.begin(1)
        with pytest.raises(ReplayError, match="no routing"):
            ahead.packed(batch)
