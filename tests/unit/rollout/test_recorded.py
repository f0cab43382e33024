"""What records decoding steps of a device, and which models' steps can be recorded."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from moerl.errors import EngineError
from moerl.models.spec import spec_from_hf_config
from moerl.rollout import recorded
from moerl.rollout.device_steps import why_not_recorded
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


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[_Graph]:
    """Stands in for the parts of torch.cuda that a recording needs; the graphs that were made."""
    made: list[_Graph] = []

    def make() -> _Graph:
        made.append(_Graph())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: contextlib.nullcontext())
    return made


def test_a_recorded_step_is_replayed_and_not_computed_by_the_host_again(graphs: list[_Graph]):
    runs: list[int] = []

    def step() -> Tensor:
        runs.append(1)
        return torch.full((2,), len(runs))

    replay = CudaGraphs(torch.device("cuda", 0)).record(step)
    assert len(runs) == recorded._WARM_UPS + 1
    assert replay() is replay()
    assert graphs[0].replays == 2
    assert len(runs) == recorded._WARM_UPS + 1


def test_a_step_that_cannot_be_recorded_names_the_way_out(graphs: list[_Graph]):
    runs: list[int] = []

    def step() -> Tensor:
        runs.append(1)
        if len(runs) > recorded._WARM_UPS:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1)

    with pytest.raises(EngineError, match=r"rollout\.record_steps=false"):
        CudaGraphs(torch.device("cuda", 0)).record(step)
