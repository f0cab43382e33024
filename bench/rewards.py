"""Rewards of a second each against what the size of their pool says: R responses of s seconds take W processes R s / W.

A step of 1,024 responses, all asked for at once. The first step also starts the processes; later ones only wait.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from _report import Result, command_line, json_argument, report

from moerl.contract.ports import Prompt
from moerl.tasks.rewards.pool import RewardPool
from moerl.tasks.rewards.process import RewardProcess

NUM_RESPONSES, SECONDS = 1_024, 1.0
WORKERS = (16, 64, 256)
MAX_OVER = 1.05
"""Most that a later step may take, over R s / W."""

_REWARD = f"import time\n\ndef slow(row, response):\n    time.sleep({SECONDS})\n    return float(len(response))\n"


def main() -> None:
    """Measures, prints and, with ``--json``, writes."""
    path = json_argument(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "slow_reward.py").write_text(_REWARD)
        sys.path.append(folder)
        results = [result for workers in WORKERS for result in _measure(workers)]
    report([command_line(), *results], path)


def _measure(workers: int) -> list[Result]:
    pool = RewardPool([RewardProcess("slow_reward:slow", 60.0, 2 << 30) for _ in range(workers)])
    try:
        first, _ = _step(pool)
        later, cpu = _step(pool)
    finally:
        pool.close()
    least = NUM_RESPONSES * SECONDS / workers
    return [
        Result(f"{workers} processes, first step over R s / W", first / least, unit="x"),
        Result(
            f"{workers} processes, later step over R s / W",
            later / least,
            f"<= {MAX_OVER}",
            later <= MAX_OVER * least,
            "x",
        ),
        Result(f"{workers} processes, first step over a later one", first - later, unit="s"),
        Result(f"{workers} processes, CPU of the controller for a response", cpu / NUM_RESPONSES * 1e3, unit="ms"),
    ]


def _step(pool: RewardPool) -> tuple[float, float]:
    """Wall and CPU seconds of the controller."""
    start, cpu = time.perf_counter(), time.process_time()
    futures = [pool.submit(Prompt("", "", {"row": row}), "x" * (row % 7)) for row in range(NUM_RESPONSES)]
    for row, future in enumerate(futures):
        assert future.result()["reward"] == row % 7, "each response has its own reward"
    return time.perf_counter() - start, time.process_time() - cpu


if __name__ == "__main__":
    main()
