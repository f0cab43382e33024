"""A report of a long dump: time, memory and size of the page.

`python bench/diagnose.py [--json FILE]`. 500 rollouts of 4,000 tokens, 48 MoE layers, top-8 of 128 experts, both
policies with their routes, in the minimal schema; 2% of the sets differ. `moerl diagnose` without a model, in a
process of its own. The baseline is reading the dump alone.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _report import Result, command_line, json_argument, report

from moerl.contract.fields import KeptSets
from moerl.diagnostics.dumps.minimal import write_minimal
from moerl.diagnostics.dumps.opening import open_dumps
from moerl.diagnostics.dumps.rollout import DumpedRollout, turns_of

NUM_ROLLOUTS, NUM_TOKENS, LAYERS, EXPERTS, TOP_K = 500, 4000, 48, 128, 8
MAX_SECONDS, MAX_BYTES, MAX_PAGE = 180.0, 6e9, 5e6


def rollouts() -> Iterator[DumpedRollout]:
    """Half of each is the response."""
    rng = np.random.default_rng(0)
    drawn = rng.random((NUM_TOKENS - 1, LAYERS, EXPERTS), np.float32).argpartition(TOP_K, axis=2)[:, :, :TOP_K]
    for number in range(NUM_ROLLOUTS):
        recorded = (np.roll(drawn, number * 7, axis=0) + number) % EXPERTS
        own = recorded.copy()
        flips = rng.random(own.shape[:2]) < 0.02
        own[flips, 0] = recorded[flips].max(1) - 1  # maybe one that is there: then two experts are one
        sampled = np.arange(NUM_TOKENS) >= NUM_TOKENS // 2
        logprobs = np.where(sampled, -rng.exponential(0.5, NUM_TOKENS), 0.0).astype(np.float32)
        noise = np.where(sampled, rng.normal(0.0, 0.01, NUM_TOKENS), 0.0).astype(np.float32)
        yield DumpedRollout(
            name=f"r{number}",
            token_ids=rng.integers(0, 150_000, NUM_TOKENS, dtype=np.int32),
            sampled=sampled,
            rollout_logprobs=logprobs,
            temperatures=np.ones(NUM_TOKENS, np.float32),
            top_ps=np.ones(NUM_TOKENS, np.float32),
            policy_versions=np.where(sampled, number // 50, -1).astype(np.int32),
            turns=turns_of(sampled),
            expert_ids=recorded.astype(np.int32),
            routed=np.ones(NUM_TOKENS - 1, bool),
            kept=KeptSets.empty(NUM_TOKENS),
            trainer_logprobs={"trainer": logprobs + noise},
            trainer_expert_ids=own.astype(np.int32),
            engine=f"engine-{number % 8}",
            step=number // 50,
        )


def main() -> None:
    target = json_argument(__doc__)
    context = command_line()
    with tempfile.TemporaryDirectory() as folder:
        dump, page = Path(folder, "dump.parquet"), Path(folder, "report.html")
        write_minimal(dump, rollouts())
        start = time.perf_counter()
        num_read = sum(len(rollout) for opened in open_dumps([dump]) for rollout in opened.rollouts)
        reading = time.perf_counter() - start
        start = time.perf_counter()
        command = [sys.executable, "-m", "moerl", "diagnose", str(dump), "--output", str(page)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        size = page.stat().st_size
        results = [
            Result("tokens", float(num_read), unit="token"),
            Result("dump", dump.stat().st_size / 1e9, unit="GB"),
            Result("reading alone", reading, unit="s"),
            Result("moerl diagnose", seconds, f"<= {MAX_SECONDS:.0f}", seconds <= MAX_SECONDS, "s"),
            Result("over reading alone", seconds / reading, unit="x"),
            Result("peak memory", peak / 1e9, f"<= {MAX_BYTES / 1e9:.0f}", peak <= MAX_BYTES, "GB"),
            Result("page", size / 1e6, f"<= {MAX_PAGE / 1e6:.0f}", size <= MAX_PAGE, "MB"),
        ]
    report([*results, context], target)


if __name__ == "__main__":
    main()
