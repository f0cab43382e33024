"""Recorders of decoding steps of a device, and the models whose steps can be recorded."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, SamplingParams
from moerl.errors import EngineError
from moerl.models.spec import spec_from_hf_config
from moerl.rollout import device_steps, host, recorded
from moerl.rollout.device_steps import DeviceSteps, why_not_recorded
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.recorded import CudaGraphs

CUDA = torch.device("cuda", 0)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has models say that they are on a GPU; the function sets its compute capability."""
    monkeypatch.setattr("transformers.PreTrainedModel.device", property(lambda model: CUDA))

    def be(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return be


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((9, 0), torch.bfloat16, ""),
        ((10, 0), torch.bfloat16, ""),
        ((8, 0), torch.bfloat16, "grouped product in bfloat16 waits for the host on compute capability 8.0"),
        ((12, 0), torch.bfloat16, "grouped product in bfloat16 waits for the host on compute capability 12.0"),
        ((9, 0), torch.float16, "grouped product in float16 waits for the host on compute capability 9.0"),
        ((8, 0), torch.float32, ""),
    ],
    ids=str,
)
def test_steps_are_recorded_if_no_product_of_experts_waits(
    make_model, on_gpu, capability: tuple[int, int], dtype: torch.dtype, reason: str
):
    on_gpu(*capability)
    found = why_not_recorded(make_model(dtype=dtype))
    assert found.endswith(reason)
    assert bool(found) == bool(reason)


def test_a_run_says_that_its_experts_keep_steps_from_being_recorded(make_model, on_gpu):
    on_gpu(8, 6)
    model = make_model(dtype=torch.bfloat16)
    engine = EmbeddedEngine(model, spec_from_hf_config(model.config.to_dict()), engine_id="e", max_running=2)
    assert "decoding steps not recorded: torch's grouped product" in engine.description


class _Graph:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


class _Stream:
    def wait_stream(self, other: Any) -> None: ...


class _Cuda:
    """Stands in for the parts of torch.cuda that a recording needs, and writes down what they were given."""

    def __init__(self) -> None:
        self.graphs: list[_Graph] = []
        self.streams: list[Any] = []
        """Streams of warm-ups and recordings."""
        self.pools: list[Any] = []
        """Memory pools of recordings."""
        self._num_handles = 0

    def graph_pool_handle(self) -> tuple[int, int]:
        self._num_handles += 1
        return 0, self._num_handles

    def current_stream(self, device: torch.device) -> _Stream:
        return _Stream()

    def Stream(self, device: torch.device) -> _Stream:
        return _Stream()

    def CUDAGraph(self) -> _Graph:
        self.graphs.append(_Graph())
        return self.graphs[-1]

    def stream(self, stream: _Stream) -> Any:
        self.streams.append(stream)
        return contextlib.nullcontext()

    def graph(self, graph: _Graph, pool: Any, stream: Any = None, *, capture_error_mode: str) -> Any:
        self.pools.append(pool)
        self.streams.append(stream)
        assert capture_error_mode == "thread_local"
        return contextlib.nullcontext()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    stand_in = _Cuda()
    for name in ("graph_pool_handle", "current_stream", "Stream", "CUDAGraph", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    return stand_in


def test_a_recorded_step_is_replayed_and_not_computed_by_the_host_again(cuda: _Cuda):
    runs: list[int] = []

    def step() -> Tensor:
        runs.append(1)
        return torch.full((2,), len(runs))

    replay = CudaGraphs(CUDA).record(step)
    assert len(runs) == recorded._WARM_UPS + 1
    assert replay() is replay()
    assert cuda.graphs[0].replays == 2
    assert len(runs) == recorded._WARM_UPS + 1


def test_a_step_that_cannot_be_recorded_names_the_way_out(cuda: _Cuda):
    runs: list[int] = []

    def step() -> Tensor:
        runs.append(1)
        if len(runs) > recorded._WARM_UPS:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1)

    with pytest.raises(EngineError, match=r"rollout\.record_steps=false"):
        CudaGraphs(CUDA).record(step)


def test_one_stream_is_warmed_up_and_recorded_on(cuda: _Cuda):
    recorder = CudaGraphs(CUDA)
    for _ in range(2):
        recorder.record(lambda: torch.zeros(1))
    recorder.forget()
    recorder.record(lambda: torch.zeros(1))
    assert len(cuda.streams) == 6
    assert len(set(map(id, cuda.streams))) == 1


def test_steps_that_are_recorded_after_the_cache_has_grown_have_memory_of_their_own(
    make_model, cuda: _Cuda, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host, "is_host", lambda model: False)
    monkeypatch.setattr(device_steps, "LEAST_TOKENS", 16)
    model = make_model().double()
    engine = EmbeddedEngine(
        model, spec_from_hf_config(model.config.to_dict()), engine_id="e", max_running=2, policy_version=0
    )
    assert isinstance(engine._steps, DeviceSteps)
    engine._steps._recorder = CudaGraphs(torch.device("cpu"))
    for num_new in (8, 8, 24):
        request = RolloutRequest(Lineage("r", "p", "g"), (1, 2, 3), SamplingParams(seed=0, top_k=4), num_new)
        assert len(list(engine.generate([request]))) == 1
    before, *after = cuda.pools
    assert len(after) == 2  # of 16 tokens and of 32
    assert len({before, *after}) == 2
    assert after[0] == after[1]
