"""Weight updates of a live server, idle and under load. It has two ranks, and a pool that forces retractions, too."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import sglang_live
import torch
from full_updates import full
from listening import listening, open_to_others
from safetensors.torch import load_file
from sglang_reference import Reference, collect, make_requests
from torch import Tensor

from moerl.contract.ports import RolloutRecord, RolloutRequest
from moerl.contract.trajectory import SamplingParams, Trajectory
from moerl.errors import EngineError, WeightSyncError
from moerl.kernels.checksum import checksums
from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.fleet.options import Interrupt
from moerl.rollout.sglang import broadcast
from moerl.rollout.sglang.server import SGLangServer

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write_model(tmp_path_factory.mktemp("other") / "hf", families.FAMILIES["qwen3_moe"], seed=1)


class Updated:
    """An engine that is updated to the models of folders. used: the folder of every version."""

    def __init__(self, server: SGLangServer, model: ModelFacts, folder: Path, interrupt: Interrupt) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.said: list[str] = []
        options: dict[str, Any] = {"max_running": 64, "interrupt": interrupt, "notify": self.said.append}
        self.engine = sglang_live.connect(server.endpoint, model=model, version=-1, shapes=shapes, **options)
        self.version, self.used = 0, {}
        self.send(folder)

    def send(self, folder: Path) -> None:
        """In three buckets."""
        tensors = list(load_file(folder / "model.safetensors").items())
        third = len(tensors) // 3
        self.version += 1
        self.used[self.version] = folder
        self.engine.begin_update(full(self.version, tensors))
        for bucket in (tensors[:third], tensors[third : 2 * third], tensors[2 * third :]):
            self.engine.receive(bucket)
        self.engine.end_update()


@pytest.fixture
def updated(request, pressed_server: SGLangServer, model: ModelFacts, model_folder: Path) -> Iterator[Updated]:
    made = Updated(pressed_server, model, model_folder, getattr(request, "param", Interrupt.RETRACT))
    yield made
    made.version = -1  # what other tests of this server expect
    made.send(model_folder)
    made.engine.close()


def test_new_weights_are_used_and_named_after_an_update(updated: Updated, model_folder: Path, other_folder: Path):
    requests = make_requests(12)
    before = collect(updated.engine, requests)
    updated.send(other_folder)
    assert updated.engine.handshake().policy_version == 2
    reference = Reference(other_folder)
    for rollout_id, trajectory in collect(updated.engine, requests).items():
        assert set(trajectory.policy_versions[trajectory.sampled].tolist()) == {2}
        assert set(before[rollout_id].policy_versions[before[rollout_id].sampled].tolist()) == {1}
        reference.compare(trajectory)
    reference.require_parity()


def test_a_server_that_slept_has_the_weights_of_the_update_that_woke_it(updated: Updated, other_folder: Path):
    before = collect(updated.engine, make_requests(4))
    updated.engine.sleep()
    with pytest.raises(EngineError, match="its servers sleep"):
        list(updated.engine.generate(make_requests(1)))
    updated.send(other_folder)
    reference = Reference(other_folder)
    for rollout_id, trajectory in collect(updated.engine, make_requests(4)).items():
        assert set(trajectory.policy_versions[trajectory.sampled].tolist()) == {2}
        assert trajectory.token_ids.tolist() != before[rollout_id].token_ids.tolist()
        reference.compare(trajectory)
    reference.require_parity()
    assert updated.said == []


def test_neither_server_nor_trainer_listens_where_others_could_reach_it(updated: Updated, pressed_server: SGLangServer):
    server = pressed_server.endpoint.pid
    assert len({pid for pid, _, _ in listening(server)}) == 3  # HTTP, and a process group of both ranks
    assert [host for _, host, _ in listening(server) if host != "127.0.0.1"] == []
    assert listening(os.getpid())  # our end of the process group for weights
    assert open_to_others(os.getpid()) == []


def test_a_set_that_is_not_whole_leaves_weights_and_version_as_they_were(updated: Updated, other_folder: Path):
    requests = make_requests(6)
    before = collect(updated.engine, requests)
    tensors = load_file(other_folder / "model.safetensors")
    updated.engine.begin_update(full(2, tensors))
    updated.engine.receive(list(tensors.items())[:-1])
    with pytest.raises(WeightSyncError, match="missing"):
        updated.engine.end_update()
    assert updated.engine.handshake().policy_version == 1
    for rollout_id, trajectory in collect(updated.engine, requests).items():
        assert trajectory.token_ids.tolist() == before[rollout_id].token_ids.tolist()


def test_an_abandoned_update_is_undone(updated: Updated, other_folder: Path):
    requests = make_requests(6)
    before = collect(updated.engine, requests)
    tensors = load_file(other_folder / "model.safetensors")
    updated.engine.begin_update(full(2, tensors))
    updated.engine.receive(list(tensors.items())[:10])
    updated.engine.abandon_update()
    for rollout_id, trajectory in collect(updated.engine, requests).items():
        assert trajectory.token_ids.tolist() == before[rollout_id].token_ids.tolist()


def test_a_bit_that_flips_on_its_way_is_named_and_everything_is_sent_again(
    updated: Updated, other_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = broadcast.flattened

    def flip_once(message: Sequence[tuple[str, Tensor]]) -> Tensor:
        monkeypatch.setattr(broadcast, "flattened", whole)
        data = whole(message).clone()
        data[data.numel() // 2] ^= 4
        return data

    monkeypatch.setattr(broadcast, "flattened", flip_once)
    updated.send(other_folder)
    tensors = load_file(other_folder / "model.safetensors")
    updated.engine.verify(checksums(tensors.items()))
    assert "does not hold what was sent" in updated.said[0]
    assert "1 of" in updated.said[0]
    reference = Reference(other_folder)
    for trajectory in collect(updated.engine, make_requests(6)).values():
        assert set(trajectory.policy_versions[trajectory.sampled].tolist()) == {2}
        reference.compare(trajectory)
    reference.require_parity()
    assert "going on" in updated.said[-1]


def long_requests(count: int) -> list[RolloutRequest]:
    sampling = SamplingParams(top_p=0.9, top_k=20)
    return [
        replace(r, sampling=replace(sampling, seed=i), max_new_tokens=60 + i % 40, stop_ids=(), prompt_ids=(1, 2, 3, i))
        for i, r in enumerate(make_requests(count))
    ]


def under_load(updated: Updated, folders: list[Path], requests: list[RolloutRequest]) -> dict[str, Trajectory]:
    """The weights change to each of `folders`, after the first answer and after the sixteenth."""
    records: list[RolloutRecord] = []
    thread = threading.Thread(target=lambda: records.extend(updated.engine.generate(requests)))
    thread.start()
    for number, folder in enumerate(folders):
        while len(records) < 1 + 15 * number and thread.is_alive():
            time.sleep(0.01)
        updated.send(folder)
    thread.join()
    assert len(records) == len({record.rollout_id for record in records}) == len(requests)
    return {record.rollout_id: Trajectory(**record.values) for record in records}


def test_weights_that_were_spoilt_on_their_way_under_load_sample_no_token(
    updated: Updated, model_folder: Path, other_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = broadcast.flattened

    def spoil_once(message: Sequence[tuple[str, Tensor]]) -> Tensor:
        monkeypatch.setattr(broadcast, "flattened", whole)
        data = whole(message).clone()
        data.view(torch.float32)[: data.numel() // 8] += 0.5
        return data

    requests, records = long_requests(24), []
    thread = threading.Thread(target=lambda: records.extend(updated.engine.generate(requests)))
    thread.start()
    while not records and thread.is_alive():
        time.sleep(0.01)
    monkeypatch.setattr(broadcast, "flattened", spoil_once)
    updated.engine.held_dtypes()
    updated.send(other_folder)
    time.sleep(2.0)  # for answers that would end now, if servers sampled
    updated.engine.verify(checksums(load_file(other_folder / "model.safetensors").items()))
    thread.join()
    assert "does not hold what was sent" in updated.said[0]
    references = {version: Reference(folder) for version, folder in updated.used.items()}
    assert len(records) == len(requests)
    for record in records:
        require_versions(Trajectory(**record.values), references.__getitem__)
    for reference in references.values():
        reference.require_parity()


def require_versions(trajectory: Trajectory, reference_of: Callable[[int], Reference]) -> None:
    """Every token, and the rows that the weights which sampled it computed, are those of its version."""
    versions, num_prompt = trajectory.policy_versions, len(trajectory) - trajectory.num_sampled
    assert (np.diff(versions[num_prompt:]) >= 0).all()
    for version in np.unique(versions[num_prompt:]).tolist():
        tokens = num_prompt + np.flatnonzero(versions[num_prompt:] == version)
        start, end = int(tokens[0]), int(tokens[-1]) + 1
        # The first weights computed the prompt, too; later ones computed all before theirs again, but old rows stay.
        first_row = 0 if version == versions[num_prompt] else start - 1
        reference_of(version).compare_part(trajectory, slice(first_row, end - 1), range(start, end))


@pytest.mark.parametrize("updated", list(Interrupt), indirect=True)
def test_updates_under_64_requests_keep_tokens_routes_kept_sets_and_versions_together(
    updated: Updated, model_folder: Path, other_folder: Path
):
    references: dict[int, Reference] = {}

    def reference_of(version: int) -> Reference:
        if version not in references:
            references[version] = Reference(updated.used[version])
        return references[version]

    # The server works on 64 of them at first.
    trajectories = under_load(updated, [other_folder, model_folder], long_requests(80))
    for trajectory in trajectories.values():
        assert trajectory.finish_reason == "length"
        require_versions(trajectory, reference_of)
    for reference in references.values():
        reference.require_parity()
    spread = [len(np.unique(t.policy_versions[t.sampled])) for t in trajectories.values()]
    costs = updated.engine.costs
    assert len(references) > 1
    if updated.engine._options.interrupt is Interrupt.DRAIN:
        assert set(spread) == {1}
        assert costs.recomputed_tokens == 0
    else:
        assert max(spread) > 1
        assert costs.recomputed_tokens > 0
    assert costs.interrupted > 0
    assert costs.stalled_seconds > 0


@pytest.mark.parametrize("updated", [Interrupt.ABORT_RESUME, Interrupt.RETRACT], indirect=True)
def test_an_update_to_the_same_weights_changes_nothing_but_versions(updated: Updated, model_folder: Path):
    requests = long_requests(24)
    undisturbed = collect(updated.engine, requests)
    seen = under_load(updated, [model_folder, model_folder], requests)
    assert {len(np.unique(t.policy_versions[t.sampled])) for t in seen.values()} != {1}
    for rollout_id, trajectory in seen.items():
        whole = undisturbed[rollout_id]
        assert trajectory.token_ids.tolist() == whole.token_ids.tolist()
        assert np.array_equal(np.sort(trajectory.expert_ids, -1), np.sort(whole.expert_ids, -1))
        assert np.array_equal(trajectory.kept.ids, whole.kept.ids)
        assert np.array_equal(trajectory.kept.offsets, whole.kept.offsets)
        np.testing.assert_allclose(trajectory.rollout_logprobs, whole.rollout_logprobs, atol=1e-5)
