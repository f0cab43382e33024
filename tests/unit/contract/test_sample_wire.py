"""Training samples between trainer ranks."""

from typing import Any

import numpy as np
import pytest
from factories import SPEC, make_trajectory, same_trajectory

from moerl.contract import ContractError, TrainSample, decode_samples, decode_trajectories, encode_samples

RNG = np.random.default_rng(0)


def sample(**changes: Any) -> TrainSample:
    trajectory = make_trajectory(RNG)
    advantages = np.where(trajectory.sampled, RNG.normal(size=8), 0).astype(np.float32)
    return TrainSample(trajectory, changes.get("advantages", advantages))


def test_samples_come_back_bit_for_bit():
    sent = [sample(), sample()]
    back = decode_samples(encode_samples(sent), spec=SPEC)
    for a, b in zip(sent, back, strict=True):
        assert same_trajectory(a.trajectory, b.trajectory)
        assert a.advantages.tobytes() == b.advantages.tobytes()
        assert b.advantages.dtype == np.float32
    assert decode_samples(encode_samples([]), spec=SPEC) == []


@pytest.mark.parametrize(
    ("reason", "advantages"),
    [
        ("wrong_shape", np.zeros(7, np.float32)),
        ("wrong_shape", np.zeros(8, np.float64)),
        ("value_not_finite", np.full(8, np.nan, np.float32)),
        ("value_out_of_range", np.ones(8, np.float32)),
    ],
)
def test_bad_advantages_are_refused(reason: str, advantages: np.ndarray):
    with pytest.raises(ContractError, match=reason):
        encode_samples([sample(advantages=advantages)])


def test_samples_are_not_taken_for_trajectories():
    with pytest.raises(ContractError, match="frame_kind_wrong"):
        decode_trajectories(encode_samples([sample()]), spec=SPEC)
