"""Contents of answers: lineage, versions, routing, log-probs and kept sets, compared with plain transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conformance_cases import Build, Subject, V, collect, forward, make_requests, require_routes, require_scores

from moerl.contract.ports import RolloutEngine
from moerl.contract.trajectory import MAX_KEPT_IDS, SamplingParams
from moerl.errors import EngineError


def test_the_handshake_tells_spec_and_version(build: Build, subject: Subject):
    engine = build()
    info = engine.handshake()
    assert isinstance(engine, RolloutEngine)
    assert (info.spec, info.policy_version) == (subject.spec, 0)
    assert (info.reported_layers, info.layer_numbers) == ("moe", subject.moe_layers)


def test_every_request_becomes_one_valid_trajectory_with_its_lineage(build: Build):
    requests, engine = make_requests(12), build()
    trajectories = collect(engine, requests)
    for request in requests:
        trajectory = trajectories[request.lineage.rollout_id]
        num_prompt = len(request.prompt_ids)
        assert trajectory.lineage == request.lineage
        assert tuple(trajectory.token_ids[:num_prompt]) == request.prompt_ids
        assert trajectory.sampled.tolist() == [False] * num_prompt + [True] * trajectory.num_sampled
        assert trajectory.routed.all()
        assert [turn.sampling for turn in trajectory.turns] == [None, request.sampling]
        assert (trajectory.policy_versions[num_prompt:] == 0).all()
        # An engine of several servers names the one that answered.
        assert trajectory.engine_id.startswith(engine.handshake().engine_id)
        assert all(seconds >= 0 for seconds in trajectory.timings.values())


def test_logprobs_and_routing_are_those_of_a_full_forward_pass(build: Build, subject: Subject):
    model = subject.model(0)
    for trajectory in collect(build(), make_requests(18)).values():
        require_routes(trajectory, model)
        require_scores(trajectory, model)


def test_top_k_bounds_the_kept_sets_and_full_sampling_lists_nothing(build: Build):
    for trajectory in collect(build(), make_requests(12)).values():
        sampling = trajectory.turns[1].sampling
        assert sampling is not None
        sizes = trajectory.kept.sizes[trajectory.sampled]
        limit = 1 if sampling.is_greedy else min(sampling.effective_top_k or 0, V)
        assert (sizes <= limit).all()
        assert ((sizes > 0) == sampling.cuts).all()
        assert (trajectory.truncated[trajectory.sampled] == sampling.cuts).all()


def test_top_p_alone_gets_the_finite_top_k_of_the_contract(build: Build):
    sampling = SamplingParams(top_p=0.999, seed=1)
    assert sampling.effective_top_k == MAX_KEPT_IDS
    (trajectory,) = collect(build(), [replace(make_requests(1)[0], sampling=sampling)]).values()
    assert (trajectory.kept.sizes[trajectory.sampled] > 0).all()
    assert trajectory.turns[1].sampling == sampling


def test_sharp_distributions_keep_all_that_top_k_and_min_p_allow(build: Build):
    """Gives a few tokens nearly all of the mass, so that a float32 sum over the others exceeds 1 before its end."""
    sharp = SamplingParams(temperature=0.1, top_k=40)
    kinds = [sharp, replace(sharp, min_p=1e-30), replace(sharp, top_p=0.9)]
    requests = [replace(r, sampling=replace(kinds[i % 3], seed=i)) for i, r in enumerate(make_requests(12))]
    for trajectory in collect(build(), requests).values():
        sampling = trajectory.turns[1].sampling
        assert sampling is not None
        sizes = trajectory.kept.sizes[trajectory.sampled]
        assert (sizes == 40).all() if sampling.top_p == 1 else (sizes < 40).all()


def test_greedy_takes_the_most_likely_token_with_logprob_zero(build: Build, subject: Subject):
    model = subject.model(0)
    request = replace(make_requests(5)[4], stop_ids=())
    (trajectory,) = collect(build(), [request]).values()
    logits, _ = forward(model, trajectory.token_ids)
    best = logits.argmax(-1)[:-1][trajectory.sampled[1:]]
    assert trajectory.token_ids[trajectory.sampled].tolist() == best.tolist()
    assert (trajectory.rollout_logprobs == 0).all()
    assert (trajectory.kept_logmass == 0).all()


def test_no_requests_give_no_records(build: Build):
    assert list(build().generate([])) == []


def test_a_refused_request_is_named(build: Build):
    requests = make_requests(3)
    bad = replace(requests[2], prompt_ids=(V,))
    with pytest.raises(EngineError, match="'r2'"):
        list(build().generate([*requests[:2], bad]))
