"""What every rollout engine promises, checked on each implementation.

An engine joins by a function in `ENGINES` that builds one, holding the weights of `subject.model(0)` as version 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import sglang_live
import torch
from sglang_reference import PARAMS
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moerl.contract.ports import PolicyEngine, RolloutEngine, RolloutRequest
from moerl.contract.spec import moe_layer_indices, spec_from_hf_config
from moerl.contract.trajectory import MAX_KEPT_IDS, FinishReason, Lineage, ModelSpec, SamplingParams, Trajectory
from moerl.errors import EngineError, WeightSyncError
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.sglang.endpoint import Endpoint
from moerl.rollout.sglang.engine import ModelFacts
from moerl.rollout.sglang.server import ServerOptions, SGLangServer
from moerl.rollout.sglang.supervised import SupervisedOptions, SupervisedSGLang

V = 61
_SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Subject:
    """An engine under test. dense_layers: of its model; SGLang builds experts there, whatever the config says."""

    make: Callable[[Subject, pytest.FixtureRequest, int], PolicyEngine]
    dense_layers: tuple[int, ...]

    @property
    def config(self) -> Qwen3MoeConfig:
        return Qwen3MoeConfig(**_SIZES, mlp_only_layers=list(self.dense_layers))

    @property
    def spec(self) -> ModelSpec:
        return spec_from_hf_config(self.config.to_dict())

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return moe_layer_indices(self.config.to_dict())

    def model(self, seed: int) -> Qwen3MoeForCausalLM:
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(self.config).eval()


def _embedded(subject: Subject, request: pytest.FixtureRequest, max_running: int) -> PolicyEngine:
    model = subject.model(0)
    return EmbeddedEngine(model, subject.spec, engine_id="embedded-0", max_running=max_running, policy_version=0)


@dataclass(frozen=True)
class _Running:
    """A source of the one server that all these tests share."""

    endpoint: Endpoint

    def open(self) -> Endpoint:
        return self.endpoint

    def close(self) -> None:
        """The server goes on."""


def _sglang(subject: Subject, request: pytest.FixtureRequest, max_running: int) -> PolicyEngine:
    tensors = dict(_checkpoint(subject.model(0)))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    options = SupervisedOptions("sglang-0", "float32", max_running, 60.0, 60.0, shapes, {}, print)
    source = _Running(request.getfixturevalue("sglang_server").endpoint)
    engine = SupervisedSGLang(source, ModelFacts(subject.spec, subject.moe_layers), options, -1)
    engine.begin_update(0)
    engine.receive(tensors.items())
    engine.end_update()
    return engine


ENGINES = {"embedded": Subject(_embedded, (1,)), "sglang": Subject(_sglang, ())}


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    folder = tmp_path_factory.mktemp("conformance")
    ENGINES["sglang"].model(0).save_pretrained(folder / "model")
    options = ServerOptions(
        folder / "model", sglang_live.ENVIRONMENT, device="cpu", dtype="float32", max_pool_tokens=8192
    )
    with SGLangServer(options, folder / "server") as server:
        server.wait_until_ready(500.0)
        yield server


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def subject(request: pytest.FixtureRequest) -> Subject:
    return ENGINES[request.param]


@pytest.fixture
def build(subject: Subject, request: pytest.FixtureRequest) -> Iterator[Callable[[int], PolicyEngine]]:
    """Builds engines by their number of slots, and closes them."""
    engines: list[PolicyEngine] = []

    def make(max_running: int = 16) -> PolicyEngine:
        engines.append(subject.make(subject, request, max_running))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def _requests(count: int, max_new_tokens: int = 12, stop_ids: tuple[int, ...] = (3,)) -> list[RolloutRequest]:
    rng = np.random.default_rng(11)
    return [
        RolloutRequest(
            Lineage(f"r{i}", f"p{i // 2}", f"g{i // 2}"),
            tuple(int(t) for t in rng.integers(0, V, rng.integers(1, 14))),
            replace(PARAMS[i % len(PARAMS)], seed=100 + i),
            max_new_tokens + i % 5,
            stop_ids,
        )
        for i in range(count)
    ]


def _collect(engine: PolicyEngine, requests: list[RolloutRequest]) -> dict[str, Trajectory]:
    records = list(engine.generate(requests))
    assert len(records) == len({record.rollout_id for record in records})
    return {record.rollout_id: Trajectory(**record.values) for record in records}


@torch.no_grad()
def _reference(model: Qwen3MoeForCausalLM, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits float64 [S, V] and sorted expert ids [S, L, K] of one full forward pass of plain transformers."""
    output: Any = model(torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True)
    experts = torch.stack([layer.topk(2, -1).indices.sort(-1).values for layer in output.router_logits], 1)
    return output.logits[0].double().numpy(), experts.numpy()


def _log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def _same_tokens(first: dict[str, Trajectory], second: dict[str, Trajectory]) -> None:
    assert first.keys() == second.keys()
    for rollout_id, one in first.items():
        other = second[rollout_id]
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.array_equal(np.sort(one.expert_ids, -1), np.sort(other.expert_ids, -1))
        assert np.array_equal(one.kept.ids, other.kept.ids)
        np.testing.assert_allclose(one.rollout_logprobs, other.rollout_logprobs, atol=1e-5)


def test_the_handshake_tells_spec_and_version(build, subject: Subject):
    engine = build()
    info = engine.handshake()
    assert isinstance(engine, RolloutEngine)
    assert (info.spec, info.policy_version) == (subject.spec, 0)
    assert (info.reported_layers, info.layer_numbers) == ("moe", subject.moe_layers)
    assert info.captures_routing
    assert info.captures_kept_sets


def test_every_request_becomes_one_valid_trajectory_with_its_lineage(build):
    requests, engine = _requests(12), build()
    trajectories = _collect(engine, requests)
    for request in requests:
        trajectory = trajectories[request.lineage.rollout_id]
        num_prompt = len(request.prompt_ids)
        assert trajectory.lineage == request.lineage
        assert tuple(trajectory.token_ids[:num_prompt]) == request.prompt_ids
        assert trajectory.sampled.tolist() == [False] * num_prompt + [True] * trajectory.num_sampled
        assert trajectory.routed.all()
        assert [turn.sampling for turn in trajectory.turns] == [None, request.sampling]
        assert (trajectory.policy_versions[num_prompt:] == 0).all()
        assert trajectory.engine_id == engine.handshake().engine_id
        assert all(seconds >= 0 for seconds in trajectory.timings.values())


def test_logprobs_and_routing_are_those_of_a_full_forward_pass(build, subject: Subject):
    model = subject.model(0)
    mismatches = 0
    for trajectory in _collect(build(), _requests(18)).values():
        logits, experts = _reference(model, trajectory.token_ids)
        mismatches += int((np.sort(trajectory.expert_ids, -1) != experts[:-1]).any((1, 2)).sum())
        sampling = trajectory.turns[1].sampling
        assert sampling is not None
        if sampling.is_greedy:
            continue
        full = _log_softmax(logits / sampling.temperature)
        for t in np.flatnonzero(trajectory.sampled):
            both = trajectory.rollout_logprobs[t] + trajectory.kept_logmass[t]
            assert both == pytest.approx(full[t - 1, trajectory.token_ids[t]], abs=1e-5)
            kept = trajectory.kept.ids[trajectory.kept.offsets[t] : trajectory.kept.offsets[t + 1]]
            if trajectory.truncated[t]:
                mass = np.log(np.exp(full[t - 1, kept]).sum())
                assert trajectory.kept_logmass[t] == pytest.approx(mass, abs=1e-5)
    assert mismatches == 0


def test_top_k_bounds_the_kept_sets_and_full_sampling_lists_nothing(build):
    for trajectory in _collect(build(), _requests(12)).values():
        sampling = trajectory.turns[1].sampling
        assert sampling is not None
        sizes = trajectory.kept.sizes[trajectory.sampled]
        limit = 1 if sampling.is_greedy else min(sampling.effective_top_k or 0, V)
        assert (sizes <= limit).all()
        assert ((sizes > 0) == sampling.cuts).all()
        assert (trajectory.truncated[trajectory.sampled] == sampling.cuts).all()


def test_greedy_takes_the_most_likely_token_with_logprob_zero(build, subject: Subject):
    model = subject.model(0)
    request = replace(_requests(5)[4], stop_ids=())
    (trajectory,) = _collect(build(), [request]).values()
    logits, _ = _reference(model, trajectory.token_ids)
    best = logits.argmax(-1)[:-1][trajectory.sampled[1:]]
    assert trajectory.token_ids[trajectory.sampled].tolist() == best.tolist()
    assert (trajectory.rollout_logprobs == 0).all()
    assert (trajectory.kept_logmass == 0).all()


def test_a_request_does_not_depend_on_its_batchmates(build):
    requests = _requests(14)
    together = _collect(build(), requests)
    _same_tokens(together, _collect(build(), requests[::-1]))
    alone: dict[str, Trajectory] = {}
    for request in requests:
        alone |= _collect(build(), [request])
    _same_tokens(together, alone)


@pytest.mark.parametrize("max_running", [1, 3, 8])
def test_few_slots_give_what_many_slots_give(build, max_running: int):
    requests = _requests(20)
    _same_tokens(_collect(build(max_running), requests), _collect(build(64), requests))


def test_other_seeds_give_other_tokens(build):
    request = _requests(1)[0]
    copies = [
        replace(
            request,
            lineage=replace(request.lineage, rollout_id=f"c{i}"),
            sampling=SamplingParams(seed=i),
        )
        for i in range(8)
    ]
    drawn = {tuple(t.token_ids.tolist()) for t in _collect(build(), copies).values()}
    assert len(drawn) == 8


def test_the_stop_token_stays_and_ends_the_trajectory(build):
    trajectories = _collect(build(), _requests(24, max_new_tokens=40, stop_ids=(3, 17, 40)))
    reasons = set()
    for trajectory in trajectories.values():
        response = trajectory.token_ids[trajectory.sampled]
        stopped = np.isin(response, (3, 17, 40))
        assert not stopped[:-1].any()
        assert (trajectory.finish_reason == FinishReason.STOP) == stopped[-1]
        reasons.add(trajectory.finish_reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_max_new_tokens_is_kept_to_the_token(build):
    for request in _requests(6, stop_ids=()):
        (trajectory,) = _collect(build(), [request]).values()
        assert trajectory.num_sampled == request.max_new_tokens
        assert trajectory.finish_reason == FinishReason.LENGTH


def test_answers_of_one_token_from_prompts_of_one_token(build, subject: Subject):
    requests = [replace(r, prompt_ids=r.prompt_ids[:1], max_new_tokens=1) for r in _requests(9)]
    for trajectory in _collect(build(4), requests).values():
        assert len(trajectory) == 2
        assert trajectory.expert_ids.shape == (1, len(subject.moe_layers), 2)


def test_long_prompts_almost_fill_the_context(build, subject: Subject):
    rng = np.random.default_rng(3)
    requests = [
        replace(r, prompt_ids=tuple(rng.integers(0, V, 89).tolist()), max_new_tokens=5, stop_ids=())
        for r in _requests(6)
    ]
    model = subject.model(0)
    for trajectory in _collect(build(4), requests).values():
        assert len(trajectory) == 94
        assert np.array_equal(np.sort(trajectory.expert_ids, -1), _reference(model, trajectory.token_ids)[1][:-1])


def test_top_p_alone_gets_the_finite_top_k_of_the_contract(build):
    sampling = SamplingParams(top_p=0.999, seed=1)
    assert sampling.effective_top_k == MAX_KEPT_IDS
    (trajectory,) = _collect(build(), [replace(_requests(1)[0], sampling=sampling)]).values()
    assert (trajectory.kept.sizes[trajectory.sampled] > 0).all()
    assert trajectory.turns[1].sampling == sampling


def test_aborted_rollouts_keep_what_they_have(build):
    requests = [replace(r, max_new_tokens=80, prompt_ids=(1, 2, 3), stop_ids=()) for r in _requests(8)]
    requests[0] = replace(requests[0], max_new_tokens=4)
    engine = build()
    whole = _collect(engine, requests)
    iterator = engine.generate(requests)
    records = [next(iterator)]
    engine.abort()
    records += iterator
    trajectories = {record.rollout_id: Trajectory(**record.values) for record in records}
    aborted = [t for t in trajectories.values() if t.finish_reason == FinishReason.ABORT]
    assert aborted
    for trajectory in aborted:
        expected = whole[trajectory.lineage.rollout_id]
        assert trajectory.token_ids.tolist() == expected.token_ids[: len(trajectory)].tolist()
        rows = len(trajectory) - 1
        assert np.array_equal(np.sort(trajectory.expert_ids, -1), np.sort(expected.expert_ids[:rows], -1))


def test_no_requests_give_no_records(build):
    assert list(build().generate([])) == []


def test_a_refused_request_is_named(build):
    requests = _requests(3)
    bad = replace(requests[2], prompt_ids=(V,))
    with pytest.raises(EngineError, match="'r2'"):
        list(build().generate([*requests[:2], bad]))


def test_new_weights_are_used_and_named_after_an_update(build, subject: Subject):
    engine, source = build(), subject.model(7)
    engine.begin_update(5)
    engine.receive(_checkpoint(source))
    engine.end_update()
    assert engine.handshake().policy_version == 5
    for trajectory in _collect(engine, _requests(6)).values():
        _, experts = _reference(source, trajectory.token_ids)
        assert np.array_equal(np.sort(trajectory.expert_ids, -1), experts[:-1])
        assert set(trajectory.policy_versions[trajectory.sampled].tolist()) == {5}


def test_a_failed_update_leaves_weights_and_version_as_they_were(build, subject: Subject):
    engine, requests = build(), _requests(6)
    before = _collect(engine, requests)
    engine.begin_update(1)
    engine.receive(list(_checkpoint(subject.model(7)))[:-1])
    with pytest.raises(WeightSyncError, match="missing"):
        engine.end_update()
    assert engine.handshake().policy_version == 0
    _same_tokens(before, _collect(engine, requests))


def test_tensors_without_an_open_update_are_refused(build):
    engine = build()
    with pytest.raises(WeightSyncError, match="begin_update"):
        engine.receive([])
    with pytest.raises(WeightSyncError, match="begin_update"):
        engine.end_update()


def _checkpoint(model: Qwen3MoeForCausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors under checkpoint names: one per expert and projection."""
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, (gate, up) in enumerate(part.chunk(2) for part in tensor):
                yield f"{prefix}{expert}.gate_proj.weight", gate
                yield f"{prefix}{expert}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            for expert, part in enumerate(tensor):
                yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", part
        else:
            yield name, tensor
