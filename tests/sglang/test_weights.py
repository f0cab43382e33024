"""Weight updates of a live server, idle and under load. It has two ranks, and a pool that forces retractions, too."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import families
import numpy as np
import pytest
from safetensors.torch import load_file
from sglang_reference import Reference, collect, make_requests

from moerl.contract.ports import RolloutRecord
from moerl.contract.trajectory import FinishReason, SamplingParams, Trajectory
from moerl.errors import WeightSyncError
from moerl.rollout.sglang.engine import ModelFacts, SGLangEngine
from moerl.rollout.sglang.server import SGLangServer
from moerl.rollout.sglang.weights import PauseMode, SGLangWeights, WeightTransport

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write_model(tmp_path_factory.mktemp("other") / "hf", families.FAMILIES["qwen3_moe"], seed=1)


class Pair:
    """An engine and the sink of its weights; `send` updates it to the model of a folder."""

    def __init__(self, server: SGLangServer, model: ModelFacts, folder: Path, pause: PauseMode) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.engine = SGLangEngine(server.endpoint, model, engine_id="s", max_running=16, timeout_seconds=120.0)
        num_ranks = self.engine.facts.num_ranks
        transport = WeightTransport(
            shapes, num_ranks=num_ranks, bucket_bytes=100_000, pause=pause, timeout_seconds=60.0
        )
        self.sink = SGLangWeights(server.endpoint, transport, on_update=self.engine.handshake)
        self.version = self.engine.handshake().policy_version

    def send(self, folder: Path) -> None:
        self.version += 1
        self.sink.begin_update(self.version)
        self.sink.receive(load_file(folder / "model.safetensors").items())
        self.sink.end_update()

    def close(self) -> None:
        self.sink.close()
        self.engine.close()


@pytest.fixture
def pair(request, pressed_server: SGLangServer, model: ModelFacts, model_folder: Path) -> Iterator[Pair]:
    made = Pair(pressed_server, model, model_folder, request.param)
    made.send(model_folder)
    yield made
    made.send(model_folder)
    made.close()


@pytest.mark.parametrize("pair", ["retract"], indirect=True)
def test_new_weights_are_used_and_named_after_an_update(pair: Pair, model_folder: Path, other_folder: Path):
    requests = make_requests(12)
    before = collect(pair.engine, requests)
    assert pair.engine.facts.num_ranks == 2
    pair.send(other_folder)
    assert pair.engine.handshake().policy_version == pair.version
    reference = Reference(other_folder)
    for rollout_id, trajectory in collect(pair.engine, requests).items():
        assert set(trajectory.policy_versions[trajectory.sampled].tolist()) == {pair.version}
        assert set(before[rollout_id].policy_versions[before[rollout_id].sampled].tolist()) == {pair.version - 1}
        reference.compare(trajectory)
    reference.require_parity()


@pytest.mark.parametrize("pair", ["retract"], indirect=True)
def test_a_set_that_is_not_whole_leaves_weights_and_version_as_they_were(pair: Pair, other_folder: Path):
    requests = make_requests(6)
    before = collect(pair.engine, requests)
    pair.sink.begin_update(pair.version + 1)
    pair.sink.receive(list(load_file(other_folder / "model.safetensors").items())[:-1])
    with pytest.raises(WeightSyncError, match="missing"):
        pair.sink.end_update()
    assert pair.engine.handshake().policy_version == pair.version
    for rollout_id, trajectory in collect(pair.engine, requests).items():
        assert trajectory.token_ids.tolist() == before[rollout_id].token_ids.tolist()


def under_load(pair: Pair, folders: list[Path]) -> dict[str, Trajectory]:
    """Long responses during which the weights change to each of `folders`, after one and after two shorter ones."""
    sampling = SamplingParams(top_p=0.9, top_k=20)
    requests = [
        replace(r, sampling=replace(sampling, seed=i), max_new_tokens=220, stop_ids=(), prompt_ids=r.prompt_ids[:20])
        for i, r in enumerate(make_requests(8))
    ]
    requests[0], requests[1] = replace(requests[0], max_new_tokens=20), replace(requests[1], max_new_tokens=100)
    records: list[RolloutRecord] = []
    thread = threading.Thread(target=lambda: records.extend(pair.engine.generate(requests)))
    thread.start()
    for number, folder in enumerate(folders, 1):
        while len(records) < number and thread.is_alive():
            time.sleep(0.05)
        pair.send(folder)
    thread.join()
    return {record.rollout_id: Trajectory(**record.values) for record in records}


@pytest.mark.parametrize("pair", ["retract"], indirect=True)
def test_a_retracted_request_keeps_the_routes_of_its_logprobs(pair: Pair, model_folder: Path, other_folder: Path):
    trajectories = under_load(pair, [other_folder, model_folder])
    assert len(trajectories) == 8
    folders = {pair.version: model_folder, pair.version - 1: other_folder, pair.version - 2: model_folder}
    references = {version: Reference(folder) for version, folder in folders.items()}
    seen = set()
    for trajectory in trajectories.values():
        versions = trajectory.policy_versions[trajectory.sampled]
        seen |= set(versions.tolist())
        first = int((versions == versions[0]).sum())
        num_prompt = len(trajectory) - trajectory.num_sampled
        # Tokens of the first version, and the rows that sampled them, are those of the first weights.
        end = num_prompt + first
        judge = references[int(versions[0])].judge
        routes = np.sort(judge.routes(trajectory.token_ids[: end - 1]), -1)
        assert np.array_equal(np.sort(trajectory.expert_ids[: end - 1], -1), routes)
        # What the last version sampled was computed with its weights alone: the prefix was computed again.
        last = int((versions == versions[-1]).sum())
        if len(set(versions.tolist())) > 1:
            rows = slice(len(trajectory) - last - 1, None)
            again = np.sort(references[int(versions[-1])].judge.routes(trajectory.token_ids[:-1]), -1)
            assert np.array_equal(np.sort(trajectory.expert_ids, -1)[rows], again[rows])
    assert len(seen) > 1


@pytest.mark.parametrize("pair", ["abort"], indirect=True)
def test_an_update_that_aborts_returns_what_was_sampled_by_the_old_weights(
    pair: Pair, model_folder: Path, other_folder: Path
):
    trajectories = under_load(pair, [other_folder])
    aborted = [t for t in trajectories.values() if t.finish_reason == FinishReason.ABORT]
    assert aborted
    reference = Reference(model_folder)
    for trajectory in aborted:
        assert set(trajectory.policy_versions[trajectory.sampled].tolist()) == {pair.version - 1}
        reference.compare(trajectory)
    reference.require_parity()
