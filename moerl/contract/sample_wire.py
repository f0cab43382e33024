"""Frames of training samples: what one trainer rank broadcasts to the others.

A frame of trajectories with an advantage per token; the same rules and limits as `moerl.contract.wire`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from moerl.contract.batch import TrainSample
from moerl.contract.frame import DEFAULT_LIMITS, FrameKind, WireLimits, unpack_frame
from moerl.contract.planes import array_bytes, read_array
from moerl.contract.reasons import Reason
from moerl.contract.supports import refuse_where
from moerl.contract.trajectory import ModelSpec, Trajectory
from moerl.contract.wire import (
    ExpertIds,
    SpecMessage,
    TrajectoryMessage,
    WireStruct,
    check_same_spec,
    common_spec,
    open_sealed,
    seal,
    to_message,
    to_values,
)
from moerl.errors import ContractError


class SampleMessage(WireStruct):
    """Mirrors `TrainSample`; advantages: float32 [S] as raw bytes."""

    trajectory: TrajectoryMessage
    advantages: memoryview


class SamplesMessage(WireStruct):
    """The payload of a frame of samples. `spec` is None only in a frame without any."""

    spec: SpecMessage | None
    samples: list[SampleMessage]


_decoder = msgspec.msgpack.Decoder(SamplesMessage)


def encode_samples(samples: Sequence[TrainSample]) -> bytes:
    """One frame holding all samples, in order.

    Raises:
        ContractError: The samples are not all of one model, or advantages have the wrong shape or are not finite.
    """
    messages = []
    for sample in samples:
        _check_advantages(sample)
        messages.append(
            SampleMessage(trajectory=to_message(sample.trajectory), advantages=array_bytes(sample.advantages))
        )
    trajectories = [sample.trajectory for sample in samples]
    message = SamplesMessage(spec=common_spec(trajectories), samples=messages)
    return seal(message, trajectories, FrameKind.SAMPLES)


def decode_samples(frame: bytes, *, spec: ModelSpec, limits: WireLimits = DEFAULT_LIMITS) -> list[TrainSample]:
    """The samples of a frame, checked.

    Raises:
        ContractError: With the reason code of the first thing found wrong.
    """
    message, expert_bytes = open_sealed(unpack_frame(frame, FrameKind.SAMPLES, limits), _decoder)
    if message.samples:
        check_same_spec(message.spec, spec)
    expert_ids = ExpertIds(expert_bytes, spec)
    samples = []
    for item in message.samples:
        trajectory = Trajectory(**to_values(item.trajectory, spec, expert_ids))
        advantages = read_array(item.advantages, np.float32, len(trajectory), "advantages")
        sample = TrainSample(trajectory, advantages)
        _check_advantages(sample)
        samples.append(sample)
    expert_ids.finish()
    return samples


def _check_advantages(sample: TrainSample) -> None:
    """float32 [S], finite, 0 where the policy did not sample."""
    advantages, sampled = sample.advantages, sample.trajectory.sampled
    if advantages.dtype != np.float32 or advantages.shape != sampled.shape:
        raise ContractError(
            Reason.WRONG_SHAPE,
            field="advantages",
            seen=f"{advantages.dtype} {advantages.shape}",
            expected=f"float32 {sampled.shape}",
        )
    refuse_where(
        ~np.isfinite(advantages),
        Reason.VALUE_NOT_FINITE,
        field="advantages",
        values=advantages,
        expected="finite",
    )
    refuse_where(
        ~sampled & (advantages != 0),
        Reason.VALUE_OUT_OF_RANGE,
        field="advantages",
        values=advantages,
        expected="0 where not sampled",
    )
