"""Dialects of SGLang servers, asked for what the contract needs: with our patches, and as upstream publishes it.

Torch-free; runs in the process of `moerl conformance`. Upstream's fields, as of 0.5.21: docs/conformance.md.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moerl.contract.reasons import Reason
from moerl.contract.trajectory import ModelSpec
from moerl.errors import ContractError
from moerl.rollout.conformance.subject import Answer, Ask
from moerl.rollout.sglang.answers import finish_reason, read_all_rows, sampled_answer, version_spans
from moerl.rollout.sglang.client import answer_bounds, read_meta, request_body
from moerl.rollout.sglang.http import decoded

_MAX_JSON_BYTES = 1 << 28
_UNKNOWN_VERSION = 0
"""Cache entries are kept apart by `Ask.cache_key`."""

_REPLY = msgspec.json.Decoder(dict[str, Any])


class PatchedDialect:
    """Servers with our patches: one binary field, with everything in it."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def body(self, ask: Ask, request_id: str) -> Mapping[str, Any]:
        return _patched_body(ask, request_id)

    def max_bytes(self, ask: Ask) -> int:
        return answer_bounds(ask.request(), 0, self._spec).response_bytes

    def read(self, ask: Ask, content: bytes) -> Answer | None:
        request = ask.request()
        bounds = answer_bounds(request, 0, self._spec)
        meta = decoded("/generate", content, lambda content: read_meta(content, bounds))
        reason = finish_reason(meta)
        compact = sampled_answer(meta, reason, bounds.payload_bytes)
        if compact is None:
            return None
        segment = read_all_rows(request, compact, version_spans(meta), self._spec)
        return Answer(
            token_ids=segment.token_ids,
            finish_reason=str(reason),
            expert_ids=segment.expert_ids,
            logprobs=segment.rollout_logprobs,
            kept_logmass=segment.kept_logmass,
            kept_sets=tuple(np.split(segment.kept_ids, np.cumsum(segment.kept_sizes)[:-1])),
            versions=segment.policy_versions,
            cached_tokens=_count(meta.get("cached_tokens")),
            retractions=_count(meta.get("num_retractions")),
        )


class UpstreamDialect:
    """Servers without our patches: fields of JSON, those that the server has.

    Args:
        num_layers: decoder layers, those with rows in `routed_experts`; dense layers are among them.
        takes_seeds: True for servers with `--enable-deterministic-inference`. A seed with min-p would end such a
            server, and is left out.
    """

    def __init__(self, spec: ModelSpec, num_layers: int, *, takes_seeds: bool) -> None:
        self._spec, self._num_layers, self._takes_seeds = spec, num_layers, takes_seeds

    def body(self, ask: Ask, request_id: str) -> Mapping[str, Any]:
        body = _patched_body(ask, request_id)
        del body["compact_answer"]
        params = body["sampling_params"]
        # Upstream leaves the request's own stop ids out, too, if it is to ignore those of the model.
        params["ignore_eos"] = not ask.stop_ids
        if not self._takes_seeds or ask.sampling.min_p:
            del params["sampling_seed"]
        return body

    def max_bytes(self, ask: Ask) -> int:
        return _MAX_JSON_BYTES

    def read(self, ask: Ask, content: bytes) -> Answer | None:
        reply = decoded("/generate", content, _REPLY.decode)
        meta = reply.get("meta_info")
        if not isinstance(meta, dict):
            raise _malformed("meta_info", meta)
        tokens, full = _tokens(reply, meta)
        if not len(tokens):
            return None
        reason = finish_reason(meta)
        kept, drawn = _kept(ask, meta, full)
        return Answer(
            token_ids=tokens,
            finish_reason=str(reason),
            expert_ids=self._rows(meta.get("routed_experts")),
            logprobs=drawn,
            kept_logmass=None if drawn is None or full is None else np.minimum(full - drawn, 0.0),
            kept_sets=kept,
            versions=_versions(meta, len(tokens)),
            cached_tokens=_count(meta.get("cached_tokens")),
            retractions=_count(meta.get("num_retractions")),
        )

    def _rows(self, field: object) -> NDArray[np.int32] | None:
        """Reads base64 of int32 [R, decoder layers, K]; returns None if there is none."""
        if field is None:
            return None
        try:
            ids = np.frombuffer(base64.b64decode(str(field), validate=True), np.dtype("<i4"))
            return ids.reshape(-1, self._num_layers, self._spec.experts_per_token)
        except ValueError as error:
            raise ContractError(
                Reason.WRONG_SHAPE,
                field="routed_experts",
                seen=str(error),
                expected=f"base64 of int32 [rows, {self._num_layers} layers, {self._spec.experts_per_token}]",
            ) from error


def _patched_body(ask: Ask, request_id: str) -> dict[str, Any]:
    """Returns the body of a request to a server with our patches."""
    body = request_body(ask.request(), request_id, _UNKNOWN_VERSION)
    return body | {"routed_experts_start_len": ask.first_row, "extra_key": ask.cache_key}


def _tokens(reply: Mapping[str, Any], meta: Mapping[str, Any]) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
    """Reads sampled tokens, and their log-probs after temperature and before any cut."""
    pairs, ids = meta.get("output_token_logprobs"), reply.get("output_ids")
    try:
        full = None if pairs is None else np.array([float(pair[0]) for pair in pairs])
        listed = ids if ids is not None else [pair[1] for pair in pairs or ()]
        return np.array(listed, np.int64), full
    except (TypeError, ValueError, IndexError) as error:
        raise _malformed("output_token_logprobs", error) from error


def _kept(
    ask: Ask, meta: Mapping[str, Any], full: NDArray[np.float64] | None
) -> tuple[tuple[NDArray[np.int64], ...] | None, NDArray[np.float64] | None]:
    """Reads kept sets as they came, and log-probs over them; None if the server has no such field."""
    if not ask.sampling.cuts:
        return (None if full is None else (np.zeros(0, np.int64),) * len(full)), full
    masks, logprobs = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    try:
        kept = None if masks is None else tuple(np.array(mask, np.int64) for mask in masks)
        return kept, None if logprobs is None else np.array(logprobs, np.float64)
    except (TypeError, ValueError) as error:
        raise _malformed("output_token_sampling_mask", error) from error


def _versions(meta: Mapping[str, Any], count: int) -> NDArray[np.int64] | None:
    """Returns the versions of the tokens; None if labels are not whole numbers, or are missing."""
    if meta.get("weight_versions") is None:
        return None
    spans = version_spans(meta)
    if not all(span.version.isdecimal() for span in spans):
        return None
    versions = [np.full(max(0, span.end - span.start), int(span.version)) for span in spans]
    return np.concatenate([*versions, np.zeros(0, np.int64)])[:count]


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _malformed(field: str, seen: object) -> ContractError:
    return ContractError(Reason.MESSAGE_MALFORMED, field=field, seen=repr(seen)[:200], expected="as SGLang writes it")
