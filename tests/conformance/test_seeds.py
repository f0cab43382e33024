"""A token depends on the weights, its request's seed and its position alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conformance_cases import Build, collect, make_requests, require_same

from moerl.contract.trajectory import SamplingParams, Trajectory


def test_a_request_does_not_depend_on_its_batchmates(build: Build):
    requests = make_requests(14)
    together = collect(build(), requests)
    require_same(together, collect(build(), requests[::-1]))
    alone: dict[str, Trajectory] = {}
    for request in requests:
        alone |= collect(build(), [request])
    require_same(together, alone)


@pytest.mark.parametrize("max_running", [1, 3, 8])
def test_few_slots_give_what_many_slots_give(build: Build, max_running: int):
    requests = make_requests(20)
    require_same(collect(build(max_running), requests), collect(build(64), requests))


def test_other_seeds_give_other_tokens(build: Build):
    request = make_requests(1)[0]
    copies = [
        replace(request, lineage=replace(request.lineage, rollout_id=f"c{i}"), sampling=SamplingParams(seed=i))
        for i in range(8)
    ]
    drawn = {tuple(t.token_ids.tolist()) for t in collect(build(), copies).values()}
    assert len(drawn) == 8


def test_seeds_are_signed_64_bit_numbers_each_with_draws_of_its_own(build: Build):
    request, seeds = make_requests(1)[0], (-(2**63), -1, 0, 1, 2**32, 2**63 - 1)
    requests = [
        replace(request, lineage=replace(request.lineage, rollout_id=f"s{seed}"), sampling=SamplingParams(seed=seed))
        for seed in seeds
    ]
    engine = build()
    drawn = collect(engine, requests)
    assert len({tuple(t.token_ids.tolist()) for t in drawn.values()}) == len(seeds)
    require_same(drawn, collect(engine, requests[::-1]))
