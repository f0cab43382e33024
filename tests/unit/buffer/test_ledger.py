"""The ledger: every rollout ends once, and the sums say so."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.buffer.ledger import Ledger
from moerl.errors import MoerlError


def test_every_rollout_ends_trained_filtered_or_quarantined_and_is_pending_until_then() -> None:
    ledger = Ledger()
    for number in range(3):
        ledger.issue(number, 4)
    ledger.quarantine(0, "routing_rows")
    ledger.train(0, 3)
    ledger.filter(1, "equal_rewards")
    ledger.check()
    assert (ledger.issued, ledger.trained, ledger.pending) == (12, 3, 4)
    assert (dict(ledger.filtered), dict(ledger.quarantined)) == ({"equal_rewards": 4}, {"routing_rows": 1})


@pytest.mark.parametrize("again", ["train", "filter", "quarantine", "issue"])
def test_nothing_ends_twice(again: str) -> None:
    ledger = Ledger()
    ledger.issue(0, 2)
    ledger.train(0, 2)
    arguments = {"train": (0, 2), "filter": (0, "x"), "quarantine": (0, "x"), "issue": (0, 2)}[again]
    with pytest.raises(MoerlError, match="ledger: group 0"):
        getattr(ledger, again)(*arguments)


def test_a_group_is_trained_with_all_that_is_left_of_it() -> None:
    ledger = Ledger()
    ledger.issue(0, 4)
    ledger.quarantine(0, "x")
    with pytest.raises(MoerlError, match="trained with other rollouts than it has left; seen: 4; expected: 3"):
        ledger.train(0, 4)


def test_a_ledger_whose_sums_are_not_right_is_refused() -> None:
    ledger = Ledger()
    ledger.issue(0, 2)
    snapshot = ledger.snapshot() | {"trained": 1}
    with pytest.raises(MoerlError, match="the sums are not right; seen: 1 ended and 2 pending; expected: 2 issued"):
        Ledger.restored(snapshot)


@given(st.lists(st.sampled_from(["issue", "train", "filter", "quarantine"]), max_size=40), st.data())
def test_sums_are_right_after_any_order_of_events_and_through_a_checkpoint(
    events: list[str], data: st.DataObject
) -> None:
    ledger, next_number = Ledger(), 0
    for event in events:
        pending = [number for number in range(next_number) if ledger.pending_of(number)]
        if event == "issue":
            ledger.issue(next_number, data.draw(st.integers(1, 8)))
            next_number += 1
        elif pending:
            number = data.draw(st.sampled_from(pending))
            if event == "train":
                ledger.train(number, ledger.pending_of(number))
            else:
                getattr(ledger, event)(number, data.draw(st.sampled_from("ab")))
        ledger.check()
    restored = Ledger.restored(json.loads(json.dumps(ledger.snapshot())))
    assert restored.snapshot() == ledger.snapshot()
