"""Records for a quarantine: ``from quarantine_records import gate, record``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from factories import make_trajectory, values_of

from moerl.contract.ports import RolloutRecord
from moerl.contract.quarantine import Quarantine

RNG = np.random.default_rng(2)


def record(rollout_id: str = "r0", **changes: Any) -> RolloutRecord:
    values = values_of(make_trajectory(RNG, rollout_id=rollout_id)) | changes
    return RolloutRecord(rollout_id, "engine-7", 3, values)


def broken(rollout_id: str = "r0") -> RolloutRecord:
    bad = record(rollout_id)
    bad.values["rollout_logprobs"][4] = np.nan
    return bad


def gate(folder: Path, *expected: str, max_rate: float = 1.0, **options: Any) -> Quarantine:
    quarantine = Quarantine(folder, max_rate, **options)
    quarantine.expect(expected)
    return quarantine


def only_entry(folder: Path) -> Path:
    (entry,) = folder.iterdir()
    return entry
