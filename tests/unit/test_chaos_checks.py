"""The checks of the chaos campaign tell our faults from those of programs that print on the same output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from chaos_disturbances import shows_our_traceback
from waiting import run_within

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("program", "is_ours"),
    [
        ("from moerl.telemetry.metrics import check_metrics; check_metrics({'unknown': 1.0})", True),
        (
            "import asyncio; from moerl.telemetry.metrics import check_metrics\n"
            "async def main():\n"
            "    async with asyncio.TaskGroup() as group:\n"
            "        group.create_task(asyncio.to_thread(check_metrics, {'unknown': 1.0}))\n"
            "asyncio.run(main())",
            True,
        ),
        ("raise ValueError('of an agent')", False),
        ("import json; json.loads('{')", False),
    ],
)
def test_a_traceback_through_our_code_is_ours_and_one_of_another_program_is_not(program: str, is_ours: bool) -> None:
    ended = run_within([sys.executable, "-c", program], 60.0, cwd=ROOT, stderr=subprocess.PIPE)
    assert "Traceback" in ended.stderr
    assert shows_our_traceback(f"going on from step 1\n{ended.stderr}") is is_ours
