"""The wire codec: trajectories as one frame of msgpack, from an engine's process to the controller, and in the journal.

Decoding is strict: unknown, missing and repeated fields, too many values, wrong types, wrong lengths, another model or
fingerprint and anything the invariants refuse raise `ContractError`. Typed structs and `moerl.contract.documents` bound
depth and number of values; no pickle. Framing, sizes and checksums are `moerl.contract.frame`, array layouts
`moerl.contract.array_codec`. A payload is

    document bytes u64 | document (msgpack) | expert ids of each trajectory in order, [L, S-1, K]
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import asdict

from moerl.contract.array_codec import (
    array_bytes,
    expert_planes,
    pack_flags,
    pack_kept_ids,
    pack_runs,
    read_array,
    read_expert_planes,
    read_flags,
    read_kept_ids,
    read_runs,
    require_length,
)
from moerl.contract.documents import check_document
from moerl.contract.frame import DEFAULT_LIMITS, FrameKind, WireLimits, pack_frame, unpack_frame
from moerl.contract.ports import RolloutRecord
from moerl.contract.reasons import Reason
from moerl.contract.requirements import require
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


class WireStruct(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of everything on the wire: every field is required, no other is allowed."""


class SpecMessage(WireStruct):
    """Mirrors `ModelSpec`."""

    num_moe_layers: int
    """L."""
    experts_per_token: int
    """K."""
    num_experts: int
    """E."""
    vocab_size: int
    """V."""
    fingerprint: str
    """Hexadecimal, or empty."""


class LineageMessage(WireStruct):
    """Mirrors `Lineage`."""

    rollout_id: str
    """Not empty."""
    prompt_id: str
    """Not empty."""
    group_id: str
    """Not empty."""
    episode_id: str
    """May be empty."""
    agent_id: str
    """May be empty."""
    parent_rollout_id: str
    """Empty if `fork_at` is -1."""
    fork_at: int
    """-1 for no fork."""


class SamplingMessage(WireStruct):
    """Mirrors `SamplingParams`."""

    temperature: float
    """0 means greedy."""
    top_p: float
    """In (0, 1]."""
    top_k: int | None
    """None for no limit of its own."""
    min_p: float
    """In [0, 1)."""
    seed: int
    """int64."""


class TurnMessage(WireStruct):
    """Mirrors `Turn`."""

    start: int
    """First token."""
    end: int
    """Token behind the last."""
    kind: TurnKind
    """By its value, a text."""
    sampling: SamplingMessage | None
    """None for all other kinds than sampled."""


class TrajectoryMessage(WireStruct):
    """Mirrors `Trajectory`; arrays are raw bytes, whose lengths follow from `num_tokens` and the spec."""

    lineage: LineageMessage
    """Ids."""
    turns: list[TurnMessage]
    """At most S."""
    num_tokens: int
    """S."""
    token_ids: memoryview
    """int32 [S]."""
    sampled: memoryview
    """Bits [S]."""
    rollout_logprobs: memoryview
    """float32 [S]."""
    kept_logmass: memoryview
    """float32 [S]."""
    version_values: memoryview
    """int32 [runs] of `policy_versions`."""
    version_lengths: memoryview
    """uint32 [runs] of `policy_versions`."""
    routed: memoryview
    """Bits [S-1]."""
    kept_sizes: memoryview
    """uint16 [S]."""
    kept_ids: memoryview
    """Byte planes of differences."""
    truncated: memoryview
    """Bits [S]."""
    finish_reason: FinishReason
    """By its value, a text."""
    rewards: dict[str, float]
    """By name."""
    scores: dict[str, memoryview]
    """float32 [S] by name."""
    engine_id: str
    """Engine or server."""
    attempt: int
    """From 0."""
    timings: dict[str, float]
    """Seconds by stage."""


class TrajectoriesMessage(WireStruct):
    """The payload of a frame of trajectories."""

    spec: SpecMessage | None
    """Model of all trajectories; None only in a frame without any."""
    trajectories: list[TrajectoryMessage]
    """In the order of their expert ids."""


_DOCUMENT_BYTES = struct.Struct("<Q")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TrajectoriesMessage)


def encode_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """Returns one frame with all trajectories, in order.

    Raises:
        ContractError: `spec_mismatch`, the trajectories are not all of one model.
    """
    spec = trajectories[0].spec if trajectories else None
    for trajectory in trajectories:
        require(trajectory.spec == spec, Reason.SPEC_MISMATCH, "spec", trajectory.spec, spec)
    message = TrajectoriesMessage(
        spec=SpecMessage(**dataclasses.asdict(spec)) if spec else None,
        trajectories=[_message(trajectory) for trajectory in trajectories],
    )
    return seal(message, [trajectory.expert_ids for trajectory in trajectories], FrameKind.TRAJECTORIES)


def seal(message: WireStruct, expert_ids: Sequence[np.ndarray], kind: FrameKind) -> bytes:
    """Returns a frame of a document and the expert ids that belong to it."""
    document = _encoder.encode(message)
    payload_bytes = _DOCUMENT_BYTES.size + len(document) + sum(ids.nbytes for ids in expert_ids)

    def parts() -> Iterator[bytes | memoryview]:
        yield _DOCUMENT_BYTES.pack(len(document))
        yield document
        for ids in expert_ids:
            yield from expert_planes(ids)

    return pack_frame(parts(), payload_bytes, kind)


def decode_trajectories(frame: bytes, *, spec: ModelSpec, limits: WireLimits = DEFAULT_LIMITS) -> list[Trajectory]:
    """Returns the trajectories of a frame, checked.

    Args:
        frame: What `encode_trajectories` returned on the other side.
        spec: The receiver's model; anything else is refused. limits: The most to accept.

    Raises:
        ContractError: With the reason code of the first thing found wrong.
    """
    return [Trajectory(**record.values) for record in decode_records(frame, spec=spec, limits=limits)]


def decode_records(frame: bytes, *, spec: ModelSpec, limits: WireLimits = DEFAULT_LIMITS) -> list[RolloutRecord]:
    """Does the same as `decode_trajectories`, but leaves the invariants to `Quarantine.admit`, record by record."""
    message, rest = open_sealed(unpack_frame(frame, FrameKind.TRAJECTORIES, limits), _decoder, limits)
    if message.trajectories:
        if message.spec is None:
            raise ContractError(Reason.SPEC_MISMATCH, field="spec", seen="none", expected=spec)
        check_spec_agrees(ModelSpec(**asdict(message.spec)), spec)
    records: list[RolloutRecord] = []
    for item in message.trajectories:
        values = _values(item, rest, spec)
        rest = rest[values["expert_ids"].nbytes :]
        version = int(values["policy_versions"].max())
        records.append(RolloutRecord(item.lineage.rollout_id, item.engine_id, version, values))
    require_length(rest, 0, "expert_ids beyond the last trajectory")
    return records


def open_sealed[Message](
    payload: bytes, decoder: msgspec.msgpack.Decoder[Message], limits: WireLimits
) -> tuple[Message, memoryview]:
    """Returns the typed document of a payload and the bytes behind it.

    Raises:
        ContractError: `message_malformed`, `frame_too_large`, `text_too_long` or `duplicate_field`.
    """
    view = memoryview(payload)
    start = _DOCUMENT_BYTES.size
    end = start + (_DOCUMENT_BYTES.unpack_from(view)[0] if len(view) >= start else len(view))
    is_there = end <= len(view)
    require(is_there, Reason.MESSAGE_MALFORMED, "payload", f"{len(view)} bytes", f"{end} bytes or more")
    check_document(view[start:end], limits.max_values)
    try:
        return decoder.decode(view[start:end]), view[end:]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ContractError(
            Reason.MESSAGE_MALFORMED, field="payload", seen=error, expected="the message of this schema version"
        ) from error


def check_spec_agrees(seen: ModelSpec, expected: ModelSpec) -> None:
    """Raises `spec_mismatch` or `fingerprint_mismatch` if two sides do not have the same model."""
    remedy = "serve the model that is trained; both sides derive the spec from the model's config and tokenizer"
    has_sizes = dataclasses.replace(seen, fingerprint=expected.fingerprint) == expected
    require(has_sizes, Reason.SPEC_MISMATCH, "spec", seen, expected, remedy=remedy)
    prints = repr(seen.fingerprint), repr(expected.fingerprint)
    require(prints[0] == prints[1], Reason.FINGERPRINT_MISMATCH, "spec.fingerprint", *prints, remedy=remedy)


def _message(trajectory: Trajectory) -> TrajectoryMessage:
    """Returns a checked trajectory as its message."""
    version_values, version_lengths = pack_runs(trajectory.policy_versions)
    kept = trajectory.kept
    return TrajectoryMessage(
        lineage=LineageMessage(**dataclasses.asdict(trajectory.lineage)),
        turns=[_turn_message(turn) for turn in trajectory.turns],
        num_tokens=len(trajectory),
        token_ids=array_bytes(trajectory.token_ids),
        sampled=pack_flags(trajectory.sampled),
        rollout_logprobs=array_bytes(trajectory.rollout_logprobs),
        kept_logmass=array_bytes(trajectory.kept_logmass),
        version_values=version_values,
        version_lengths=version_lengths,
        routed=pack_flags(trajectory.routed),
        kept_sizes=array_bytes(kept.sizes.astype(np.uint16)),
        kept_ids=pack_kept_ids(kept.offsets, kept.ids),
        truncated=pack_flags(trajectory.truncated),
        finish_reason=trajectory.finish_reason,
        rewards={name: float(value) for name, value in trajectory.rewards.items()},
        scores={name: array_bytes(score) for name, score in trajectory.scores.items()},
        engine_id=trajectory.engine_id,
        attempt=trajectory.attempt,
        timings={name: float(value) for name, value in trajectory.timings.items()},
    )


def _turn_message(turn: Turn) -> TurnMessage:
    # int() and float(): a numpy scalar passes the invariants but is no msgpack type.
    sampling = turn.sampling and SamplingMessage(
        temperature=float(turn.sampling.temperature),
        top_p=float(turn.sampling.top_p),
        top_k=None if turn.sampling.top_k is None else int(turn.sampling.top_k),
        min_p=float(turn.sampling.min_p),
        seed=int(turn.sampling.seed),
    )
    return TurnMessage(start=int(turn.start), end=int(turn.end), kind=turn.kind, sampling=sampling)


def _values(message: TrajectoryMessage, expert_bytes: memoryview, spec: ModelSpec) -> dict[str, Any]:
    """Returns `Trajectory` field values by name, from a message whose array lengths all agree; does not check content.

    Args:
        expert_bytes: begin with the expert ids of this trajectory.

    Raises:
        ContractError: `array_length_wrong`, `turns_do_not_cover` (more turns than tokens) or `too_short`.
    """
    num_tokens, num_turns = message.num_tokens, len(message.turns)
    require(num_tokens >= 2, Reason.TOO_SHORT, "num_tokens", num_tokens, "at least 2")
    few, most = num_turns <= num_tokens, f"at most {num_tokens}, one for each token"
    require(few, Reason.TURNS_DO_NOT_COVER, "turns", f"{num_turns} turns", most)
    # First of all: its length proves `num_tokens`, on which everything below spends memory.
    token_ids = read_array(message.token_ids, np.int32, num_tokens, "token_ids")
    sizes = read_array(message.kept_sizes, np.uint16, num_tokens, "kept_sizes")
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    shape = (num_tokens - 1, spec.num_moe_layers, spec.experts_per_token)
    num_bytes = math.prod(shape) * spec.expert_dtype.itemsize
    return {
        "spec": spec,
        "lineage": Lineage(**asdict(message.lineage)),
        "turns": tuple(
            Turn(each.start, each.end, each.kind, each.sampling and SamplingParams(**asdict(each.sampling)))
            for each in message.turns
        ),
        "token_ids": token_ids,
        "sampled": read_flags(message.sampled, num_tokens, "sampled"),
        "rollout_logprobs": read_array(message.rollout_logprobs, np.float32, num_tokens, "rollout_logprobs"),
        "kept_logmass": read_array(message.kept_logmass, np.float32, num_tokens, "kept_logmass"),
        "policy_versions": read_runs(message.version_values, message.version_lengths, num_tokens, "policy_versions"),
        "expert_ids": read_expert_planes(expert_bytes[:num_bytes], shape, spec.expert_dtype),
        "routed": read_flags(message.routed, num_tokens - 1, "routed"),
        "kept": KeptSets(offsets, read_kept_ids(message.kept_ids, offsets)),
        "truncated": read_flags(message.truncated, num_tokens, "truncated"),
        "finish_reason": message.finish_reason,
        "rewards": message.rewards,
        "scores": {
            name: read_array(data, np.float32, num_tokens, f"scores[{name!r}]") for name, data in message.scores.items()
        },
        "engine_id": message.engine_id,
        "attempt": message.attempt,
        "timings": message.timings,
    }
