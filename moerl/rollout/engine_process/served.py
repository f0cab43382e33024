"""Work of the engine's process once it has torch: it samples, and takes weights between two tokens.

main thread       samples; between two decoding steps it handles the messages of the controller: requests, and begin and
                  end of weight updates
weight-buckets    one thread for each sender of weights: waits until the main thread has begun the update, and stages
                  buckets while the main thread samples
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moerl.contract.ports import RolloutRecord, RolloutRequest
from moerl.contract.weight_update import WeightUpdate
from moerl.contract.wire import encode_trajectories
from moerl.errors import MoerlError, WeightSyncError
from moerl.processes.channel import receive, send
from moerl.processes.memory import keep_freed_memory
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.engine_process.messages import (
    Abort,
    CloseEngine,
    EngineAnswer,
    FinishedRollouts,
    Generate,
    StartEngine,
    Update,
    decode_for_engine,
    encode,
)
from moerl.rollout.loading import load_sampler
from moerl.rollout.pushed import BucketReceiver
from moerl.telemetry.spans import peak_rss_bytes

ENGINE_ID = "embedded-0"
_PATIENCE_SECONDS = 0.005
"""How long the next call of a weight update is waited for before sampling goes on: the controller waits for the answer
to each of them, and would wait for a decoding step every time."""
_BEGIN_SECONDS = 300.0
"""How long a bucket waits for the begin of its update: longer than a decoding step may take."""


def serve(connection: socket.socket) -> int:
    """Loads the engine that the controller describes, and samples until `CloseEngine` comes. Returns the exit
    status."""
    start = decode_for_engine(receive(connection)[0])
    if isinstance(start, CloseEngine):
        return 0
    assert isinstance(start, StartEngine)
    try:
        served = _Served(connection, start)
    except Exception as error:  # noqa: BLE001 - the process boundary: the controller raises it
        send(connection, encode(_problem(error)))
        return 1
    served.serve()
    return 0


def _problem(error: Exception) -> EngineAnswer:
    text = str(error) if isinstance(error, MoerlError) else f"{type(error).__name__}: {error}"
    return EngineAnswer(problem=text or type(error).__name__, is_sync=isinstance(error, WeightSyncError))


class _Served:
    """The engine, with the call that asked for each rollout."""

    def __init__(self, connection: socket.socket, start: StartEngine) -> None:
        keep_freed_memory()
        torch.set_num_threads(start.num_threads)
        model = load_sampler(Path(start.folder), start.dtype)
        self._connection = connection
        self._engine = engine = EmbeddedEngine(
            model,
            start.spec,
            engine_id=ENGINE_ID,
            max_running=start.max_running,
            policy_version=start.version,
            on_device=start.on_device,
        )
        self._call_of: dict[str, int] = {}
        self._updates = OpenUpdate(engine)
        receiver = BucketReceiver(self._updates.take, start.host, shares_memory=start.shares_memory)
        answer = EngineAnswer(
            layer_numbers=list(engine.handshake().layer_numbers),
            max_positions=int(model.config.max_position_embeddings),
            description=engine.description,
            is_on_device=engine.is_on_device,
            receiver=receiver.address,
        )
        send(connection, encode(answer))

    def serve(self) -> None:
        """Samples the requests of the controller, until `CloseEngine` comes."""
        for records in self._engine.serve(self._take):
            self._tell(records)

    def _take(self, is_idle: bool) -> Sequence[RolloutRequest] | None:
        """Handles the messages of the controller; returns the requests among them, None when the engine is to end.
        Blocks while nothing is left to sample and no request comes."""
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
                case Update(do="begin", update=WeightUpdate() as begun):
                    self._updates.begin(begun)
                case Update() as update:
                    send(self._connection, encode(self._update(update)))
                    patience = _PATIENCE_SECONDS if update.do in ("held_dtypes", "end") else 0.0
                case CloseEngine():
                    return None
                case StartEngine():
                    raise AssertionError("started twice")
        return found

    def _update(self, update: Update) -> EngineAnswer:
        engine, dtypes = self._engine, dict[str, str]()
        try:
            match update.do:
                case "end":
                    self._updates.end()
                case "abandon":
                    self._updates.abandon()
                case "held_dtypes":
                    dtypes = dict(engine.held_dtypes())
                case "verify":
                    engine.verify(update.checksums)
                case "memory" | "begin":
                    pass  # every answer has the memory; `begin` has no answer
        except Exception as error:  # noqa: BLE001 - the process boundary: the controller raises it
            return _problem(error)
        costs = engine.costs
        return EngineAnswer(
            dtypes=dtypes,
            interrupted=costs.interrupted,
            stalled_seconds=costs.stalled_seconds,
            peak_rss_bytes=peak_rss_bytes(),
        )

    def _tell(self, records: Sequence[RolloutRecord]) -> None:
        """Sends the records that a step finished, one message for each call."""
        by_call: dict[int, list[Any]] = {}
        for record in records:
            # What the contract asks of them is for the controller to check.
            values = {"rewards": {}, "scores": {}, **record.values}
            by_call.setdefault(self._call_of.pop(record.rollout_id), []).append(_Unchecked(**values))
        for call, trajectories in by_call.items():
            send(self._connection, encode(FinishedRollouts(call)), encode_trajectories(trajectories))
        self._tell_of_unfinished(self._engine.take_unfinished())

    def _tell_of_unfinished(self, rollout_ids: Sequence[str]) -> None:
        for name in rollout_ids:
            send(self._connection, encode(FinishedRollouts(self._call_of.pop(name), without=[name])))


class OpenUpdate:
    """The engine's update, which the main thread of this process begins and ends while threads of senders bring
    buckets."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._version = -1
        self._problem: Exception | None = None

    def begin(self, update: WeightUpdate) -> None:
        """Begins an update. `take` and `end` raise its error: nobody waits for an answer to `begin`."""
        self._problem = None
        try:
            self._engine.begin_update(update)
        except Exception as error:  # noqa: BLE001 - raised to whoever brings or ends it
            self._problem = error
        self._set(update.version)

    def take(self, version: int, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Stages a bucket of this version, once its update has begun.

        Raises:
            WeightSyncError: the update did not begin in time, or failed to.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._version == version, _BEGIN_SECONDS):
                raise WeightSyncError(
                    "weight update: a bucket of an update that did not begin",
                    seen=f"version {version}; open is {self._version}",
                    expected=f"its begin within {_BEGIN_SECONDS:g} s",
                    remedy="see logs/engine.log and the output of the controller",
                )
        self._check()
        self._engine.receive(bucket)

    def end(self) -> None:
        """Ends the update (`WeightSink.end_update`). Raises the error of `begin`, if it had one."""
        self._set(-1)
        self._check()
        self._engine.end_update()

    def abandon(self) -> None:
        """Abandons the update (`WeightSink.abandon_update`)."""
        self._set(-1)
        self._engine.abandon_update()

    def _set(self, version: int) -> None:
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem


class _Unchecked(SimpleNamespace):
    """The fields of a trajectory, as an engine has them."""

    def __len__(self) -> int:
        return len(self.token_ids)
