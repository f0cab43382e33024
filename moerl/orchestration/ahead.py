"""The next batch is packed while one is trained, where it is there by then. Runs in the controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import is_
from types import TracebackType

from moerl.contract.trajectory import Trajectory
from moerl.orchestration.batches import Minibatch


class Ahead:
    """Packs batches, in a thread beside the training where it is told to.

    Args:
        upcoming: waits for the batch that is likely the next one; None where there is none to wait for any more.
        pack: a batch; depends on nothing else.
    """

    def __init__(
        self,
        upcoming: Callable[[], Sequence[Trajectory] | None],
        pack: Callable[[Sequence[Trajectory]], list[Minibatch]],
    ) -> None:
        self._upcoming, self._pack = upcoming, pack
        self._thread = ThreadPoolExecutor(1, "pack-ahead")
        self._begun: Future[tuple[Sequence[Trajectory], list[Minibatch]] | None] | None = None

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """`upcoming` has to return by then."""
        self._thread.shutdown()

    def begin(self) -> None:
        """Waits for the next batch and packs it, in the thread."""
        self._begun = self._thread.submit(self._pack_upcoming)

    def packed(self, batch: Sequence[Trajectory]) -> list[Minibatch]:
        """The minibatches of a batch, which is packed now unless it was before."""
        begun, self._begun = self._begun, None
        # What was wrong with a batch that is not this one is its own affair.
        found = begun.result() if begun is not None and begun.exception() is None else None
        if found is not None and len(found[0]) == len(batch) and all(map(is_, found[0], batch)):
            return found[1]
        return self._pack(batch)

    def _pack_upcoming(self) -> tuple[Sequence[Trajectory], list[Minibatch]] | None:
        batch = self._upcoming()
        return None if batch is None else (batch, self._pack(batch))
