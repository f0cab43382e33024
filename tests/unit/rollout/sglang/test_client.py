"""How long an answer may be: never shorter than what a server can need, in proportion to what was asked for."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from memory import traced
from sglang_fake import compact

from moerl.contract.array_codec import pack_kept_ids
from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import MAX_KEPT_IDS, Lineage, ModelSpec, SamplingParams
from moerl.errors import ContractError
from moerl.rollout.sglang.answers import decode_compact, first_row, read_segment, version_spans
from moerl.rollout.sglang.client import answer_bounds, read_meta

LARGE = ModelSpec(num_moe_layers=48, experts_per_token=8, num_experts=512, vocab_size=151_936)
SMALL = ModelSpec(num_moe_layers=1, experts_per_token=1, num_experts=2, vocab_size=50)
SAMPLINGS = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=20), SamplingParams(temperature=0.0)]


def request(sampling: SamplingParams, num_prompt: int, num_new: int) -> RolloutRequest:
    return RolloutRequest(Lineage("r", "p", "g"), (1,) * num_prompt, sampling, num_new)


def longest_answer(asked: RolloutRequest, num_before: int, spec: ModelSpec) -> dict[str, Any]:
    """Makes an answer of numbers that cannot be compressed, with a version for each token and full kept sets."""
    draws = np.random.default_rng(0)
    count = asked.max_new_tokens - num_before
    kept = min(asked.sampling.effective_top_k or 0, spec.vocab_size)
    rows = len(asked.prompt_ids) + asked.max_new_tokens - 1 - first_row(asked, num_before)
    shape = (spec.num_moe_layers, rows, spec.experts_per_token)
    ids = np.concatenate([np.sort(draws.choice(spec.vocab_size, kept, replace=False)) for _ in range(count)])
    cuts = asked.sampling.cuts
    fields = {
        "schema": 1,
        "output_ids": draws.integers(0, spec.vocab_size, count, np.int32).tobytes(),
        "logprobs": draws.random(count, np.float32).tobytes(),
        "kept_logprobs": draws.random(count if cuts else 0, np.float32).tobytes(),
        "kept_sizes": np.full(count if cuts else 0, kept, "<u4").tobytes(),
        "kept_ids": bytes(pack_kept_ids(np.arange(count + 1) * kept, ids.astype(np.int32))) if cuts else b"",
        "num_rows": rows,
        "expert_ids": draws.integers(0, spec.num_experts, shape, spec.expert_dtype).tobytes(),
    }
    spans = [{"version": str(999_999_999 - i), "start": i, "end": i + 1} for i in range(count)]
    meta = {
        "id": "0123456789abcdef-" + "r" * 4000,
        "finish_reason": {"type": "length", "length": count},
        "weight_versions": spans,
        "compact_answer": compact(fields),
        "prompt_tokens": 5,
        "e2e_latency": 0.5,
    }
    return {"output_ids": [151_935] * count, "meta_info": meta}


@pytest.mark.parametrize("spec", [LARGE, SMALL])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("num_prompt", "num_new", "num_before"), [(1, 1, 0), (300, 40, 0), (300, 40, 39), (7, 64, 20)])
def test_the_longest_answer_fits(
    spec: ModelSpec, sampling: SamplingParams, num_prompt: int, num_new: int, num_before: int
):
    asked = request(sampling, num_prompt, num_new)
    bounds = answer_bounds(asked, num_before, spec)
    content = msgspec.msgpack.encode(longest_answer(asked, num_before, spec))
    assert len(content) <= bounds.response_bytes
    meta = read_meta(content, bounds)
    answer = decode_compact(meta["compact_answer"], bounds.payload_bytes)
    assert len(read_segment(asked, answer, version_spans(meta), num_before, spec)) == num_new - num_before


def test_bounds_grow_with_what_is_asked_for_alone():
    one = answer_bounds(request(SamplingParams(), 1, 1), 0, SMALL)
    assert one.payload_bytes < 2_000
    assert one.response_bytes < 70_000
    many = answer_bounds(request(SamplingParams(top_p=0.9), 1, 1000), 0, LARGE)
    assert many.payload_bytes == 1024 + 1000 * (16 + 4 * MAX_KEPT_IDS + 48 * 8 * 2)
    assert (
        answer_bounds(request(SamplingParams(top_p=0.9), 1, 1000), 990, LARGE).payload_bytes < many.payload_bytes / 50
    )


@pytest.mark.parametrize("sampling", SAMPLINGS[:3])
def test_reading_the_longest_answer_takes_four_times_its_bound_at_most(sampling: SamplingParams):
    asked = request(sampling, 400, 400)
    bounds = answer_bounds(asked, 0, LARGE)
    content = msgspec.msgpack.encode(longest_answer(asked, 0, LARGE))
    with traced() as peak:
        meta = read_meta(content, bounds)
        answer = decode_compact(meta["compact_answer"], bounds.payload_bytes)
        read_segment(asked, answer, version_spans(meta), 0, LARGE)
    assert len(content) + peak() <= 4 * bounds.response_bytes


HOSTILE = {
    "lists": {"meta_info": {"id": "r", "weight_versions": [[]] * 1_000_000}},
    "names": {"meta_info": {str(i): None for i in range(300_000)}},
    "spans": {"meta_info": {"weight_versions": [{"version": "", "start": 0, "end": 0}] * 100_000}},
    "a long name": {"meta_info": {"id": "r" * 1_000_000}},
    "deep": {"meta_info": {"id": [[[[[[[[[[1]]]]]]]]]]}},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_documents_are_counted_before_they_are_built(kind: str):
    content = msgspec.msgpack.encode(HOSTILE[kind])
    with traced() as peak, pytest.raises(ContractError):
        read_meta(content, answer_bounds(request(SamplingParams(), 1, 1), 0, SMALL))
    assert peak() < 1 << 20


def test_what_stands_beside_the_answer_is_not_built():
    content = msgspec.msgpack.encode({"output_ids": [[]] * 1_000_000, "meta_info": {"id": "r"}})
    with traced() as peak:
        assert read_meta(content, answer_bounds(request(SamplingParams(), 1, 1), 0, SMALL)) == {"id": "r"}
    assert peak() < 1 << 20


def test_a_name_that_stands_twice_is_refused():
    pair = msgspec.msgpack.encode("id") + msgspec.msgpack.encode("r")
    content = b"\x81" + msgspec.msgpack.encode("meta_info") + b"\x82" + 2 * pair
    with pytest.raises(ContractError, match="duplicate_field"):
        read_meta(content, answer_bounds(request(SamplingParams(), 1, 1), 0, SMALL))
