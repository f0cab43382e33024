"""The engine in a process of its own: overlapping calls, weights in mid-sequence, and an end that is told of."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conformance_cases import ENGINES, TIED, checkpoint, collect, make_requests
from full_updates import full, send
from waiting import is_alive

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Trajectory
from moerl.errors import EngineError, WeightSyncError
from moerl.kernels.checksum import checksums
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.engine_process.engine import ProcessEngine
from moerl.rollout.engine_process.local import LocalProcess, dismiss
from moerl.rollout.engine_process.messages import StartEngine
from moerl.rollout.pushed import PushingSink

SUBJECT = ENGINES["process"]


def start_of(folder: Path) -> StartEngine:
    return StartEngine(str(folder), "float32", SUBJECT.spec, max_running=16, num_threads=1, version=0)


def open_engine(place: Path, model: str = "model") -> ProcessEngine:
    SUBJECT.model(0).save_pretrained(place / "model")
    return ProcessEngine(start_of(place / model), LocalProcess(place / "log"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessEngine]:
    opened = open_engine(tmp_path_factory.mktemp("process"))
    yield opened
    opened.close()


@pytest.fixture
def inside(one_thread: None) -> EmbeddedEngine:
    return EmbeddedEngine(SUBJECT.model(0), SUBJECT.spec, engine_id="embedded-0", max_running=16, policy_version=0)


def long_requests(count: int, prefix: str = "long") -> list[RolloutRequest]:
    return [
        replace(r, lineage=replace(r.lineage, rollout_id=f"{prefix}{i}"), stop_ids=(), max_new_tokens=80)
        for i, r in enumerate(make_requests(count))
    ]


def send_weights(engine: ProcessEngine, seed: int, version: int) -> dict[str, int]:
    tensors = {name: tensor for name, tensor in checkpoint(SUBJECT.model(seed)) if name not in TIED}
    send(engine, version, tensors)
    return checksums(tensors.items())


def same(left: Trajectory, right: Trajectory) -> bool:
    return (
        left.token_ids.tolist() == right.token_ids.tolist()
        and left.expert_ids.tolist() == right.expert_ids.tolist()
        and np.allclose(left.rollout_logprobs, right.rollout_logprobs, atol=1e-6)
        and left.kept.ids.tolist() == right.kept.ids.tolist()
    )


def test_it_samples_what_the_engine_inside_samples(engine: ProcessEngine, inside: EmbeddedEngine) -> None:
    send_weights(engine, 0, 0)
    requests = make_requests(20)
    found, expected = collect(engine, requests), collect(inside, requests)
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in found)
    assert engine.handshake() == inside.handshake()


def test_calls_overlap_and_each_has_its_own_records(engine: ProcessEngine) -> None:
    first, second = (
        long_requests(6, "first"),
        [replace(r, lineage=replace(r.lineage, rollout_id=f"second{i}")) for i, r in enumerate(make_requests(6))],
    )
    running = engine.generate(first)
    early = {record.rollout_id for record in engine.generate(second)}
    assert early == {r.lineage.rollout_id for r in second}
    assert {record.rollout_id for record in running} == {r.lineage.rollout_id for r in first}


def test_weights_are_swapped_in_between_two_tokens_and_every_token_names_its_version(engine: ProcessEngine) -> None:
    send_weights(engine, 0, 3)
    found: list[Trajectory] = []
    records = engine.generate(long_requests(8))
    thread = threading.Thread(target=lambda: found.extend(Trajectory(**record.values) for record in records))
    thread.start()
    versions = [4, 5]
    for version in versions:
        time.sleep(0.1)
        engine.verify(send_weights(engine, 1, version))
    thread.join()
    seen = np.concatenate([trajectory.policy_versions[trajectory.sampled] for trajectory in found])
    assert set(seen.tolist()) <= {3, *versions}
    for trajectory in found:
        assert (np.diff(trajectory.policy_versions[trajectory.sampled]) >= 0).all()
    assert engine.handshake().policy_version == versions[-1]


def test_a_sender_pushes_buckets_while_responses_are_sampled_also_before_the_process_has_begun_the_update(
    engine: ProcessEngine,
) -> None:
    send_weights(engine, 0, 5)
    tensors = {name: tensor for name, tensor in checkpoint(SUBJECT.model(1)) if name not in TIED}
    sink = PushingSink(engine.receiver)
    pushed = threading.Event()

    def push() -> None:
        sink.begin_update(full(6, tensors))
        for part in (list(tensors.items())[::2], list(tensors.items())[1::2]):
            sink.receive(part)
        pushed.set()

    thread = threading.Thread(target=push)
    thread.start()
    assert not pushed.wait(0.2)
    records = engine.generate(long_requests(8, "meanwhile"))
    engine.begin_update(full(6, tensors))
    thread.join(60.0)
    assert pushed.is_set()
    engine.end_update()
    engine.verify(checksums(tensors.items()))
    assert len(list(records)) == 8
    with pytest.raises(WeightSyncError, match="none is open"):
        engine.receive(tensors.items())
    sink.close()


def test_the_process_says_how_much_memory_it_took(engine: ProcessEngine) -> None:
    assert 100 << 20 < engine.peak_rss_bytes() < 100 << 30


def test_weights_that_differ_are_found_and_nothing_is_sampled_with_them(engine: ProcessEngine) -> None:
    sent = send_weights(engine, 0, 6)
    name = next(iter(sent))
    with pytest.raises(WeightSyncError, match=name):
        engine.verify(sent | {name: sent[name] ^ 1})
    with pytest.raises(EngineError, match="no weights that were verified"):
        engine.generate(make_requests(1))
    engine.verify(send_weights(engine, 0, 7))
    assert len(collect(engine, make_requests(2))) == 2


def test_an_incomplete_update_is_refused_and_the_old_weights_stay(engine: ProcessEngine) -> None:
    send_weights(engine, 0, 8)
    engine.begin_update(full(9, checkpoint(SUBJECT.model(0))))
    with pytest.raises(WeightSyncError, match="missing"):
        engine.end_update()
    assert engine.handshake().policy_version == 8
    assert len(collect(engine, make_requests(2))) == 2


def test_a_call_that_is_given_up_stops_sampling(engine: ProcessEngine) -> None:
    records = engine.generate(long_requests(16, "given-up"))
    next(records)
    records.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert engine.unfinished
    assert len(collect(engine, make_requests(4))) == 4


def test_an_abort_hits_what_was_asked_for_before_it_and_nothing_later(engine: ProcessEngine) -> None:
    requests = long_requests(24, "aborted")
    names = [request.lineage.rollout_id for request in requests]
    engine.abort(names)
    records = engine.generate(requests)
    engine.abort(names)
    found = {record.rollout_id for record in records}
    assert sorted((*found, *engine.unfinished)) == sorted(names)
    assert engine.unfinished
    assert len(list(engine.generate(requests))) == len(requests)


def test_a_process_that_is_killed_is_one_error_that_names_it(tmp_path: Path) -> None:
    SUBJECT.model(0).save_pretrained(tmp_path / "model")
    process = LocalProcess(tmp_path / "log")
    engine = ProcessEngine(start_of(tmp_path / "model"), process)
    records = engine.generate(long_requests(4))
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"process {process.pid}: killed by SIGKILL"):
        list(records)
    with pytest.raises(EngineError, match="is gone"):
        engine.begin_update(full(1, {}))
    engine.close()


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_named_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nowhere"):
        open_engine(tmp_path, "nowhere")


@pytest.mark.slow
def test_a_process_that_no_engine_was_made_of_ends_and_leaves_nothing(tmp_path: Path) -> None:
    process = LocalProcess(tmp_path / "log")
    dismiss(process)
    assert not is_alive(process.pid)
    assert list(tmp_path.iterdir()) == []
