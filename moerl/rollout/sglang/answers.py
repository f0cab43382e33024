"""Answers of a patched SGLang server, turned into the data contract's fields.

The compact field is described in `patches/sglang/*/0003-compact-answer.patch`: a zstd frame of a msgpack map.
Everything is bounded before it is decompressed, and every length is checked; what the values mean is judged by the
contract itself. Pure functions; numpy, msgspec and zstandard only. Legend: T = sampled tokens, P = prompt tokens,
S = P + T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from moerl.contract.planes import read_array, read_expert_planes, read_kept_ids
from moerl.contract.ports import RolloutRequest
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import FinishReason, KeptSets, ModelSpec, Turn, TurnKind
from moerl.errors import ContractError

SCHEMA = 1
"""Of the compact field; the server reports the one it writes."""

MAX_ANSWER_BYTES = 1 << 30
"""Largest compact field, decompressed."""

_ROUNDING = 1e-6


class CompactAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """The msgpack map inside the compact field; arrays as little-endian bytes."""

    schema: int
    output_ids: bytes
    logprobs: bytes
    kept_logprobs: bytes
    kept_sizes: bytes
    kept_ids: bytes
    num_rows: int
    expert_ids: bytes


class VersionSpan(msgspec.Struct):
    """Output tokens [start, end) were sampled by the weights labelled `version`."""

    version: str
    start: int
    end: int


def decode_compact(field: object) -> CompactAnswer:
    """Opens the compact field, which should be bytes.

    Raises:
        ContractError: `wrong_type`, `frame_corrupt`, `frame_too_large`, `message_malformed` or
            `schema_version_unknown`.
    """
    if not isinstance(field, bytes):
        raise ContractError(Reason.WRONG_TYPE, field="compact_answer", seen=type(field).__name__, expected="bytes")
    try:
        header = zstandard.get_frame_parameters(field)
        if header.content_size > MAX_ANSWER_BYTES:
            raise ContractError(
                Reason.FRAME_TOO_LARGE,
                field="compact_answer",
                seen=header.content_size,
                expected=f"at most {MAX_ANSWER_BYTES} bytes",
            )
        if not header.has_checksum:
            raise ContractError(
                Reason.FRAME_CORRUPT, field="compact_answer", seen="no checksum", expected="a content checksum"
            )
        payload = zstandard.ZstdDecompressor().decompress(
            field, max_output_size=header.content_size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ContractError(
            Reason.FRAME_CORRUPT, field="compact_answer", seen=error, expected="one whole zstd frame"
        ) from error
    try:
        answer = msgspec.msgpack.decode(payload, type=CompactAnswer)
    except msgspec.MsgspecError as error:
        raise ContractError(
            Reason.MESSAGE_MALFORMED, field="compact_answer", seen=error, expected="the fields of a compact answer"
        ) from error
    if answer.schema != SCHEMA:
        raise ContractError(
            Reason.SCHEMA_VERSION_UNKNOWN,
            field="compact_answer.schema",
            seen=answer.schema,
            expected=SCHEMA,
            remedy="install the server with this version of moerl: moerl sglang install",
        )
    return answer


def num_sampled(answer: CompactAnswer) -> int:
    """T. An aborted request may have none."""
    return len(answer.output_ids) // 4


def trajectory_values(
    request: RolloutRequest,
    answer: CompactAnswer,
    spans: Sequence[VersionSpan],
    reason: FinishReason,
    spec: ModelSpec,
) -> dict[str, Any]:
    """The `Trajectory` fields of an answer with at least one sampled token; `engine_id`, `attempt` and `timings` are
    the caller's.

    Raises:
        ContractError: lengths disagree, or versions are not whole numbers that cover the sampled tokens.
    """
    count, num_prompt = num_sampled(answer), len(request.prompt_ids)
    num_tokens = num_prompt + count
    sampled_ids = read_array(answer.output_ids, np.int32, count, "output_ids")
    rollout_T, logmass_T = _logprobs(request, answer, count)
    kept = _kept_sets(request, answer, num_prompt, count)
    return {
        "spec": spec,
        "lineage": request.lineage,
        "turns": (
            Turn(0, num_prompt, TurnKind.PROMPT),
            Turn(num_prompt, num_tokens, TurnKind.SAMPLED, request.sampling),
        ),
        "token_ids": np.concatenate([np.array(request.prompt_ids, np.int32), sampled_ids]),
        "sampled": np.arange(num_tokens) >= num_prompt,
        "rollout_logprobs": _behind_prompt(rollout_T, num_prompt, 0),
        "kept_logmass": _behind_prompt(logmass_T, num_prompt, 0),
        "policy_versions": _behind_prompt(_versions(spans, count), num_prompt, -1),
        "expert_ids": _expert_ids(answer, num_tokens - 1, spec),
        "routed": np.ones(num_tokens - 1, np.bool_),
        "kept": kept,
        "truncated": _behind_prompt(np.full(count, request.sampling.cuts), num_prompt, False),
        "finish_reason": reason,
    }


def finish_reason(meta: Mapping[str, Any]) -> FinishReason:
    """What ended the answer.

    Raises:
        ContractError: the server named no reason that the contract knows.
    """
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind not in ("stop", "length", "abort"):
        raise ContractError(
            Reason.MESSAGE_MALFORMED, field="finish_reason", seen=reason, expected="type stop, length or abort"
        )
    return FinishReason(kind)


def version_spans(meta: Mapping[str, Any]) -> list[VersionSpan]:
    """The answer's weight versions.

    Raises:
        ContractError: they are missing or of another shape.
    """
    try:
        return msgspec.convert(meta.get("weight_versions"), list[VersionSpan])
    except msgspec.ValidationError as error:
        raise ContractError(
            Reason.MESSAGE_MALFORMED, field="weight_versions", seen=error, expected="a list of spans"
        ) from error


def _logprobs(
    request: RolloutRequest, answer: CompactAnswer, count: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """rollout_logprobs and kept_logmass of the sampled tokens."""
    full = read_array(answer.logprobs, np.float32, count, "logprobs")
    if not request.sampling.cuts:
        return _clamp_rounding(full), np.zeros(count, np.float32)
    kept = read_array(answer.kept_logprobs, np.float32, count, "kept_logprobs")
    if request.sampling.is_greedy:
        return kept, np.zeros(count, np.float32)
    return _clamp_rounding(kept), _clamp_rounding(full - kept)


def _kept_sets(request: RolloutRequest, answer: CompactAnswer, num_prompt: int, count: int) -> KeptSets:
    if not request.sampling.cuts:
        return KeptSets.empty(num_prompt + count)
    sizes = read_array(answer.kept_sizes, np.uint32, count, "kept_sizes").astype(np.int64)
    offsets_T = np.zeros(count + 1, np.int64)
    np.cumsum(sizes, out=offsets_T[1:])
    ids = read_kept_ids(answer.kept_ids, offsets_T)
    return KeptSets(np.concatenate([np.zeros(num_prompt, np.int64), offsets_T]), ids)


def _expert_ids(answer: CompactAnswer, num_rows: int, spec: ModelSpec) -> NDArray[Any]:
    if answer.num_rows != num_rows:
        raise ContractError(Reason.WRONG_SHAPE, field="expert_ids", seen=f"{answer.num_rows} rows", expected=num_rows)
    shape = (num_rows, spec.num_moe_layers, spec.experts_per_token)
    return read_expert_planes(answer.expert_ids, shape, spec.expert_dtype)


def _versions(spans: Sequence[VersionSpan], count: int) -> NDArray[np.int32]:
    versions = np.empty(count, np.int32)
    at = 0
    for span in spans:
        if span.start != at or not at < span.end <= count or not span.version.isdecimal():
            break
        versions[at : span.end] = int(span.version)
        at = span.end
    if at != count:
        raise ContractError(
            Reason.MESSAGE_MALFORMED,
            field="weight_versions",
            seen=[(span.version, span.start, span.end) for span in spans],
            expected=f"whole numbers over tokens [0, {count}) without gaps",
        )
    return versions


def _behind_prompt(values: NDArray[Any], num_prompt: int, fill: Any) -> NDArray[Any]:
    return np.concatenate([np.full(num_prompt, fill, values.dtype), values])


def _clamp_rounding(logs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values within 1e-6 above 0 become 0; larger ones are left for the contract to refuse."""
    return np.where((logs > 0) & (logs <= _ROUNDING), np.float32(0), logs)
