"""Responses that a run stored, as people read them: texts and numbers, not the tensors. Torch-free; any process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moerl.contract.dump_columns import LINEAGE, SPANS, TEXTS
from moerl.contract.parquet import columns_of, read_batches

FOLDERS = ("rollouts", "evaluations")
"""Folders of a run directory that hold responses."""
REWARD = "reward_reward"
"""Column of the reward that was trained on."""
ENVIRONMENT = "timing_environment_seconds"
"""Column of the seconds that an episode spent in its environment."""
_READ_ROWS = 1000
_SHOWN = ("set", "prompt_id", "place", "sample", "finish_reason", "num_sampled", *TEXTS, SPANS, *LINEAGE, ENVIRONMENT)


def response_files(run_dir: Path) -> list[Path]:
    """Returns the Parquet files of dumped rollouts and of evaluations, those of the latest step last.

    Times decide among files of one step alone, because the files of a copied run directory have times of their own.
    """
    found = (path for folder in FOLDERS for path in (run_dir / folder).glob("*.parquet"))
    return sorted(found, key=lambda path: (_step(path), path.stat().st_mtime))


def _step(path: Path) -> int:
    """Returns the number in the name of a file (`step-000040`, `dev-000040`); 0 without one."""
    found = re.search(r"-(\d+)", path.stem)
    return int(found[1]) if found else 0


def read_responses(path: Path, by: str = REWARD) -> Iterator[dict[str, Any]]:
    """Yields responses with their texts, rewards and the column `by`.

    Raises:
        OSError, ValueError, pa.ArrowException: the file cannot be read.
    """
    wanted = [name for name in columns_of(path) if name in _SHOWN or name.startswith("reward_") or name == by]
    for batch in read_batches(path, rows=_READ_ROWS, columns=wanted):
        yield from batch.to_pylist()
