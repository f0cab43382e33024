from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from full_updates import send
from transformers import DynamicCache, Qwen3MoeForCausalLM

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import FinishReason, Lineage, SamplingParams, Trajectory
from moerl.errors import EngineError, WeightSyncError
from moerl.models.spec import spec_from_hf_config
from moerl.rollout import embedded, schedule
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.steps import HostSteps
from moerl.rollout.weight_staging import checkpoint_views


@pytest.fixture(autouse=True, params=["compiled layers", "layers of transformers"])
def _layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every test in this file with compiled layers, if the engine has them, and with those of transformers."""
    if request.param != "compiled layers":
        monkeypatch.setattr(embedded, "knows_layers_of", lambda model, dtype: False)


def _engine(
    model: Qwen3MoeForCausalLM,
    max_running: int = 4,
    between_steps: Callable[[], None] | None = None,
    policy_version: int = 0,
) -> EmbeddedEngine:
    spec = spec_from_hf_config(model.config.to_dict())
    engine = EmbeddedEngine(
        deepcopy(model), spec, engine_id="e", max_running=max_running, policy_version=policy_version
    )
    engine.between_steps = between_steps
    return engine


def _requests(count: int, max_new_tokens: int = 10) -> list[RolloutRequest]:
    rng = np.random.default_rng(5)
    return [
        RolloutRequest(
            Lineage(f"r{i}", f"p{i}", "g"),
            tuple(int(t) for t in rng.integers(0, 61, rng.integers(2, 9))),
            SamplingParams(top_k=9, seed=i),
            max_new_tokens,
        )
        for i in range(count)
    ]


def _checkpoint(model: Qwen3MoeForCausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.state_dict().items():
        yield from checkpoint_views(name, tensor).items()


def _update(engine: EmbeddedEngine, model: Qwen3MoeForCausalLM, version: int) -> None:
    send(engine, version, _checkpoint(model))


class _At:
    """A `between_steps` that runs an action after each step whose number (from 1) it was given."""

    def __init__(self, actions: dict[int, Callable[[], None]]) -> None:
        self.actions, self.step = actions, 0

    def __call__(self) -> None:
        self.step += 1
        self.actions.get(self.step, lambda: None)()


def _tokens(engine: EmbeddedEngine, requests: list[RolloutRequest]) -> dict[str, list[int]]:
    return {record.rollout_id: record.values["token_ids"].tolist() for record in engine.generate(requests)}


@torch.no_grad()
def _replay(
    old: Qwen3MoeForCausalLM, new: Qwen3MoeForCausalLM, tokens: np.ndarray, num_old: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [S - 1, V] and expert ids [S - 1, L, K] where the first num_old inputs ran under `old`, the rest
    under `new` on the cache that `old` left."""
    cache, logprobs, experts = DynamicCache(config=old.config), [], []
    for t, token in enumerate(tokens[:-1].tolist()):
        model: Any = old if t < num_old else new
        out = model(torch.tensor([[token]]), past_key_values=cache, output_router_logits=True)
        logprobs.append(out.logits[0, 0].log_softmax(-1))
        experts.append(torch.stack([layer[0].topk(2).indices.sort().values for layer in out.router_logits]))
    return torch.stack(logprobs), torch.stack(experts)


def test_weights_swapped_in_mid_sequence_split_a_trajectory_in_two_versions(make_model):
    old, new = make_model(seed=1), make_model(seed=2)
    at = _At({})
    engine = _engine(old, between_steps=at)
    at.actions[3] = lambda: _update(engine, new, version=7)
    for record in engine.generate(_requests(3)):
        trajectory = Trajectory(**record.values)
        first = int(trajectory.sampled.argmax())
        # The first step prefills and decodes: two tokens; then one per step.
        assert trajectory.policy_versions[first:].tolist() == [0] * 4 + [7] * 6
        logprobs, experts = _replay(old, new, trajectory.token_ids, num_old=first + 3)
        assert np.array_equal(np.sort(trajectory.expert_ids, -1), experts.numpy())
        sampled = logprobs[torch.arange(len(trajectory) - 1), trajectory.token_ids[1:].astype(np.int64)]
        scored = (trajectory.rollout_logprobs + trajectory.kept_logmass)[first:]
        np.testing.assert_allclose(scored, sampled[first - 1 :], atol=1e-5)
    assert engine.handshake().policy_version == 7


def test_a_failed_update_in_mid_sequence_changes_nothing(make_model):
    model, requests = make_model(seed=1), _requests(3)
    expected = _tokens(_engine(model), requests)
    at = _At({})
    engine = _engine(model, between_steps=at)

    def fail() -> None:
        with pytest.raises(WeightSyncError):
            _update(engine, make_model(seed=2, num_hidden_layers=2), version=1)

    at.actions[2] = fail
    assert _tokens(engine, requests) == expected
    assert at.step > 2
    assert engine.handshake().policy_version == 0


def test_aborted_rollouts_yield_what_they_have_and_the_others_go_on(make_model):
    model, requests = make_model(), _requests(4)
    expected = _tokens(_engine(model), requests)
    at = _At({})
    engine = _engine(model, between_steps=at)
    at.actions[2] = lambda: engine.abort(["r1", "r3", "nobody"])
    records = {record.rollout_id: Trajectory(**record.values) for record in engine.generate(requests)}
    for rollout_id, trajectory in records.items():
        whole = expected[rollout_id]
        aborted = rollout_id in ("r1", "r3")
        assert trajectory.finish_reason == (FinishReason.ABORT if aborted else FinishReason.LENGTH)
        assert trajectory.token_ids.tolist() == (whole[: len(whole) - 7] if aborted else whole)
    assert engine.unfinished == []


def test_rollouts_aborted_before_their_first_token_are_listed_and_can_be_asked_for_again(make_model):
    model, requests = make_model(), _requests(5)
    at = _At({})
    engine = _engine(model, max_running=2, between_steps=at)
    at.actions[1] = engine.abort
    records = list(engine.generate(requests))
    assert {record.rollout_id for record in records} == {"r0", "r1"}
    assert {record.values["finish_reason"] for record in records} == {FinishReason.ABORT}
    assert engine.unfinished == ["r2", "r3", "r4"]
    again = [request for request in requests if request.lineage.rollout_id in engine.unfinished]
    assert _tokens(engine, again) == _tokens(_engine(model), again)
    assert engine.unfinished == []


def test_abort_from_another_thread_ends_the_call(make_model):
    model = make_model(max_position_embeddings=4000)
    started = threading.Event()
    engine = _engine(model, between_steps=started.set)
    requests = _requests(2, max_new_tokens=3900)
    records: list[Any] = []
    worker = threading.Thread(target=lambda: records.extend(engine.generate(requests)))
    worker.start()
    assert started.wait(60)
    engine.abort()
    worker.join(60)
    assert not worker.is_alive()
    assert [record.values["finish_reason"] for record in records] == [FinishReason.ABORT] * 2


def test_an_abort_while_nothing_runs_does_not_hit_the_next_call(make_model):
    engine, requests = _engine(make_model()), _requests(2)
    expected = _tokens(engine, requests)
    engine.abort()
    engine.abort(["r0"])
    assert _tokens(engine, requests) == expected


def test_the_wait_of_each_request_begins_when_it_is_asked_for(make_model, monkeypatch: pytest.MonkeyPatch):
    engine, requests = _engine(make_model(), max_running=1), deque(_requests(8, max_new_tokens=2))
    monkeypatch.setattr(schedule.time, "perf_counter", itertools.count(0.0).__next__)

    def take(is_idle: bool) -> list[RolloutRequest] | None:
        # Two at first, then one a step, which ends one: there always is one that waits, always as long.
        if not requests:
            return None if is_idle else []
        return [requests.popleft() for _ in range(2 if len(requests) == 8 else 1)]

    waits = [record.values["timings"]["waiting_seconds"] for records in engine.serve(take) for record in records]
    assert len(waits) == 8
    assert max(waits) == waits[2], waits


def test_only_one_call_at_a_time_and_a_closed_one_names_what_it_gave_up(make_model):
    engine, requests = _engine(make_model(), max_running=2), _requests(3, max_new_tokens=3)
    first = engine.generate(requests)
    next(first)
    with pytest.raises(EngineError, match="already generating"):
        next(engine.generate(requests))
    assert isinstance(first, Iterator)
    first.close()  # type: ignore[attr-defined]
    assert "r2" in engine.unfinished
    assert len(_tokens(engine, requests)) == 3


def test_an_engine_without_weights_does_not_sample(make_model):
    model = make_model()
    engine = _engine(model, policy_version=-1)
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate(_requests(1))
    _update(engine, model, version=0)
    assert len(_tokens(engine, _requests(1))) == 1


def test_ids_beyond_the_vocabulary_are_never_sampled(make_model):
    model = make_model()
    model.get_output_embeddings().weight.data[20:] *= 50  # would win nearly always
    spec = replace(spec_from_hf_config(model.config.to_dict()), vocab_size=20)
    engine = EmbeddedEngine(model, spec, engine_id="e", max_running=4, policy_version=0)
    requests = [replace(r, prompt_ids=(1, 2), sampling=SamplingParams(seed=i)) for i, r in enumerate(_requests(6))]
    assert max(max(ids) for ids in _tokens(engine, requests).values()) < 20


def test_a_prefill_is_bounded_but_a_long_prompt_still_runs(make_model, monkeypatch: pytest.MonkeyPatch):
    model, requests = make_model(), _requests(9)
    expected = _tokens(_engine(model, max_running=9), requests)
    widths: list[int] = []
    record = embedded.EmbeddedEngine._prefill

    def spy(self: EmbeddedEngine, run: Any, count: int) -> None:
        longest = max(len(request.prompt_ids) for request in list(run.waiting)[:count])
        widths.append(count * longest if count > 1 else 0)
        record(self, run, count)

    monkeypatch.setattr(embedded.EmbeddedEngine, "_prefill", spy)
    monkeypatch.setattr(schedule, "PREFILL_TOKENS", 7)
    assert _tokens(_engine(model, max_running=9), requests) == expected
    assert len(widths) > 2
    assert max(widths) <= 7


def test_a_prompt_that_several_ask_for_is_computed_once(make_model, monkeypatch: pytest.MonkeyPatch):
    model = make_model()
    alone = _requests(3)
    group = [
        RolloutRequest(Lineage(f"{i}", "p", "g"), r.prompt_ids, SamplingParams(top_k=9, seed=i), 10)
        for i, r in enumerate((alone[0], alone[1], alone[0], alone[1], alone[0]))
    ]
    engine = _engine(model, max_running=5)
    computed: list[int] = []
    assert isinstance(engine._steps, HostSteps)
    prefill = engine._steps.layers.prefill

    def counted(prompts: Any, *arguments: Any) -> Any:
        computed.append(len(prompts))
        return prefill(prompts, *arguments)

    monkeypatch.setattr(engine._steps.layers, "prefill", counted)
    together = {r.rollout_id: r.values for r in engine.generate(group)}
    assert computed == [2]
    for request in group:
        (record,) = _engine(model).generate([request])
        values = together[request.lineage.rollout_id]
        assert values["token_ids"].tolist() == record.values["token_ids"].tolist()
        assert values["expert_ids"].tolist() == record.values["expert_ids"].tolist()


def test_a_bf16_model_samples_valid_trajectories(make_model):
    engine = _engine(make_model(dtype=torch.bfloat16), max_running=3)
    for record in engine.generate(_requests(7)):
        assert Trajectory(**record.values).num_sampled == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_closed_engine_leaves_no_hooks_behind(make_model, dtype: torch.dtype):
    model = make_model(dtype=dtype)
    engine = EmbeddedEngine(model, spec_from_hf_config(model.config.to_dict()), engine_id="e", max_running=1)
    assert any(module._forward_pre_hooks for module in model.modules())
    engine.close()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_an_engine_needs_at_least_one_slot(make_model):
    with pytest.raises(EngineError, match="max_running"):
        _engine(make_model(), max_running=0)
