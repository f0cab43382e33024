"""Work of the engine's process once it has torch: it samples, and takes weights between two tokens.

One thread: between two decoding steps it takes what the controller has said, requests and weights alike.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from moerl.contract.ports import RolloutRecord, RolloutRequest
from moerl.contract.wire import encode_trajectories
from moerl.errors import MoerlError, WeightSyncError
from moerl.processes.channel import receive, send
from moerl.processes.memory import keep_freed_memory
from moerl.rollout.beside.messages import (
    Abort,
    Answer,
    Close,
    Generate,
    Records,
    Start,
    Update,
    decode_for_engine,
    encode,
)
from moerl.rollout.beside.shared import SharedMemory
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.loading import load_sampler
from moerl.telemetry.spans import peak_rss_bytes

ENGINE_ID = "embedded-0"
_PATIENCE_SECONDS = 0.005
"""How long the next call of a weight update is waited for before sampling goes on: the trainer waits for the answer to
each of them, and would wait for a decoding step every time."""


def serve(connection: socket.socket, memory: int) -> int:
    """Loads the engine that the controller describes, and samples until told to end. Returns the exit status.

    Args:
        memory: descriptor of the memory that weights come in.
    """
    start = decode_for_engine(receive(connection)[0])
    if isinstance(start, Close):
        return 0
    assert isinstance(start, Start)
    try:
        served = _Served(connection, SharedMemory(memory), start)
    except Exception as error:  # noqa: BLE001 - the process boundary: the controller raises it
        send(connection, encode(_problem(error)))
        return 1
    served.serve()
    return 0


def _problem(error: Exception) -> Answer:
    text = str(error) if isinstance(error, MoerlError) else f"{type(error).__name__}: {error}"
    return Answer(problem=text or type(error).__name__, is_sync=isinstance(error, WeightSyncError))


class _Served:
    """The engine, and who asked for which rollout."""

    def __init__(self, connection: socket.socket, memory: SharedMemory, start: Start) -> None:
        keep_freed_memory()
        torch.set_num_threads(start.num_threads)
        model = load_sampler(Path(start.folder), start.dtype)
        self._connection, self._memory = connection, memory
        self._engine = engine = EmbeddedEngine(
            model,
            start.spec,
            engine_id=ENGINE_ID,
            max_running=start.max_running,
            policy_version=start.version,
            record_steps=start.record_steps,
        )
        self._call_of: dict[str, int] = {}
        numbers = list(self._engine.handshake().layer_numbers)
        max_positions = int(model.config.max_position_embeddings)
        answer = Answer(
            layer_numbers=numbers,
            max_positions=max_positions,
            description=engine.description,
            is_on_device=engine.is_on_device,
        )
        send(connection, encode(answer))

    def serve(self) -> None:
        """Samples what is asked for, until told to end."""
        for records in self._engine.stream(self._take):
            self._tell(records)

    def _take(self, is_idle: bool) -> Sequence[RolloutRequest] | None:
        """Does what the controller has said meanwhile; where there is nothing to do, until there is."""
        found: list[RolloutRequest] = []
        patience = 0.0
        while (is_idle and not found) or select.select([self._connection], [], [], patience)[0]:
            match decode_for_engine(receive(self._connection)[0]):
                case Generate(call, requests):
                    self._call_of.update((request.lineage.rollout_id, call) for request in requests)
                    found += requests
                case Abort(rollout_ids):
                    self._engine.abort(rollout_ids)
                    aborted = [r.lineage.rollout_id for r in found if r.lineage.rollout_id in rollout_ids]
                    found = [r for r in found if r.lineage.rollout_id not in aborted]
                    self._tell_of_unfinished(aborted)
                case Update() as update:
                    send(self._connection, encode(self._update(update)))
                    patience = 0.0 if update.do in ("verify", "abandon") else _PATIENCE_SECONDS
                case Close():
                    return None
                case Start():
                    raise AssertionError("started twice")
        return found

    def _update(self, update: Update) -> Answer:
        engine, dtypes = self._engine, dict[str, str]()
        try:
            match update.do:
                case "begin":
                    engine.begin_update(update.version)
                case "receive":
                    self._memory.map(update.num_bytes)
                    engine.receive((place.name, self._memory.view(place)) for place in update.places)
                case "end":
                    engine.end_update()
                case "abandon":
                    engine.abandon_update()
                case "held_dtypes":
                    dtypes = dict(engine.held_dtypes())
                case "verify":
                    engine.verify(update.checksums)
                case "memory":
                    pass  # every answer has it
        except Exception as error:  # noqa: BLE001 - the process boundary: the controller raises it
            return _problem(error)
        costs = engine.costs
        return Answer(
            dtypes=dtypes,
            interrupted=costs.interrupted,
            stalled_seconds=costs.stalled_seconds,
            peak_rss_bytes=peak_rss_bytes(),
        )

    def _tell(self, records: Sequence[RolloutRecord]) -> None:
        """Sends what a step finished, to each call its own."""
        by_call: dict[int, list[Any]] = {}
        for record in records:
            # What the contract asks of them is for the controller to check.
            values = {"rewards": {}, "scores": {}, **record.values}
            by_call.setdefault(self._call_of.pop(record.rollout_id), []).append(_Unchecked(**values))
        for call, trajectories in by_call.items():
            send(self._connection, encode(Records(call)), encode_trajectories(trajectories))
        left, self._engine.unfinished = self._engine.unfinished, []
        self._tell_of_unfinished(left)

    def _tell_of_unfinished(self, rollout_ids: Sequence[str]) -> None:
        for name in rollout_ids:
            send(self._connection, encode(Records(self._call_of.pop(name), without=[name])))


class _Unchecked(SimpleNamespace):
    """The fields of a trajectory, as an engine has them."""

    def __len__(self) -> int:
        return len(self.token_ids)
