"""A live server against transformers in fp32: routing, kept sets and log-probs of mixed batches."""

from __future__ import annotations

from pathlib import Path

from sglang_reference import Reference, collect_twice, make_requests

from moerl.contract.trajectory import FinishReason
from moerl.rollout.fleet.engine import FleetEngine


def test_routing_kept_sets_and_logprobs_are_those_of_transformers(engine: FleetEngine, model_folder: Path):
    reference = Reference(model_folder)
    first, again = collect_twice(engine, make_requests(36), reference)
    assert reference.num_rows > 5000
    assert reference.num_kept > 1000
    assert {t.finish_reason for t in first.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    for rollout_id, trajectory in first.items():
        assert trajectory.token_ids.tolist() == again[rollout_id].token_ids.tolist()
