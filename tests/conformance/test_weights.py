"""Weight updates between two calls: all or nothing, used and named at once."""

from __future__ import annotations

import pytest
from conformance_cases import Build, Subject, checkpoint, collect, make_requests, require_routes, require_same
from full_updates import full, send

from moerl.errors import WeightSyncError


def test_new_weights_are_used_and_named_after_an_update(build: Build, subject: Subject):
    engine, source, requests = build(), subject.model(7), make_requests(6)
    # The same prompts with the old weights first: entries that they leave in a cache must not be hit later.
    collect(engine, requests)
    send(engine, 5, checkpoint(source))
    assert engine.handshake().policy_version == 5
    for trajectory in collect(engine, requests).values():
        require_routes(trajectory, source)
        assert set(trajectory.policy_versions[trajectory.sampled].tolist()) == {5}


def test_a_failed_update_leaves_weights_and_version_as_they_were(build: Build, subject: Subject):
    engine, requests = build(), make_requests(6)
    before = collect(engine, requests)
    engine.begin_update(full(1, checkpoint(subject.model(7))))
    # Without the last norm and the head, which is tied.
    engine.receive(list(checkpoint(subject.model(7)))[:-2])
    with pytest.raises(WeightSyncError, match="missing"):
        engine.end_update()
    assert engine.handshake().policy_version == 0
    require_same(before, collect(engine, requests))


def test_an_abandoned_update_leaves_weights_and_version_as_they_were(build: Build, subject: Subject):
    engine, requests = build(), make_requests(6)
    before = collect(engine, requests)
    engine.begin_update(full(1, checkpoint(subject.model(7))))
    engine.receive(list(checkpoint(subject.model(7)))[:-2])
    engine.abandon_update()
    assert engine.handshake().policy_version == 0
    require_same(before, collect(engine, requests))
    engine.abandon_update()
    with pytest.raises(WeightSyncError, match="begin_update"):
        engine.end_update()


@pytest.mark.parametrize("fault", ["missing", "unknown", "misshaped"])
def test_an_update_that_does_not_list_exactly_the_tensors_of_the_engine_is_refused(
    fault: str, build: Build, subject: Subject
):
    engine, tensors, name = build(), dict(checkpoint(subject.model(7))), "model.norm.weight"
    norm = tensors.pop(name)
    if fault == "unknown":
        tensors |= {name: norm, "surplus": norm}
    elif fault == "misshaped":
        tensors[name] = norm[:-1]
    with pytest.raises(WeightSyncError, match=f"not for the tensors of this engine; seen: 1: .*(surplus|{name})"):
        send(engine, 1, tensors)
    assert engine.handshake().policy_version == 0
    engine.abandon_update()
    collect(engine, make_requests(2))


@pytest.mark.parametrize("fault", ["unknown", "misshaped", "twice"])
def test_a_tensor_that_an_update_does_not_list_or_that_came_before_is_refused(
    fault: str, build: Build, subject: Subject
):
    engine, requests = build(), make_requests(2)
    before, tensors = collect(engine, requests), dict(checkpoint(subject.model(7)))
    engine.begin_update(full(1, tensors))
    name, norm = "model.norm.weight", tensors.pop("model.norm.weight")
    engine.receive(tensors.items())
    if fault == "twice":
        engine.receive([(name, norm)])
    with pytest.raises(WeightSyncError, match=f"version 1: tensor '({name}|surplus)'"):
        engine.receive(
            [("surplus", norm) if fault == "unknown" else (name, norm[: -1 if fault == "misshaped" else None])]
        )
    with pytest.raises(WeightSyncError, match="version 1: tensor"):
        engine.end_update()
    assert engine.handshake().policy_version == 0
    require_same(before, collect(engine, requests))


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
        send(engine, version, checkpoint(subject.model(seed)))
    after = collect(engine, requests)
    require_same(before, after)
    for trajectory in after.values():
        assert set(trajectory.policy_versions[trajectory.sampled].tolist()) == {8}
