"""Answers of an SGLang server without our patches, as they are read."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moerl.contract.trajectory import ModelSpec, SamplingParams
from moerl.errors import ContractError
from moerl.rollout.conformance.dialects import UpstreamDialect
from moerl.rollout.conformance.subject import Answer, Ask
from moerl.rollout.fleet.backend import TransportError

SPEC = ModelSpec(num_moe_layers=2, experts_per_token=2, num_experts=8, vocab_size=50)
ASK = Ask((5, 6, 7), SamplingParams(top_k=4, seed=3), 2)
ROUTES = np.arange(4 * 2 * 2, dtype="<i4").reshape(4, 2, 2)


def dialect(**changes: Any) -> UpstreamDialect:
    return UpstreamDialect(SPEC, 2, **{"takes_seeds": True, **changes})


def read(ask: Ask = ASK, **meta: Any) -> Answer | None:
    fields: dict[str, Any] = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-2.0, 11, None], [-3.0, 12, None]],
        "output_token_sampling_logprobs": [-1.0, -1.5],
        "output_token_sampling_mask": [[12, 11], [12]],
        "routed_experts": base64.b64encode(ROUTES.tobytes()).decode(),
        "cached_tokens": 3,
        "num_retractions": 0,
        "weight_versions": [{"version": "4", "start": 0, "end": 2}],
    }
    known = {name: value for name, value in (fields | meta).items() if value is not None}
    return dialect().read(ask, json.dumps({"output_ids": [11, 12], "meta_info": known}).encode())


def test_fields_of_upstream_are_passed_on_as_they_came():
    answer = read()
    assert answer is not None
    assert answer.token_ids.tolist() == [11, 12]
    assert answer.expert_ids is not None
    assert answer.expert_ids.tolist() == ROUTES.tolist()
    assert answer.logprobs is not None
    assert answer.logprobs.tolist() == [-1.0, -1.5]
    assert answer.kept_logmass is not None
    assert answer.kept_logmass.tolist() == [-1.0, -1.5]
    assert [ids.tolist() for ids in answer.kept_sets or ()] == [[12, 11], [12]]
    assert answer.versions is not None
    assert answer.versions.tolist() == [4, 4]
    assert (answer.cached_tokens, answer.retractions) == (3, 0)


def test_what_a_server_does_not_say_is_none():
    names = ("routed_experts", "output_token_sampling_mask", "output_token_sampling_logprobs", "weight_versions")
    answer = read(**dict.fromkeys(names))
    assert answer is not None
    assert (answer.expert_ids, answer.kept_sets, answer.logprobs, answer.versions) == (None, None, None, None)


def test_where_nothing_is_cut_the_log_probs_are_those_of_the_full_vocabulary():
    answer = read(replace(ASK, sampling=SamplingParams()))
    assert answer is not None
    assert answer.logprobs is not None
    assert answer.logprobs.tolist() == [-2.0, -3.0]
    assert [len(ids) for ids in answer.kept_sets or ()] == [0, 0]


def test_routes_that_do_not_fit_layers_and_experts_are_unreadable():
    with pytest.raises(ContractError, match="routed_experts"):
        read(routed_experts=base64.b64encode(ROUTES.tobytes()[:-4]).decode())


def test_an_aborted_request_without_a_token_is_no_answer():
    content = json.dumps({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}).encode()
    assert dialect().read(ASK, content) is None


def test_what_is_no_answer_is_refused():
    with pytest.raises(TransportError):
        dialect().read(ASK, b"<html>")
    with pytest.raises(ContractError, match="meta_info"):
        dialect().read(ASK, b"{}")


def test_seeds_and_stop_ids_are_asked_for_as_upstream_takes_them():
    params = dialect().body(replace(ASK, stop_ids=(9,)), "r")["sampling_params"]
    assert (params["sampling_seed"], params["ignore_eos"], params["stop_token_ids"]) == (3, False, [9])
    assert dialect().body(ASK, "r")["sampling_params"]["ignore_eos"]
    # Seeds with min-p end the server.
    min_p = replace(ASK, sampling=SamplingParams(min_p=0.1))
    assert "sampling_seed" not in dialect().body(min_p, "r")["sampling_params"]
    assert "sampling_seed" not in dialect(takes_seeds=False).body(ASK, "r")["sampling_params"]
