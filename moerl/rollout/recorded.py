"""Steps of a device that are recorded once and replayed: CUDA graphs.

Runs inside the embedded rollout engine. A decoding step of an MoE model is thousands of small kernels; started one by
one, they take longer to start than to run. A graph starts them with one call, with the addresses and shapes that they
had when it was recorded. So a step reads its inputs from one tensor and leaves its outputs in another, weights and
cache are written in place, and nothing in it may depend on a value that the host would have to look at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, override

import torch
from torch import Tensor

from moerl.errors import EngineError

Step = Callable[[], Tensor]
"""Computes a step from tensors that keep their addresses; returns its output."""

_WARM_UPS = 2
"""Runs before a recording, in which libraries choose kernels and take their workspaces."""


class Unrecorded:
    """A recorder that runs steps as they are: for models whose steps cannot be recorded, and to look for faults.

    Args:
        device: of the steps; any.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self, step: Step) -> Step:
        """Returns a function that runs the step again, into the same output. The step itself may run several times."""
        return step

    def forget(self) -> None:
        """Is told that all recorded steps have been dropped."""

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Returns memory of the host that the device copies from and to without the host's help."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=self._device.type == "cuda")

    def wait(self) -> None:
        """Waits until the device has done all that it was given."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class CudaGraphs(Unrecorded):
    """A recorder of CUDA graphs. They share memory for what they compute on the way, since one runs at a time.

    All warm-ups and recordings use one stream: cuBLAS keeps a workspace for every stream that it was ever used on, and
    one that it made during a recording would lie in the memory of the graphs.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    @override
    def record(self, step: Step) -> Step:
        """Records the step as a graph; returns what replays it (`Unrecorded.record`). Raises `EngineError` if the step
        cannot be recorded."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                step()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, which write a checkpoint for one, may use the device meanwhile.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                output = step()
        except RuntimeError as error:
            raise EngineError(
                "embedded engine: a decoding step cannot be recorded as a CUDA graph",
                seen=" ".join(str(error).split())[:300],
                expected="operations that do not wait for the device",
                remedy="set rollout.record_steps=false",
            ) from error

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    @override
    def forget(self) -> None:
        # The memory of graphs that are gone is not given to new ones: something may have stayed in it.
        self._pool = torch.cuda.graph_pool_handle()
