"""The worked example of docs/data_contract.md, and what construction promises."""

import pickle
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from factories import SPEC, make_trajectory
from waiting import run_within

from moerl.contract.invariants import check_versions
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import (
    FinishReason,
    KeptSets,
    Lineage,
    ModelSpec,
    SamplingParams,
    Trajectory,
    Turn,
    TurnKind,
)
from moerl.errors import ContractError


def example() -> Trajectory:
    """S = 6, L = 1, K = 2: prompt 11 12; sampled 40 41 | weights updated | 42 EOS(2)."""
    sampling = SamplingParams(top_p=0.9, top_k=50)
    return Trajectory(
        spec=ModelSpec(num_moe_layers=1, experts_per_token=2, num_experts=8, vocab_size=100),
        lineage=Lineage("r0", "p0", "g0"),
        turns=(Turn(0, 2, TurnKind.PROMPT), Turn(2, 6, TurnKind.SAMPLED, sampling)),
        token_ids=np.array([11, 12, 40, 41, 42, 2], np.int32),
        sampled=np.array([False, False, True, True, True, True]),
        rollout_logprobs=np.array([0, 0, -0.9, -0.1, -1.2, 0], np.float32),
        kept_logmass=np.array([0, 0, -0.05, -0.02, -0.04, -0.30], np.float32),
        policy_versions=np.array([-1, -1, 7, 7, 8, 8], np.int32),
        expert_ids=np.array([[[0, 3]], [[1, 3]], [[0, 2]], [[5, 7]], [[2, 6]]], np.uint8),
        routed=np.ones(5, np.bool_),
        kept=KeptSets(np.array([0, 0, 0, 2, 4, 7, 8]), np.array([40, 77, 8, 41, 9, 42, 50, 2], np.int32)),
        truncated=np.array([False, False, True, True, True, True]),
        finish_reason=FinishReason.STOP,
    )


def test_the_worked_example_is_a_valid_trajectory():
    trajectory = example()
    assert len(trajectory) == 6
    assert trajectory.num_sampled == 4
    assert trajectory.kept.sizes.tolist() == [0, 0, 2, 2, 3, 1]
    assert trajectory.temperatures.tolist() == [1.0] * 6


def test_arrays_of_a_trajectory_are_read_only():
    trajectory = make_trajectory(np.random.default_rng(0), scores={"teacher": np.zeros(8, np.float32)})
    for array in (trajectory.token_ids, trajectory.kept.ids, trajectory.scores["teacher"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_rewards_are_attached_without_checking_the_rest_again(monkeypatch: pytest.MonkeyPatch):
    trajectory = make_trajectory(np.random.default_rng(0), timings={"sample": 1.0})
    monkeypatch.setattr("moerl.contract.trajectory.check_trajectory", lambda _: pytest.fail("checked again"))
    rewarded = trajectory.with_rewards({"reward": 0.5})
    assert (rewarded.rewards, trajectory.rewards) == ({"reward": 0.5}, {"reward": 1.0})
    for field in fields(trajectory):
        assert field.name == "rewards" or getattr(rewarded, field.name) is getattr(trajectory, field.name)


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ({"reward": float("nan")}, Reason.VALUE_NOT_FINITE),
        ({"reward": "1"}, Reason.WRONG_TYPE),
        ({1: 1.0}, Reason.WRONG_TYPE),
        ({f"r{i}": 1.0 for i in range(65)}, Reason.TOO_MANY_NAMES),
        ([("reward", 1.0)], Reason.WRONG_TYPE),
    ],
)
def test_rewards_that_break_the_contract_cannot_be_attached(rewards: Any, reason: Reason):
    with pytest.raises(ContractError) as caught:
        make_trajectory(np.random.default_rng(0)).with_rewards(rewards)
    assert caught.value.reason == reason


def test_weights_newer_than_the_trainers_are_refused():
    trajectory = example()
    check_versions(trajectory, trainer_version=8)
    with pytest.raises(ContractError) as caught:
        check_versions(trajectory, trainer_version=7)
    assert caught.value.reason == Reason.VERSION_FROM_THE_FUTURE
    assert "8 at index 4 (2 of 6 wrong)" in str(caught.value)


def test_a_contract_error_survives_pickling():
    with pytest.raises(ContractError) as caught:
        make_trajectory(np.random.default_rng(0), token_ids=np.full(8, SPEC.vocab_size, np.int32))
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert isinstance(copy, ContractError)
    assert (copy.reason, copy.field, str(copy)) == (caught.value.reason, caught.value.field, str(caught.value))


def test_the_contract_imports_without_torch_and_pyarrow():
    code = (
        "import sys, moerl.contract\n"
        "heavy = {'torch', 'pyarrow', 'ray', 'megatron', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import moerl.contract.disk\n"
        "assert 'torch' not in sys.modules\n"
    )
    run_within([sys.executable, "-c", code], 60).check_returncode()
