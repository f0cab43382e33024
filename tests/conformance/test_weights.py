"""Weight updates between two calls: all or nothing, used and named at once."""

from __future__ import annotations

import pytest
from conformance_cases import Build, Subject, checkpoint, collect, make_requests, require_routes, require_same

from moerl.errors import WeightSyncError


def test_new_weights_are_used_and_named_after_an_update(build: Build, subject: Subject):
    engine, source, requests = build(), subject.model(7), make_requests(6)
    # The same prompts with the old weights first: entries that they leave in a cache must not be hit later.
    collect(engine, requests)
    engine.begin_update(5)
    engine.receive(checkpoint(source))
    engine.end_update()
    assert engine.handshake().policy_version == 5
    for trajectory in collect(engine, requests).values():
        require_routes(trajectory, source)
        assert set(trajectory.policy_versions[trajectory.sampled].tolist()) == {5}


def test_a_failed_update_leaves_weights_and_version_as_they_were(build: Build, subject: Subject):
    engine, requests = build(), make_requests(6)
    before = collect(engine, requests)
    engine.begin_update(1)
    # Without the last norm and the head, which is tied.
    engine.receive(list(checkpoint(subject.model(7)))[:-2])
    with pytest.raises(WeightSyncError, match="missing"):
        engine.end_update()
    assert engine.handshake().policy_version == 0
    require_same(before, collect(engine, requests))


def test_an_abandoned_update_leaves_weights_and_version_as_they_were(build: Build, subject: Subject):
    engine, requests = build(), make_requests(6)
    before = collect(engine, requests)
    engine.begin_update(1)
    engine.receive(list(checkpoint(subject.model(7)))[:-2])
    engine.abandon_update()
    assert engine.handshake().policy_version == 0
    require_same(before, collect(engine, requests))
    engine.abandon_update()
    with pytest.raises(WeightSyncError, match="begin_update"):
        engine.end_update()


def test_tensors_without_an_open_update_are_refused(build: Build):
    engine = build()
    with pytest.raises(WeightSyncError, match="begin_update"):
        engine.receive([])
    with pytest.raises(WeightSyncError, match="begin_update"):
        engine.end_update()


def test_the_same_weights_under_another_version_give_the_same_tokens(build: Build, subject: Subject):
    engine, requests = build(), make_requests(6)
    before = collect(engine, requests)
    for version, seed in ((3, 7), (8, 0)):
        engine.begin_update(version)
        engine.receive(checkpoint(subject.model(seed)))
        engine.end_update()
    after = collect(engine, requests)
    require_same(before, after)
    for trajectory in after.values():
        assert set(trajectory.policy_versions[trajectory.sampled].tolist()) == {8}


def test_a_negative_version_is_refused(build: Build):
    engine = build()
    with pytest.raises(WeightSyncError, match="policy version"):
        engine.begin_update(-1)
    assert engine.handshake().policy_version == 0
