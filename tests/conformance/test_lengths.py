"""Ends of answers, and lengths of prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from conformance_cases import MAX_POSITIONS, Build, Subject, V, collect, make_requests, require_routes

from moerl.contract.trajectory import FinishReason


def test_the_stop_token_stays_and_ends_the_trajectory(build: Build):
    trajectories = collect(build(), make_requests(24, max_new_tokens=40, stop_ids=(3, 17, 40)))
    reasons = set()
    for trajectory in trajectories.values():
        response = trajectory.token_ids[trajectory.sampled]
        stopped = np.isin(response, (3, 17, 40))
        assert not stopped[:-1].any()
        assert (trajectory.finish_reason == FinishReason.STOP) == stopped[-1]
        reasons.add(trajectory.finish_reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_max_new_tokens_is_kept_to_the_token(build: Build):
    for request in make_requests(6, stop_ids=()):
        (trajectory,) = collect(build(), [request]).values()
        assert trajectory.num_sampled == request.max_new_tokens
        assert trajectory.finish_reason == FinishReason.LENGTH


def test_answers_of_one_token_from_prompts_of_one_token(build: Build, subject: Subject):
    requests = [replace(r, prompt_ids=r.prompt_ids[:1], max_new_tokens=1) for r in make_requests(9)]
    for trajectory in collect(build(4), requests).values():
        assert len(trajectory) == 2
        assert trajectory.expert_ids.shape == (1, len(subject.moe_layers), 2)


def test_long_prompts_almost_fill_the_context(build: Build, subject: Subject):
    rng = np.random.default_rng(3)
    requests = [
        replace(r, prompt_ids=tuple(rng.integers(0, V, MAX_POSITIONS - 7).tolist()), max_new_tokens=5, stop_ids=())
        for r in make_requests(6)
    ]
    model = subject.model(0)
    for trajectory in collect(build(4), requests).values():
        assert len(trajectory) == MAX_POSITIONS - 2
        require_routes(trajectory, model)
