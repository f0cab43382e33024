"""Packing of the next batch while the current one is trained, if the next one is sampled by then. Runs in the
controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import is_

from moerl.contract.trajectory import Trajectory
from moerl.orchestration.batches import Minibatch


class Ahead:
    """Packer of batches, which can pack one in its own thread.

    Args:
        upcoming: waits for the batch that is likely that of a version and returns it; None if there is none to wait
            for. Called in the thread.
        pack: packs a batch, by the batch alone. Called in the thread, or by `packed`.
    """

    def __init__(
        self,
        upcoming: Callable[[int], Sequence[Trajectory] | None],
        pack: Callable[[Sequence[Trajectory]], list[Minibatch]],
    ) -> None:
        self._upcoming, self._pack = upcoming, pack
        self._thread = ThreadPoolExecutor(1, "pack-ahead")
        self._begun: Future[tuple[Sequence[Trajectory], list[Minibatch]] | None] | None = None

    def close(self) -> None:
        """Waits for the thread; `upcoming` must return by then."""
        self._thread.shutdown()

    def begin(self, version: int) -> None:
        """Has the thread wait for the batch of a version and pack it; returns at once."""
        self._begun = self._thread.submit(self._pack_upcoming, version)

    def packed(self, batch: Sequence[Trajectory]) -> list[Minibatch]:
        """Returns the minibatches of a batch; packs it now unless the thread has packed it."""
        begun, self._begun = self._begun, None
        # An error of the thread counts only if it concerns this batch: packing the batch here raises it again.
        found = begun.result() if begun is not None and begun.exception() is None else None
        if found is not None and len(found[0]) == len(batch) and all(map(is_, found[0], batch)):
            return found[1]
        return self._pack(batch)

    def _pack_upcoming(self, version: int) -> tuple[Sequence[Trajectory], list[Minibatch]] | None:
        batch = self._upcoming(version)
        return None if batch is None else (batch, self._pack(batch))
