"""Answers of a patched SGLang server, turned into the data contract's fields.

The compact field is described in `patches/sglang/*/0003-compact-answer.patch`: a zstd frame of a msgpack map.
Everything is bounded before it is decompressed, and every length is checked; what the values mean is judged by the
contract itself. Pure functions; numpy, msgspec and zstandard only. Legend: T = sampled tokens of one answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from moerl.contract.array_codec import read_array, read_expert_planes, read_kept_ids
from moerl.contract.documents import check_document
from moerl.contract.ports import RolloutRequest
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import FinishReason, ModelSpec
from moerl.errors import ContractError
from moerl.rollout.segments import Segment, first_row

SCHEMA = 1
"""Schema of the compact field that is read here; a server reports the one that it writes."""

_MAX_VALUES = 32
"""In the map of a compact field, keys counted; it has 17."""

_ROUNDING = 1e-6
"""Least amount by which a float32 log-prob may be too large."""

_RELATIVE_ROUNDING = 4 * np.finfo(np.float32).eps
"""The same, relative to the log-prob over the full vocabulary."""


class CompactAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """The msgpack map inside the compact field; arrays as little-endian bytes."""

    schema: int
    """Equal to `SCHEMA`."""
    output_ids: bytes
    """int32 [T], sampled tokens."""
    logprobs: bytes
    """float32 [T], nats, over the full vocabulary."""
    kept_logprobs: bytes
    """float32 [T], nats, over kept sets; read if sampling cuts."""
    kept_sizes: bytes
    """uint32 [T], sizes of kept sets; read if sampling cuts."""
    kept_ids: bytes
    """Kept sets one after the other, coded as for `read_kept_ids`; read if sampling cuts."""
    num_rows: int
    """Rows of routing in `expert_ids`."""
    expert_ids: bytes
    """uint8 or uint16 [L, num_rows, K]."""


class VersionSpan(msgspec.Struct):
    """A span of output tokens that the same weights sampled."""

    version: str
    """Label of the weights."""
    start: int
    """Index of the first token."""
    end: int
    """Index behind the last token."""


def decode_compact(field: object, max_bytes: int) -> CompactAnswer:
    """Opens the compact field, which should be bytes.

    Args:
        max_bytes: the most that it may take decompressed; `AnswerBounds.payload_bytes` of what was asked for.

    Raises:
        ContractError: `wrong_type`, `frame_corrupt`, `frame_too_large`, `message_malformed`, `duplicate_field`,
            `text_too_long` or `schema_version_unknown`.
    """
    if not isinstance(field, bytes):
        raise ContractError(Reason.WRONG_TYPE, field="compact_answer", seen=type(field).__name__, expected="bytes")
    try:
        header = zstandard.get_frame_parameters(field)
        if header.content_size > max_bytes:
            raise ContractError(
                Reason.FRAME_TOO_LARGE,
                field="compact_answer",
                seen=header.content_size,
                expected=f"at most {max_bytes} bytes",
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
    check_document(memoryview(payload), _MAX_VALUES)
    try:
        answer = msgspec.msgpack.decode(payload, type=CompactAnswer)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _malformed("compact_answer", error, "the fields of a compact answer") from error
    if answer.schema != SCHEMA:
        raise ContractError(
            Reason.SCHEMA_VERSION_UNKNOWN,
            field="compact_answer.schema",
            seen=answer.schema,
            expected=SCHEMA,
            remedy="install the server with this version of moerl: moerl sglang install",
        )
    return answer


def sampled_answer(meta: Mapping[str, Any], reason: FinishReason, max_bytes: int) -> CompactAnswer | None:
    """Opens the compact field of an answer that ended for `reason`; returns None if no token was sampled, as in a
    request that was aborted early. `max_bytes` and errors as of `decode_compact`."""
    if reason == FinishReason.ABORT and "compact_answer" not in meta:
        return None
    answer = decode_compact(meta.get("compact_answer"), max_bytes)
    return answer if num_sampled(answer) else None


def num_sampled(answer: CompactAnswer) -> int:
    """Returns T. An aborted request may have no token."""
    return len(answer.output_ids) // 4


def read_segment(
    request: RolloutRequest, answer: CompactAnswer, spans: Sequence[VersionSpan], num_before: int, spec: ModelSpec
) -> Segment:
    """Reads an answer with at least one sampled token that goes on behind `num_before` earlier ones.

    Raises:
        ContractError: lengths disagree, or versions are not whole numbers that cover the sampled tokens.
    """
    num_rows = len(request.prompt_ids) + num_before + num_sampled(answer) - 1 - first_row(request, num_before)
    if answer.num_rows != num_rows:
        raise ContractError(Reason.WRONG_SHAPE, field="expert_ids", seen=f"{answer.num_rows} rows", expected=num_rows)
    return read_all_rows(request, answer, spans, spec)


def read_all_rows(
    request: RolloutRequest, answer: CompactAnswer, spans: Sequence[VersionSpan], spec: ModelSpec
) -> Segment:
    """Reads an answer with at least one sampled token, with as many rows of routing as it has.

    Raises:
        ContractError: as `read_segment`, but for the number of rows.
    """
    count = num_sampled(answer)
    rollout_T, logmass_T = _logprobs(request, answer, count)
    sizes_T, kept_ids = _kept_sets(request, answer, count)
    shape = (answer.num_rows, spec.num_moe_layers, spec.experts_per_token)
    return Segment(
        read_array(answer.output_ids, np.int32, count, "output_ids"),
        rollout_T,
        logmass_T,
        _versions(spans, count),
        sizes_T,
        kept_ids,
        read_expert_planes(answer.expert_ids, shape, spec.expert_dtype),
    )


def finish_reason(meta: Mapping[str, Any]) -> FinishReason:
    """Returns what ended an answer.

    Raises:
        ContractError: the server named no reason that the contract knows.
    """
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind not in ("stop", "length", "abort"):
        raise _malformed("finish_reason", reason, "type stop, length or abort")
    return FinishReason(kind)


def cached_tokens(meta: Mapping[str, Any], num_sent: int) -> int:
    """Returns how many of the tokens that were sent the server had in its prefix cache.

    Raises:
        ContractError: it does not say, or says what cannot be.
    """
    count = meta.get("cached_tokens")
    if type(count) is not int or not 0 <= count <= num_sent:
        raise _malformed("cached_tokens", count, f"a whole number from 0 to {num_sent}, the tokens that were sent")
    return count


def version_spans(meta: Mapping[str, Any]) -> list[VersionSpan]:
    """Reads the weight versions of an answer.

    Raises:
        ContractError: they are missing or of another shape.
    """
    try:
        return msgspec.convert(meta.get("weight_versions"), list[VersionSpan])
    except msgspec.ValidationError as error:
        raise _malformed("weight_versions", error, "a list of spans") from error


def _logprobs(
    request: RolloutRequest, answer: CompactAnswer, count: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns rollout_logprobs and kept_logmass of the sampled tokens."""
    full = read_array(answer.logprobs, np.float32, count, "logprobs")
    if not request.sampling.cuts:
        return _clamp_rounding(full, full), np.zeros(count, np.float32)
    kept = read_array(answer.kept_logprobs, np.float32, count, "kept_logprobs")
    if request.sampling.is_greedy:
        return kept, np.zeros(count, np.float32)
    return _clamp_rounding(kept, full), _clamp_rounding(full - kept, full)


def _kept_sets(
    request: RolloutRequest, answer: CompactAnswer, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Returns sizes of the sampled tokens' kept sets, and their ids."""
    if not request.sampling.cuts:
        return np.zeros(count, np.int64), np.zeros(0, np.int32)
    sizes_T = read_array(answer.kept_sizes, np.uint32, count, "kept_sizes").astype(np.int64)
    offsets_T = np.zeros(count + 1, np.int64)
    np.cumsum(sizes_T, out=offsets_T[1:])
    return sizes_T, read_kept_ids(answer.kept_ids, offsets_T)


def _versions(spans: Sequence[VersionSpan], count: int) -> NDArray[np.int32]:
    versions = np.empty(count, np.int32)
    at = 0
    for span in spans:
        is_version = span.version.isdecimal() and len(span.version) < 10
        if span.start != at or not at < span.end <= count or not is_version:
            break
        versions[at : span.end] = int(span.version)
        at = span.end
    if at != count:
        seen = [(span.version, span.start, span.end) for span in spans]
        raise _malformed("weight_versions", seen, f"whole numbers over tokens [0, {count}) without gaps")
    return versions


def _clamp_rounding(logs: NDArray[np.float32], terms: NDArray[np.float32]) -> NDArray[np.float32]:
    """Replaces values above 0 by no more than the rounding of numbers of the size of `terms` by 0; larger ones are left
    for the contract to refuse."""
    bounds = np.maximum(_ROUNDING, _RELATIVE_ROUNDING * np.abs(terms))
    return np.where((logs > 0) & (logs <= bounds), np.float32(0), logs)


def _malformed(field: str, seen: object, expected: str) -> ContractError:
    """Returns the error of a field of an answer that is not what SGLang writes."""
    return ContractError(Reason.MESSAGE_MALFORMED, field=field, seen=seen, expected=expected)
