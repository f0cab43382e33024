"""Requests to SGLang servers: the handshake, the bodies of generations, and how long an answer to one can be.

Tokens go in and come out as ids; the server has no tokenizer. Every request carries its own seed, and a prefix-cache
key of the weights' version: entries of other weights are never hit. Legend: T = tokens asked for, R = rows of routing
asked for, L = MoE layers, K = experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moerl.contract.documents import check_document
from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import ModelSpec
from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.segments import first_row
from moerl.rollout.sglang.handshake import ServerFacts, check_model, check_options, check_patches, read_facts
from moerl.rollout.sglang.http import SGLangHttp
from moerl.rollout.sglang.patches import read_patches

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


async def server_facts(http: SGLangHttp, model: ModelFacts | None) -> ServerFacts:
    """Makes the handshake: returns what the server is, after checks against this version's patches and `model`, if it
    is given.

    Raises:
        EngineError: it cannot be reached, or something is missing; the message names it.
    """
    info = await http.get("/server_info")
    weights = await http.get("/model_info")
    facts = read_facts(info, str(weights.get("weight_version")))
    check_patches(facts, read_patches(facts.version).fingerprint)
    check_options(facts)
    if model is not None:
        check_model(facts, model.spec, model.moe_layers)
    return facts


def request_body(
    request: RolloutRequest, request_id: str, policy_version: int, sampled_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """Makes the JSON body of `/generate`, or one of those of `/generate_many`; the answer is msgpack.

    Args:
        sampled_ids: tokens of the response that are there already. The answer goes on behind them; draws depend on seed
            and position alone, and so come out as without the interruption.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens - len(sampled_ids),
        # The model's own end-of-sequence ids do not count, only those of the request.
        "ignore_eos": True,
        "stop_token_ids": list(request.stop_ids),
        "temperature": sampling.temperature,
        "sampling_seed": sampling.seed,
    }
    if not sampling.is_greedy:
        params |= {"top_p": sampling.top_p, "min_p": sampling.min_p, "top_k": sampling.effective_top_k or -1}
    return {
        "rid": request_id,
        "input_ids": [*request.prompt_ids, *sampled_ids],
        "sampling_params": params,
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": first_row(request, len(sampled_ids)),
        "return_sampling_mask": sampling.cuts,
        "compact_answer": True,
        "extra_key": f"weights-{policy_version}",
    }


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
