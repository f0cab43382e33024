"""Deadlines of tests count work: what a loaded machine takes longer for is no failure."""

from __future__ import annotations

import subprocess
import sys

import pytest
import waiting


@pytest.mark.parametrize(("share", "looks"), [(1.0, 5), (0.25, 20)])
def test_a_deadline_waits_longer_on_a_loaded_machine(share: float, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now, seen = 0.0, 0

    def condition() -> bool:
        nonlocal now, seen
        now, seen = now + 1.0, seen + 1
        return False

    monkeypatch.setattr(waiting, "share_of_a_core", lambda: share)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now)
    monkeypatch.setattr(waiting.time, "sleep", lambda seconds: None)
    with pytest.raises(AssertionError, match="gave up waiting"):
        waiting.eventually(condition, 5.0)
    assert seen == looks


def test_a_share_is_a_whole_core_or_less() -> None:
    assert 0.0 < waiting.share_of_a_core() <= 1.0


def test_a_command_is_run_to_its_end_or_killed() -> None:
    done = waiting.run(["sh", "-c", "sleep 0.3; echo said; echo warned >&2; exit 3"], 60.0)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said\n", "warned\n")
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.run([sys.executable, "-c", "import time; time.sleep(600)"], 0.1)
