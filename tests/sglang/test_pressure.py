"""A server with a tight key-value pool and small prefill chunks, and one over two ranks: nothing may change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sglang_live
from sglang_reference import Reference, make_requests

from moerl.contract.trajectory import SamplingParams
from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.sglang.server import SGLangServer

pytestmark = pytest.mark.sglang


def test_chunked_prefill_retractions_and_two_ranks_change_nothing(
    pressed_server: SGLangServer, server: SGLangServer, model: ModelFacts, model_folder: Path
):
    rng = np.random.default_rng(5)
    requests = [
        replace(r, prompt_ids=tuple(rng.integers(0, 91, 24 + i).tolist()), max_new_tokens=120, stop_ids=())
        for i, r in enumerate(make_requests(12))
    ]
    easy = sglang_live.generate(server.endpoint, requests)
    # Servers keep room for all tokens of requests that nothing can end; so each has a stop id, which it never samples.
    requests = [
        replace(r, stop_ids=(min(set(range(91)) - set(reply["output_ids"])),))
        for r, reply in zip(requests, easy, strict=True)
    ]
    replies = sglang_live.generate_together(pressed_server.endpoint, requests)
    assert sum(reply["meta_info"]["num_retractions"] for reply in replies) > 0
    reference = Reference(model_folder)
    for request, reply in zip(requests, replies, strict=True):
        reference.compare(sglang_live.trajectory(request, reply, model.spec))
    reference.require_parity()
    assert [r["output_ids"] for r in replies] == [r["output_ids"] for r in easy]


def test_greedy_and_uncut_requests_side_by_side(pressed_server: SGLangServer, model: ModelFacts, model_folder: Path):
    reference = Reference(model_folder)
    requests = [
        replace(r, sampling=SamplingParams(temperature=float(i % 2), seed=i)) for i, r in enumerate(make_requests(8))
    ]
    for request, reply in zip(requests, sglang_live.generate(pressed_server.endpoint, requests), strict=True):
        reference.compare(sglang_live.trajectory(request, reply, model.spec))
    reference.require_parity()
