"""Weight updates of a run's engine, led by the controller: begin, publish, end. Runs in the controller.

    main thread       has the update begun; `Publish` to all ranks; waits for their replies
    weight-updates    calls the engine, one call after the other: begin, end, verify, or abandon
    ranks             push buckets to the engine's receivers, and return the checksums of the tensors that they sent

The main thread waits for each call of the engine, `weights.step_seconds` at most, and for the replies,
`trainer.command_seconds` at most. An embedded engine in a process of its own ends an update while ranks in other
processes are in their next step; then the loop waits for it, before it samples with the new weights. If ranks or the
engine fail, the update is abandoned and the engine keeps the version it had, unless its error says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moerl.config.placement import controller_address
from moerl.config.ranks import RankConfig
from moerl.contract.commands import Publish, ReceiverAddress, Reply
from moerl.contract.ports import PolicyEngine, UpdateDone
from moerl.contract.weight_update import UpdateKind, WeightUpdate
from moerl.errors import undoing
from moerl.ranks.senders import RankSenders, RanksInTurn
from moerl.ranks.weights import FOLDER
from moerl.rollout.engine_process.engine import ProcessEngine
from moerl.rollout.fleet.engine import FleetEngine
from moerl.rollout.pushed import BucketReceiver
from moerl.weights.bucket_sender import SinkThread
from moerl.weights.disk import read_buckets

_ABANDON_SECONDS = 2.0


class LedUpdates:
    """The updates of one engine.

    Args:
        config: of the run, as ranks read it.
        ranks: that publish.
        engine: gets the weights. Closed by its owner.

    Attributes:
        receiver: address of the engine's receiver, for `Build`; None if ranks reach the engine in another way.
        tensors: shapes of the tensors that the ranks publish, by checkpoint name, from the replies to `Build`.
    """

    def __init__(self, config: RankConfig, ranks: RanksInTurn, engine: PolicyEngine) -> None:
        self._ranks, self._engine = ranks, engine
        self._thread = SinkThread("the engine", config.weights.step_seconds, "weight-updates")
        self._folder: Path | None = config.run_dir / FOLDER if config.weights.transport == "disk" else None
        is_here = ranks.adopt(engine)
        self._senders = self._own = None
        self.receiver: ReceiverAddress | None = None
        self.tensors: Mapping[str, tuple[int, ...]] = {}
        # While ranks in other processes train, such an engine can take the sent version into use.
        self._ends_later = isinstance(engine, ProcessEngine) and not is_here
        if self._folder is not None:
            return
        if isinstance(engine, FleetEngine):
            self._senders = RankSenders(ranks)
            engine.send_by(self._senders)
        elif isinstance(engine, ProcessEngine):
            self.receiver = None if is_here else engine.receiver
        elif not is_here:
            host = controller_address(config.launch)
            take = lambda version, bucket: engine.receive(bucket)  # noqa: E731 - the update is open by then
            self._own = BucketReceiver(take, host, shares_memory=config.launch.on == "local")
            self.receiver = self._own.address

    def publish(self, version: int, *, verify: bool, done: UpdateDone) -> Callable[[], dict[str, float]]:
        """Implements `Trainer.publish`."""
        update = WeightUpdate(version, UpdateKind.FULL, self.tensors)
        with undoing(self._abandon):
            dtypes = self._call("held_dtypes", self._engine.held_dtypes) if verify else None
            if self._folder is None:
                self._call(f"begin_update({version})", lambda: self._engine.begin_update(update))
            targets = () if self._senders is None else self._senders.targets
            self._ranks.tell(Publish(version, update.kind, None if dtypes is None else dict(dtypes), targets))
        return lambda: self._finish(update, dtypes, done)

    def close(self) -> None:
        """Closes the receiver of buckets in this process, if there is one."""
        if self._own is not None:
            self._own.close()

    def _finish(self, update: WeightUpdate, dtypes: Mapping[str, str] | None, done: UpdateDone) -> dict[str, float]:
        with undoing(self._abandon):
            replies = self._ranks.replies()
            if self._senders is not None:
                self._senders.published(replies)
            sent = None if dtypes is None else _sent(replies)
            # Of rank 0, which is a sender.
            metrics = {**replies[0].metrics, "weights/check_seconds": 0.0}
            if self._ends_later:
                self._thread.submit("end_update", lambda: self._end(update, sent, done))
                return metrics
            metrics["weights/end_seconds"] += self._timed("end_update", lambda: self._take(update))
            if sent is not None:
                metrics["weights/check_seconds"] = self._timed("verify", lambda: self._engine.verify(sent))
        done(None)
        return metrics

    # --- in the thread of updates ------------------------------------------------------------------------------------

    def _end(self, update: WeightUpdate, sent: Mapping[str, int] | None, done: UpdateDone) -> None:
        try:
            self._take(update)
            if sent is not None:
                self._engine.verify(sent)
        except Exception as problem:  # noqa: BLE001 - thread boundary: the loop raises it
            done(problem)
        else:
            done(None)

    def _take(self, update: WeightUpdate) -> None:
        """Has the engine take an update into use. An update on disk is read and handed to the engine first."""
        if self._folder is not None:
            self._engine.begin_update(update)
            for bucket in read_buckets(self._folder, update):
                self._engine.receive(bucket)
        self._engine.end_update()

    def _timed(self, doing: str, run: Callable[[], None]) -> float:
        start = time.perf_counter()
        self._call(doing, run)
        return time.perf_counter() - start

    def _call[T](self, doing: str, run: Callable[[], T]) -> T:
        """Calls the engine in the thread of updates; waits for the call and returns its result.

        Raises:
            WeightSyncError: the call failed, or took longer than `weights.step_seconds`.
        """
        try:
            return self._thread.call(doing, run)
        except Exception as problem:
            raise self._thread.failure(doing, problem) from problem

    def _abandon(self) -> None:
        """Has the engine forget the update, and waits a moment for its answer: the engine may be gone, or hang.

        Raises:
            Exception: the error of the engine.
        """
        call = self._thread.submit("abandon_update", self._engine.abandon_update)
        if call.done.wait(_ABANDON_SECONDS) and call.problem is not None:
            raise call.problem


def _sent(replies: Sequence[Reply]) -> dict[str, int]:
    """Returns the checksums of all senders, by tensor."""
    return {name: value for reply in replies for name, value in reply.checksums.items() if value is not None}
