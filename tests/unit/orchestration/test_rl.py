"""Decisions of the RL loop."""

from __future__ import annotations

import pytest

from moerl.orchestration.rl import is_proved


@pytest.mark.parametrize(
    ("verify", "proved"),
    [("every", [1, 2, 3, 4, 5, 6]), ("off", []), (1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4])],
)
def test_updates_are_proved_every_time_every_nth_or_never(verify: str | int, proved: list[int]):
    assert [update for update in range(1, 7) if is_proved(verify, update)] == proved
