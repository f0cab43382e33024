"""Nine ways in, fuzzed with a fixed seed and a small budget; `python tests/fuzz_campaign.py` spends a large one."""

from pathlib import Path

import pytest
from fuzz_campaign import INPUTS, fuzz
from fuzz_targets import TARGETS, Outcome, Target


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_damage_is_accepted_no_error_escapes_and_memory_is_bounded(tmp_path: Path, target: Target):
    tally = fuzz(target, INPUTS[target.name] // 200, tmp_path)
    assert tally.escaped == []
    assert tally.outcomes[Outcome.CHANGED] == 0
    assert tally.outcomes[Outcome.REFUSED] > tally.inputs // 2
    assert tally.peak_over_limit <= 4


def test_every_target_has_a_budget():
    assert [target.name for target in TARGETS] == list(INPUTS)
    assert sum(INPUTS.values()) >= 600_000
