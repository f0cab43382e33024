"""How long an answer can be, given what was asked for; and its documents, looked through before they are built.

Pure functions. Legend: T = tokens asked for, R = rows of routing asked for, L = MoE layers, K = experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from moerl.contract.documents import check_document
from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import ModelSpec
from moerl.rollout.segments import first_row

_PAYLOAD_HEAD_BYTES = 1 << 10
"""Names and lengths of the fields of a compact answer."""

_META_BYTES, _META_VALUES = 1 << 16, 1 << 8
"""Bytes and values of `meta_info` at most, without its spans of versions and its compact field."""

_SPAN_BYTES, _SPAN_VALUES = 64, 8
"""Bytes and values of one span of versions at most; there are T at most."""

_TOKEN_BYTES = 5
"""Bytes of one of the `output_ids`, which come next to the compact field, at most."""


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """Sizes of an answer, at most."""

    payload_bytes: int
    """Bytes of the compact field, decompressed."""
    response_bytes: int
    """Bytes of the whole answer."""
    meta_values: int
    """Values in `meta_info`, keys counted."""


class _Reply(msgspec.Struct):
    meta_info: msgspec.Raw


def answer_bounds(request: RolloutRequest, num_before: int, spec: ModelSpec) -> AnswerBounds:
    """Works out the bounds of an answer that goes on behind `num_before` sampled tokens.

    The payload holds T ids and log-probs of 4 bytes, R x L x K expert ids, and, if sampling cuts anything, T more
    log-probs, T sizes and as many kept ids as the sampler may keep.
    """
    num_tokens = request.max_new_tokens - num_before
    num_rows = len(request.prompt_ids) + request.max_new_tokens - 1 - first_row(request, num_before)
    payload = 8 * num_tokens + num_rows * spec.num_moe_layers * spec.experts_per_token * spec.expert_dtype.itemsize
    if request.sampling.cuts:
        kept = min(request.sampling.effective_top_k or spec.vocab_size, spec.vocab_size)
        payload += (8 + 4 * kept) * num_tokens
    payload += _PAYLOAD_HEAD_BYTES
    # What zstd cannot compress grows by 1/256 at most.
    field = payload + payload // 128 + _PAYLOAD_HEAD_BYTES
    response = field + _META_BYTES + (_SPAN_BYTES + _TOKEN_BYTES) * num_tokens
    return AnswerBounds(payload, response, _META_VALUES + _SPAN_VALUES * num_tokens)


def read_meta(content: bytes, bounds: AnswerBounds) -> dict[str, Any]:
    """Reads the `meta_info` of an answer in msgpack; nothing else of it is built.

    Raises:
        msgspec.MsgspecError: there is none.
        ContractError: as `check_document`.
    """
    raw = msgspec.msgpack.decode(content, type=_Reply).meta_info
    check_document(memoryview(raw), bounds.meta_values)
    return msgspec.msgpack.decode(raw, type=dict[str, Any])
