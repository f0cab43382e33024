from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, ModelSpec, SamplingParams
from moerl.errors import EngineError
from moerl.rollout.requests import check_requests

SPEC = ModelSpec(num_moe_layers=1, experts_per_token=1, num_experts=2, vocab_size=50)
GOOD = RolloutRequest(Lineage("r0", "p", "g"), (1, 2, 49), SamplingParams(), max_new_tokens=6, stop_ids=(0,))


def test_a_request_that_just_fits_is_accepted():
    check_requests([GOOD], SPEC, max_positions=8)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prompt_ids": ()}, "prompt_ids"),
        ({"prompt_ids": (1, 50)}, "token id 50"),
        ({"prompt_ids": (-1,)}, "token id -1"),
        ({"stop_ids": (50,)}, "stop_ids"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 7}, "3 \\+ 7 tokens"),
        ({"prompt_ids": (1,) * 9, "max_new_tokens": 1}, "9 \\+ 1 tokens"),
        ({"sampling": SamplingParams(temperature=-0.1)}, "temperature"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(top_p=0.0)}, "top_p"),
        ({"sampling": SamplingParams(min_p=1.0)}, "min_p"),
        ({"sampling": SamplingParams(top_k=0)}, "top_k"),
        ({"sampling": SamplingParams(top_k=4097)}, "top_k"),
        ({"sampling": SamplingParams(seed=2**63)}, "seed"),
        ({"known_rows": -1}, "known_rows"),
        ({"known_rows": 3}, "known_rows"),
    ],
    ids=str,
)
def test_what_cannot_be_sampled_is_refused_by_name(change: dict[str, Any], word: str):
    bad = replace(GOOD, lineage=Lineage("r1", "p", "g"), **change)
    with pytest.raises(EngineError, match=f"request 'r1'.*{word}"):
        check_requests([GOOD, bad], SPEC, max_positions=8)


def test_two_requests_with_one_rollout_id_are_refused():
    with pytest.raises(EngineError, match="'r0'"):
        check_requests([GOOD, GOOD], SPEC, max_positions=8)
