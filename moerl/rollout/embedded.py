"""The embedded rollout engine: a transformers model that samples with continuous batching.

Runs in the controller or a process of its own; needs no server. It owns the model, its key-value cache and the
schedule: waiting prompts are prefilled together into free slots, all running rows then decode one token per step,
finished rows leave at once. Every token's routing comes from the model's own routers, and its kept set from the
sampler's own final weights. Shape legend: n = running rows, m = rows of a prefill, P = padded prompt length,
V = vocabulary, L, K as in the data contract.

Weights may change between two steps while requests are in flight. The cache of running rows stays, and so do
routing rows already captured: a row counts under the weights that sampled the token after it, which are those that
computed it. Every sampled token carries the version in use when it was drawn.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from moerl.config.engine_memory import DeviceOptions
from moerl.contract.ports import EngineInfo, ReportedLayers, RolloutRecord, RolloutRequest, SamplingCosts
from moerl.contract.trajectory import FinishReason, ModelSpec
from moerl.contract.weight_update import WeightUpdate, require_open
from moerl.errors import EngineError
from moerl.kernels.checksum import checksums
from moerl.rollout import host
from moerl.rollout.attention import ATTENTION
from moerl.rollout.capture import RoutingCapture, routers
from moerl.rollout.compiled_layers import CompiledLayers, knows_layers_of
from moerl.rollout.device_steps import DeviceSteps, why_not_recorded
from moerl.rollout.experts import experts_function
from moerl.rollout.recorded import CudaGraphs, Unrecorded
from moerl.rollout.requests import check_requests, distinct_prompts, room_for
from moerl.rollout.rounding import emulate
from moerl.rollout.sampler import RowParams, seeded_uniforms
from moerl.rollout.schedule import Schedule, asked_now
from moerl.rollout.slots import SlotTable
from moerl.rollout.steps import Draw, HostSteps, Prompts
from moerl.rollout.stream import EngineStream, Take
from moerl.rollout.transformers_layers import TransformersLayers
from moerl.rollout.weight_difference import weight_difference
from moerl.rollout.weight_staging import WeightStaging, held_dtypes, held_tensors


class EmbeddedEngine:
    """A `RolloutEngine` and `CheckedSink` around one transformers model.

    Attributes:
        unfinished: rollout ids of the latest `generate` call that never got a token (aborted while waiting) or
            whose tokens were given up (the iterator was closed early). They yield no record; ask for them again.
        costs: of weight updates, summed up.
        between_steps: called between two steps of `generate`; may update weights and abort rollouts.
        description: one line about device, precision and steps. is_on_device: True if it samples on a GPU.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        *,
        engine_id: str,
        max_running: int,
        policy_version: int = -1,
        on_device: DeviceOptions | None = None,
    ) -> None:
        """Takes the model over: eval mode, this engine's attention and experts functions, hooks on its routers; on a
        CPU 16-bit precision is emulated (`moerl.rollout.rounding`). It samples on the device of the model.

        Args:
            spec: what the model must be; `vocab_size` may be smaller than the padded embedding.
            max_running: sequences that decode together.
            policy_version: of the weights the model holds; -1 if it waits for a first update.
            on_device: options of an engine on a device; None = the defaults.

        Raises:
            EngineError: The model's routers are unknown or do not match the spec.
        """
        if max_running < 1:
            raise EngineError("embedded engine: max_running", seen=max_running, expected="at least 1")
        self._capture = RoutingCapture(model, spec)
        self._model = model.eval()
        self._model.set_attn_implementation(ATTENTION)
        self._dtypes = held_dtypes(model)
        dtype = model.dtype if host.is_host(model) and model.dtype.itemsize == 2 else None
        self._stop_rounding = None if dtype is None else emulate(model, dtype, routers(model))
        self._model.set_experts_implementation(experts_function(model, dtype))
        self._steps, self.description = _steps_of(
            model, dtype, self._capture, spec, max_running, on_device or DeviceOptions()
        )
        self.is_on_device = not host.is_host(model)
        self._spec = spec
        self._engine_id = engine_id
        self._max_running = max_running
        self._policy_version = policy_version
        self.between_steps: Callable[[], None] | None = None
        self._staging: WeightStaging | None = None
        self._distrusted = ""
        self._run: Schedule | None = None
        # Held during a step and during a weight swap: other threads see the engine between steps only.
        self._lock = threading.Lock()
        self.unfinished: list[str] = []
        self.costs = SamplingCosts()

    def handshake(self) -> EngineInfo:
        return EngineInfo(
            self._engine_id, self._spec, self._policy_version, ReportedLayers.MOE, self._capture.layer_numbers
        )

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[RolloutRecord]:
        """Yields one record per request, in the order in which they finish.

        Raises:
            EngineError: At once, if a request is refused or the engine has no verified weights; at the first record,
                if another `generate` is not finished.
        """
        self._check(requests)
        return self._generate(deque(requests))

    def stream(self) -> EngineStream:
        """Returns a stream of requests; the thread that iterates it samples.

        Raises:
            EngineError: at the first record, if another `generate` or stream is not finished.
        """
        return EngineStream(self._check, self.serve, self.take_unfinished)

    def serve(self, take: Take) -> Generator[list[RolloutRecord]]:
        """Samples requests that come while others are sampled; yields the records that each step finished.

        Args:
            take: returns new requests, checked (`moerl.rollout.requests`). It may wait if its argument is True: nothing
                is left to sample. It may update weights and abort rollouts. None ends it, and gives up running rows.

        Raises:
            EngineError: another `generate` or stream is not finished.
        """
        with self._running(deque(), num_slots=self._max_running) as run:
            while (requests := take(not run.waiting and not run.table.num_running)) is not None:
                run.admit(requests)
                records = []
                if run.waiting or run.table.num_running:
                    with self._lock:
                        records = self._step(run)
                yield records

    def take_unfinished(self) -> list[str]:
        """Returns `unfinished`, and empties it."""
        found, self.unfinished = self.unfinished, []
        return found

    def abort(self, rollout_ids: Collection[str] | None = None) -> None:
        """Finishes the named rollouts of the current `generate` call (all when None) before the next step.

        Running ones yield what they have, with reason `abort`; waiting ones, which have no token that could be
        trained on, yield nothing and are listed in `unfinished`. From any thread; without a call it does nothing.
        """
        with self._lock:
            if self._run is None:
                return
            unfinished = set(self._run.unfinished_ids)
            # A name that is not there now may come later, and is not meant then.
            self._run.aborted_ids |= unfinished if rollout_ids is None else unfinished & set(rollout_ids)

    def close(self) -> None:
        """Removes the hooks from the model."""
        self._capture.close()
        if self._stop_rounding is not None:
            self._stop_rounding()

    def begin_update(self, update: WeightUpdate) -> None:
        """Starts a weight update; one that was never ended is forgotten. Raises as `WeightStaging`."""
        self._staging = None
        self._staging = WeightStaging(self._model, update, self._dtypes)

    def abandon_update(self) -> None:
        self._staging = None

    def receive(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Stages tensors under their Hugging Face checkpoint names, in any order and any number of calls. Raises as
        `WeightStaging.receive`."""
        require_open(self._staging).receive(tensors)

    def end_update(self) -> None:
        """Swaps the new weights in between two steps.

        Raises:
            WeightSyncError: The set is not whole; old weights and old version stay in use.
        """
        staging = require_open(self._staging)
        self._staging = None
        start = time.perf_counter()
        with self._lock:
            staging.commit()
            self._steps.wait()
            self._policy_version, self._distrusted = staging.version, ""
            self.costs.interrupted += self._run.table.num_running if self._run is not None else 0
            self.costs.stalled_seconds += time.perf_counter() - start

    def held_dtypes(self) -> Mapping[str, str]:
        held = held_tensors(self._model, self._dtypes)
        return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in held}

    def verify(self, sent: Mapping[str, int]) -> None:
        """Compares the held weights with checksums of the sent ones. If they differ, `generate` is refused from now on;
        what is being generated goes on.

        Raises:
            WeightSyncError: it differs.
        """
        with self._lock:
            error = weight_difference(self._engine_id, sent, checksums(held_tensors(self._model, self._dtypes)))
        if error is not None:
            self._policy_version, self._distrusted = -1, str(error)
            raise error

    def _check(self, requests: Sequence[RolloutRequest]) -> None:
        """Raises EngineError if a request is refused, or the engine has no verified weights."""
        if self._policy_version < 0:
            raise EngineError(
                "embedded engine: " + (self._distrusted or "no weights yet"),
                seen=f"policy version {self._policy_version}",
                expected="at least 0",
                remedy="send a whole weight update, or say which version the loaded weights are",
            )
        check_requests(requests, self._spec, int(self._model.config.max_position_embeddings))

    def _generate(self, waiting: deque[RolloutRequest]) -> Iterator[RolloutRecord]:
        with self._running(waiting, num_slots=min(self._max_running, len(waiting))) as run:
            while run.waiting or run.table.num_running:
                with self._lock:
                    records = self._step(run)
                yield from records
                if self.between_steps is not None:
                    self.between_steps()

    @contextmanager
    def _running(self, waiting: deque[RolloutRequest], *, num_slots: int) -> Iterator[Schedule]:
        """Opens a run, the only one of the engine. At its end requests without a record become `unfinished`."""
        max_tokens = room_for(waiting)
        run = Schedule(
            waiting=waiting,
            table=SlotTable(self._spec, num_slots, max_tokens),
            cache=self._steps.cache(num_slots, max_tokens),
            asked_at=asked_now(waiting),
        )
        with self._lock:
            if self._run is not None:
                raise EngineError(
                    f"embedded engine {self._engine_id!r}: already generating",
                    expected="one generate call at a time",
                    remedy="exhaust or close the first iterator",
                )
            self._run = run
            self.unfinished = []
        try:
            yield run
        finally:
            with self._lock:
                self.unfinished += run.unfinished_ids
                self._run = None

    @torch.inference_mode()
    def _step(self, run: Schedule) -> list[RolloutRecord]:
        """Aborts, admits and prefills, decodes one token per running row; returns what finished."""
        records = self._apply_aborts(run)
        num_admitted = run.num_to_admit()
        if num_admitted:
            self._prefill(run, num_admitted)
            records += self._finish(run)
        if run.table.num_running:
            self._decode(run)
            records += self._finish(run)
        return records

    def _apply_aborts(self, run: Schedule) -> list[RolloutRecord]:
        if not run.aborted_ids:
            return []
        aborted, run.aborted_ids = run.aborted_ids, set()
        self.unfinished += [r.lineage.rollout_id for r in run.waiting if r.lineage.rollout_id in aborted]
        run.waiting = deque(r for r in run.waiting if r.lineage.rollout_id not in aborted)
        run.asked_at = {name: asked_at for name, asked_at in run.asked_at.items() if name not in aborted}
        done = np.array([r.lineage.rollout_id in aborted for r in run.table.requests], np.bool_)
        return self._leave(run, done, [FinishReason.ABORT] * int(done.sum()))

    def _prefill(self, run: Schedule, count: int) -> None:
        """Runs `count` waiting prompts, each once, and samples their first tokens."""
        admitted = [run.waiting.popleft() for _ in range(count)]
        rows = run.table.admit(admitted, [run.asked_at.pop(each.lineage.rollout_id) for each in admitted])
        run.params = None
        lengths_m = run.table.lengths[rows]
        longest, device = int(lengths_m.max()), self._model.device
        prompts_mP = run.table.token_ids[rows, :longest].astype(np.int64)
        prompts_mP[np.arange(longest) >= lengths_m[:, None]] = 0
        first_u, which_m = distinct_prompts(prompts_mP, lengths_m)
        tokens = [prompts_mP[u, : lengths_m[u]] for u in first_u.tolist()]
        params = RowParams.of([request.sampling for request in run.table.requests[rows]])
        prompts = Prompts(tokens, rows.start + first_u, which_m)
        step, experts = self._steps.prefill(prompts, self._draw(run, rows, params), run.cache)
        run.table.write_prompt_routing(rows, experts[which_m])
        others = np.setdiff1d(np.arange(count), first_u)
        sources, targets = rows.start + first_u[which_m[others]], rows.start + others
        run.cache.copy(torch.from_numpy(sources).to(device), torch.from_numpy(targets).to(device), longest)
        run.table.append(rows, step, self._policy_version)

    def _decode(self, run: Schedule) -> None:
        """Feeds the newest token of every running row and samples the next one."""
        n = run.table.num_running
        if run.params is None:
            run.params = RowParams.of([request.sampling for request in run.table.requests])
        draw = self._draw(run, slice(0, n), run.params)
        step, experts = self._steps.decode(*run.table.newest(self._steps.num_rows(n)), draw, run.cache)
        run.table.write_decode_routing(experts)
        run.table.append(slice(0, n), step, self._policy_version)

    def _draw(self, run: Schedule, rows: slice, params: RowParams) -> Draw:
        return Draw(params, seeded_uniforms(run.table.seeds[rows], run.table.lengths[rows]))

    def _finish(self, run: Schedule) -> list[RolloutRecord]:
        """Returns the records of rows that their newest token ended; a stop token on the last place is a stop."""
        stopped = run.table.stopped()
        done = stopped | run.table.full()
        reasons = [FinishReason.STOP if stop else FinishReason.LENGTH for stop in stopped[done]]
        return self._leave(run, done, reasons)

    def _leave(self, run: Schedule, done: NDArray[np.bool_], reasons: list[FinishReason]) -> list[RolloutRecord]:
        if not done.any():
            return []
        records, requests = [], run.table.requests
        for slot, reason in zip(np.flatnonzero(done).tolist(), reasons, strict=True):
            values = run.table.values(slot, reason) | {"engine_id": self._engine_id}
            rollout_id = requests[slot].lineage.rollout_id
            records.append(RolloutRecord(rollout_id, self._engine_id, self._policy_version, values))
        sources, targets = run.table.release(done)
        device = self._model.device
        num_tokens = int(run.table.lengths[: run.table.num_running].max(initial=0))
        run.cache.copy(torch.from_numpy(sources).to(device), torch.from_numpy(targets).to(device), num_tokens)
        run.params = None
        return records


def _steps_of(
    model: PreTrainedModel,
    dtype: torch.dtype | None,
    capture: RoutingCapture,
    spec: ModelSpec,
    max_running: int,
    options: DeviceOptions,
) -> tuple[HostSteps | DeviceSteps, str]:
    """Returns the passes of a model that an engine has taken over, and one line about them.

    Args:
        dtype: what its numbers are rounded to on a CPU, None if they are not.
        options: of an engine on a device.
    """
    device, precision = model.device, str(dtype or model.dtype).removeprefix("torch.")
    if host.is_host(model):
        is_known = knows_layers_of(model, dtype)
        layers = CompiledLayers(model, dtype) if is_known else TransformersLayers(model, capture)
        steps = HostSteps(layers, cast(nn.Module, model.get_output_embeddings()), spec.vocab_size)
        return steps, f"embedded engine on a CPU, {precision}"
    why_not = why_not_recorded(model) if options.record_steps else "rollout.record_steps is false"
    if not why_not and device.type != "cuda":
        why_not = f"{device.type} has no CUDA graphs"
    recorder = Unrecorded(device) if why_not else CudaGraphs(device)
    how = f"not recorded: {why_not}" if why_not else "recorded as CUDA graphs"
    steps = DeviceSteps(model, capture, spec, max_running, recorder, options.slot_tokens)
    return steps, f"embedded engine on {device}, {precision}; decoding steps {how}"
