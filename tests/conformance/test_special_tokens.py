"""Ids with a meaning for texts are ids like any other: an engine adds none, drops none, and obeys none by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from conformance_cases import ADDED, BOS, EOS, Build, Subject, V, collect, make_requests, require_routes

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import FinishReason, SamplingParams


def _uncut(count: int, stop_ids: tuple[int, ...]) -> list[RolloutRequest]:
    """Long answers in which every id comes up."""
    requests = make_requests(count, 40, stop_ids)
    return [replace(r, sampling=SamplingParams(temperature=1.5, seed=i)) for i, r in enumerate(requests)]


def test_special_and_added_ids_of_a_prompt_stay_and_nothing_is_put_before_them(build: Build, subject: Subject):
    prompts = [(5, 6, 7), (BOS, 5, 6), (BOS, BOS, 5), (EOS,), (ADDED[-1],), (BOS, *ADDED, EOS, ADDED[0], 9)]
    requests = [replace(r, prompt_ids=p) for r, p in zip(make_requests(len(prompts)), prompts, strict=True)]
    model = subject.model(0)
    trajectories = collect(build(), requests)
    for request in requests:
        trajectory = trajectories[request.lineage.rollout_id]
        assert tuple(trajectory.token_ids[~trajectory.sampled]) == request.prompt_ids
        # One more position before the prompt would give other routes.
        require_routes(trajectory, model)


def test_special_and_added_ids_are_sampled_and_do_not_end_an_answer(build: Build, subject: Subject):
    model = subject.model(0)
    seen: set[int] = set()
    for trajectory in collect(build(), _uncut(16, ())).values():
        assert trajectory.finish_reason == FinishReason.LENGTH
        seen |= set(trajectory.token_ids[trajectory.sampled][:-1].tolist())
        require_routes(trajectory, model)
    assert seen.issuperset((BOS, EOS, *ADDED))


def test_the_end_of_text_ends_an_answer_where_the_request_says_so(build: Build):
    reasons = set()
    for trajectory in collect(build(), _uncut(16, (EOS,))).values():
        ended = trajectory.token_ids[trajectory.sampled] == EOS
        assert not ended[:-1].any()
        assert (trajectory.finish_reason == FinishReason.STOP) == ended[-1]
        reasons.add(trajectory.finish_reason)
    assert FinishReason.STOP in reasons


def test_ids_that_pad_the_embedding_are_never_sampled(build: Build, subject: Subject):
    assert subject.config.vocab_size > V
    sampled = [trajectory.token_ids[trajectory.sampled] for trajectory in collect(build(), _uncut(16, ())).values()]
    assert int(np.concatenate(sampled).max()) == V - 1
