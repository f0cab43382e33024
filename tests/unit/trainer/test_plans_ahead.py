"""Plans of microbatches, which a thread makes beside a GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moerl.contract.trajectory import KeptSets
from moerl.errors import ContractError
from moerl.kernels import plan, products
from moerl.kernels.head import Head, HeadInputs, VocabShard
from moerl.kernels.plan import HostPlan
from moerl.trainer.losses import Scorer

NUM_ROWS, VOCAB = 3, 11


def batch(first_id: int) -> Any:
    """Every row lists its target and the id after it."""
    targets = first_id + np.arange(NUM_ROWS)
    sets = KeptSets(np.arange(NUM_ROWS + 1) * 2, np.stack([targets, targets + 1], 1).reshape(-1).astype(np.int32))
    return SimpleNamespace(
        target_ids=targets,
        temperatures=np.ones(NUM_ROWS, np.float32),
        loss_mask=np.ones(NUM_ROWS, np.bool_),
        kept=sets,
        truncated=np.ones(NUM_ROWS, np.bool_),
    )


def inputs() -> HeadInputs:
    head = Head(torch.zeros(VOCAB, 4), VocabShard.from_group(VOCAB, VOCAB, None))
    return head.enter(torch.zeros(NUM_ROWS, 4))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that planned, in order."""
    seen: list[str] = []
    check = plan._check_sets

    def spy(*sets: Any) -> None:
        seen.append(threading.current_thread().name)
        check(*sets)

    monkeypatch.setattr(plan, "_check_sets", spy)
    return seen


def test_beside_a_gpu_a_thread_plans_all_microbatches_once(threads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "on_device", lambda device: True)
    scorer = Scorer([batch(0), batch(3), batch(6)], keep_mask=True)
    for _ in range(2):
        ids = [scorer._plan(inputs(), index).kept.ids[0].item() for index in range(3)]
        assert ids == [0, 3, 6]
    assert len(threads) == 6
    assert all(name.startswith("plans") for name in threads)


def test_on_a_cpu_a_microbatch_is_planned_where_it_is_scored(threads: list[str]) -> None:
    scorer = Scorer([batch(0), batch(3)], keep_mask=True)
    assert scorer._plan(inputs(), 1).kept.ids[0].item() == 3
    assert threads == [threading.current_thread().name]


def test_a_set_without_its_target_is_refused_when_its_microbatch_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "on_device", lambda device: True)
    wrong = batch(3)
    wrong.target_ids = wrong.target_ids + 5
    scorer = Scorer([batch(0), wrong], keep_mask=True)
    assert isinstance(scorer._plan(inputs(), 0), plan.ScorePlan)
    with pytest.raises(ContractError, match="target_not_in_kept_set"):
        scorer._plan(inputs(), 1)
    assert HostPlan.of(scorer.rows(0), inputs()).pairs is None
