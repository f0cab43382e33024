"""A damaged cold start: written again, done without, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moerl.contract.sealed import describe, seal
from moerl.errors import CheckpointError
from moerl.orchestration.sft import cold_start
from moerl.trainer.checkpoint import CheckpointStore


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run behind its cold start of 4 steps, whose directory is damaged."""
    folder = tmp_path / "cold_start"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    seal(folder)
    (folder / "model.safetensors").write_bytes(b"waights")
    said, rewritten = list[str](), list[tuple[Path, ...]]()
    return SimpleNamespace(
        config=SimpleNamespace(run_dir=tmp_path, sft=SimpleNamespace(steps=4)),
        has_done=lambda stage, step: (stage, step) == ("sft", 4),
        reporter=SimpleNamespace(notify=said.append),
        trainer=SimpleNamespace(rewrite=lambda *paths: rewritten.append(paths)),
        said=said,
        rewritten=rewritten,
    )


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> Callable[[], Path]:
    def write() -> Path:
        store = CheckpointStore(tmp_path / "checkpoints", keep=2)
        partial = store.begin("0-sft-000004")
        (partial / "state").write_bytes(b"state")
        return store.commit("0-sft-000004", {"stage": "sft", "step": 4}, describe(partial, [partial / "state"]))

    return write


INITIAL = Path("initial_model")


@pytest.mark.parametrize("for_its_weights", [True, False])
def test_it_is_written_again_while_its_checkpoint_is_there(
    for_its_weights: bool, run: Any, write_checkpoint: Callable[[], Path]
) -> None:
    checkpoint, folder = write_checkpoint(), run.config.run_dir / "cold_start"
    assert cold_start(run, INITIAL, for_its_weights=for_its_weights) == folder
    assert run.rewritten == [(INITIAL, checkpoint, folder)]


def test_a_run_that_has_newer_weights_goes_on_without_it_and_says_so_once(run: Any) -> None:
    assert cold_start(run, INITIAL, for_its_weights=False) == INITIAL
    assert run.rewritten == []
    (said,) = run.said
    assert said.startswith(f"WARNING: {run.config.run_dir / 'cold_start'}: model.safetensors does not match its hash")


def test_a_run_that_needs_its_weights_is_refused(run: Any) -> None:
    with pytest.raises(CheckpointError, match=r"is damaged and cannot be written again; seen: model\.safetensors does"):
        cold_start(run, INITIAL)
