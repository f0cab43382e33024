"""Checkpoint that an export takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.contract.sealed import describe
from moerl.errors import CheckpointError
from moerl.offline.export import _of_step
from moerl.trainer.checkpoint import CheckpointStore

FILE = "__0_0.distcp"


def write(run_dir: Path, *names: str) -> None:
    store = CheckpointStore(run_dir / "checkpoints", keep=9)
    for name in names:
        folder = store.begin(name)
        (folder / FILE).write_bytes(b"state")
        _, stage, step = name.split("-")
        store.commit(name, {"stage": stage, "step": int(step)}, describe(folder, [folder / FILE]))


def test_of_two_stages_with_one_step_reinforcement_learning_is_taken(tmp_path: Path) -> None:
    write(tmp_path, "0-sft-000040", "1-rl-000040", "1-rl-000060")
    assert _of_step(tmp_path, 40).name == "1-rl-000040"


def test_foreign_folders_do_not_disturb_the_choice(tmp_path: Path) -> None:
    write(tmp_path, "1-rl-000040")
    for name in ("best", "1-rl-40", "2-mine-40", "notes-40"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert _of_step(tmp_path, 40).name == "1-rl-000040"
    with pytest.raises(CheckpointError, match="--step 50; there are 1-rl-000040; "):
        _of_step(tmp_path, 50)
