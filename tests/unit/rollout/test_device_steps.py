"""Passes for a device, on tensors of a CPU: what they sample, and that a step of theirs can be recorded.

In float64 or bfloat16, since the kernels of a CPU take over in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, override

import numpy as np
import pytest
import torch
from families import FAMILIES
from full_updates import send
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoModelForCausalLM

from moerl.config.engine_memory import DeviceOptions
from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, ModelSpec, SamplingParams, Trajectory
from moerl.errors import EngineError
from moerl.models.spec import spec_from_hf_config
from moerl.rollout import device_steps, embedded, host, schedule
from moerl.rollout.device_steps import DeviceSteps, why_not_recorded
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.recorded import Step, Unrecorded
from moerl.rollout.weight_staging import checkpoint_views

KINDS = [{"top_k": 9}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.0}, {}, {"top_k": 20, "min_p": 0.01}]
WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "unique",
    "masked_select",
    "bincount",
    "repeat_interleave",
    "equal",
    "is_nonzero",
    "record_stream",
)
"""Operations that look at values on the host, or whose results have shapes that depend on values."""


class Operations(TorchDispatchMode):
    """Writes down each operation: its name, the shapes of its tensors, and where those lie that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[int, ...]], list[int]]] = []
        self._made: set[int] = set()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each for each in tree_flatten((args, kwargs or {}))[0] if isinstance(each, Tensor)]
        lasting = [each.data_ptr() for each in given if each.untyped_storage().data_ptr() not in self._made]
        self._made |= {each.untyped_storage().data_ptr() for each in tree_flatten(result)[0] if is_new(each, given)}
        self.seen.append((str(func), [tuple(each.shape) for each in given], lasting))
        if any(each.dtype == torch.bool for each in indices_of(func, args)):
            self.seen.append(("nonzero", [], []))
        return result

    @property
    def waits(self) -> set[str]:
        return {wait for name, _, _ in self.seen for wait in WAITS if f".{wait}" in f".{name}"}


def indices_of(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """Returns the index tensors of an indexing operation: the host has to look at a mask among them."""
    is_index = any(name in str(func) for name in ("aten.index.", "aten.index_put", "aten._index_put"))
    return [each for each in args[1] if each is not None] if is_index else []


def is_new(tensor: Any, given: Sequence[Tensor]) -> bool:
    storages = {each.untyped_storage().data_ptr() for each in given}
    return isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in storages


class Witness(Unrecorded):
    """Runs steps as they are, and compares each run of a step with its first one."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_recorded = self.num_replayed = 0
        self.waits: set[str] = set()

    @override
    def record(self, step: Step) -> Step:
        self.num_recorded += 1
        first = self._run(step)[1]
        output = first.clone()

        def replay() -> Tensor:
            self.num_replayed += 1
            operations, result = self._run(step)
            assert operations == wanted
            return output.copy_(result)

        wanted = self._run(step)[0]
        return replay

    def _run(self, step: Step) -> tuple[list[Any], Tensor]:
        with Operations() as operations:
            result = step()
        self.waits |= operations.waits
        return operations.seen, result


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "is_host", lambda model: False)


def requests(count: int, vocab: int = 61, kinds: Sequence[dict[str, Any]] = KINDS) -> list[RolloutRequest]:
    rng = np.random.default_rng(5)
    return [
        RolloutRequest(
            Lineage(f"r{i}", f"p{i}", "g"),
            tuple(rng.integers(0, vocab, rng.integers(2, 9)).tolist()),
            SamplingParams(seed=i, **kinds[i % len(kinds)]),
            10 + i % 3,
        )
        for i in range(count)
    ]


def make_engine(
    model: Any, max_running: int = 5, spec: ModelSpec | None = None, on_device: DeviceOptions | None = None
) -> EmbeddedEngine:
    spec = spec or spec_from_hf_config(model.config.to_dict())
    return EmbeddedEngine(model, spec, engine_id="e", max_running=max_running, policy_version=0, on_device=on_device)


def watched(engine: EmbeddedEngine) -> Witness:
    witness = Witness()
    assert isinstance(engine._steps, DeviceSteps)
    engine._steps._recorder = witness
    return witness


def rollouts(engine: EmbeddedEngine, asked: Sequence[RolloutRequest]) -> dict[str, Trajectory]:
    return {record.rollout_id: Trajectory(**record.values) for record in engine.generate(asked)}


def assert_same(first: dict[str, Trajectory], second: dict[str, Trajectory], nats: float = 1e-5) -> None:
    assert first.keys() == second.keys()
    for name, one in first.items():
        other = second[name]
        for field in ("token_ids", "expert_ids", "truncated", "sampled", "policy_versions"):
            assert np.array_equal(getattr(one, field), getattr(other, field)), (name, field)
        assert np.array_equal(one.kept.ids, other.kept.ids)
        assert np.array_equal(one.kept.offsets, other.kept.offsets)
        np.testing.assert_allclose(one.rollout_logprobs, other.rollout_logprobs, rtol=0, atol=nats)
        np.testing.assert_allclose(one.kept_logmass, other.kept_logmass, rtol=0, atol=nats)


@pytest.mark.parametrize("kinds", [KINDS, KINDS[:1], KINDS[3:4]], ids=["mixed", "cut", "open"])
def test_a_device_samples_what_the_compiled_layers_sample(make_model, monkeypatch, kinds: list[dict[str, Any]]):
    model, asked = make_model(), requests(12, kinds=kinds)
    on_host = rollouts(make_engine(deepcopy(model)), asked)
    monkeypatch.setattr(host, "is_host", lambda model: False)
    assert_same(on_host, rollouts(make_engine(model.double()), asked))


@pytest.mark.parametrize("family", [pytest.param(name, marks=[pytest.mark.slow] * ("-" in name)) for name in FAMILIES])
def test_every_family_samples_the_same_on_a_device_without_a_wait_in_its_steps(family: str, monkeypatch):
    torch.manual_seed(3)
    config, spec = FAMILIES[family].config(), FAMILIES[family].spec()
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    asked = requests(4, vocab=spec.vocab_size)
    on_host = rollouts(make_engine(deepcopy(model), spec=spec), asked)
    monkeypatch.setattr(host, "is_host", lambda model: False)
    engine = make_engine(model.double(), spec=spec)
    witness = watched(engine)
    assert_same(on_host, rollouts(engine, asked))
    assert why_not_recorded(model) == ""
    assert witness.num_replayed
    assert witness.waits == set()


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_step_has_the_same_operations_shapes_and_storages_every_time(make_model, dtype: torch.dtype):
    engine = make_engine(make_model(dtype=dtype))
    witness = watched(engine)
    for trajectory in rollouts(engine, requests(12)).values():
        assert trajectory.num_sampled
    assert witness.num_replayed > 2 * witness.num_recorded  # which compares them
    assert witness.waits == set()


@pytest.mark.usefixtures("on_device")
def test_a_step_that_looks_at_a_value_is_seen(make_model):
    # Red on purpose: what the tests above would find.
    angles = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = make_model(rope_parameters=angles).double()
    engine = make_engine(model)
    witness = watched(engine)
    rollouts(engine, requests(2))
    assert "is_nonzero" in witness.waits
    assert "'dynamic'" in why_not_recorded(model)
    assert "not recorded: RoPE of type 'dynamic'" in engine.description
    with Operations() as operations:
        mask = torch.ones(3, dtype=torch.bool)
        torch.ones(3)[mask]
    assert "nonzero" in operations.waits


@pytest.mark.usefixtures("on_device")
def test_updated_weights_lie_where_recorded_steps_read_them(make_model):
    engine, other = make_engine(make_model().double(), 8), make_model(seed=4).double()
    witness, asked = watched(engine), requests(8)
    before = rollouts(engine, asked)
    num_recorded = witness.num_recorded
    places = [each.data_ptr() for each in engine._model.parameters()]
    send(
        engine,
        1,
        (item for name, tensor in other.state_dict().items() for item in checkpoint_views(name, tensor).items()),
    )
    assert [each.data_ptr() for each in engine._model.parameters()] == places
    after = rollouts(engine, asked)
    # Not one step was recorded again, and all of them computed with the new weights.
    assert witness.num_recorded == num_recorded
    assert (after["r0"].policy_versions[after["r0"].sampled] == 1).all()
    assert any(not np.array_equal(before[name].token_ids, after[name].token_ids) for name in before)
    fresh = {name: trajectory.token_ids.tolist() for name, trajectory in rollouts(make_engine(other, 8), asked).items()}
    assert {name: trajectory.token_ids.tolist() for name, trajectory in after.items()} == fresh


@pytest.mark.usefixtures("on_device")
def test_steps_are_recorded_again_once_the_cache_has_grown(make_model, monkeypatch):
    monkeypatch.setattr(device_steps, "LEAST_TOKENS", 16)
    model = make_model().double()
    engine = make_engine(model)
    witness, asked = watched(engine), requests(5, kinds=KINDS[:1])
    short = [RolloutRequest(each.lineage, each.prompt_ids, each.sampling, 3) for each in asked]
    rollouts(engine, short)
    long = rollouts(engine, asked)
    assert witness.num_recorded == 2 + 1  # 16 tokens; once there is room for more, 16 and 32
    assert_same(long, rollouts(make_engine(deepcopy(model)), asked))


@pytest.mark.usefixtures("on_device")
def test_the_time_of_an_update_is_that_of_the_device(make_model, monkeypatch: pytest.MonkeyPatch):
    engine, seconds = make_engine(make_model().double()), [0.0]

    class Slow(Witness):
        def wait(self) -> None:
            seconds[0] += 5

    assert isinstance(engine._steps, DeviceSteps)
    engine._steps._recorder = Slow()
    monkeypatch.setattr(embedded, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    weights = make_model(seed=4).double().state_dict()
    send(engine, 1, (item for name, tensor in weights.items() for item in checkpoint_views(name, tensor).items()))
    assert engine.costs.stalled_seconds == 5


def served(engine: EmbeddedEngine, lengths: Sequence[int]) -> dict[str, Trajectory]:
    """Samples requests of so many tokens one after the other, in one stream."""
    waiting = [
        RolloutRequest(Lineage(f"r{n}", f"p{n}", "g"), (1, 2, 3), SamplingParams(seed=n, top_k=9), n - 3)
        for n in lengths
    ]
    found: dict[str, Trajectory] = {}

    def take(is_idle: bool) -> list[RolloutRequest] | None:
        if is_idle and not waiting:
            return None
        return [waiting.pop(0)] if is_idle else []

    for records in engine.serve(take):
        found |= {record.rollout_id: Trajectory(**record.values) for record in records}
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("on_device")
def test_longer_requests_seldom_have_steps_recorded_again(make_model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_steps, "LEAST_TOKENS", 8)
    monkeypatch.setattr(schedule, "_ROOM_TOKENS", 4)
    model, lengths = make_model().double(), [9, 15, 18, 31, 40, 60, 90]
    found: list[dict[str, Trajectory]] = []
    # Room for 16 (or the 24 that are planned), 32, 64 and all 96 positions of the model; steps read at most 8, 16, ...
    # tokens, or all of it. With a plan for all of them there is one room.
    for slot_tokens, num_recorded in ((0, 2 + 3 + 4 + 5), (24, 3 + 3 + 4 + 5), (96, 5)):
        engine = make_engine(deepcopy(model), on_device=DeviceOptions(slot_tokens=slot_tokens))
        witness = watched(engine)
        found.append(served(engine, lengths))
        assert witness.num_recorded == num_recorded
        assert engine._steps.cache(5, 0).capacity == 96
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


@pytest.mark.usefixtures("on_device")
def test_broken_weights_are_refused_on_a_device(make_model):
    model = make_model().double()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(EngineError, match="without a finite normaliser"):
        list(make_engine(model).generate(requests(3)))


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    ("running", "slots", "rows"), [(1, 192, 8), (9, 192, 16), (64, 192, 64), (130, 192, 192), (3, 3, 8), (11, 12, 16)]
)
def test_rows_of_a_step_are_rounded_up(make_model, running: int, slots: int, rows: int):
    assert make_engine(make_model().double(), slots)._steps.num_rows(running) == rows
