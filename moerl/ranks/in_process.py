"""One rank in the controller's own process: no command is encoded, nor a bucket for an engine that is there, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moerl.config.ranks import RankConfig
from moerl.contract.commands import AnyCommand, Reply
from moerl.contract.ports import PolicyEngine
from moerl.errors import ending
from moerl.ranks.worker import Worker
from moerl.trainer import groups


class InProcess:
    """`moerl.ranks.port.Ranks` for one rank. A command that hangs blocks the controller: there is no deadline.

    Args:
        watch: called when a microbatch begins, with the number of those before it and of all in the pass.
    """

    def __init__(self, config: RankConfig, watch: Callable[[int, int], None]) -> None:
        layout = groups.start(rank=0, rendezvous="", dims=config.parallel.dims, seed=config.seed)
        self._worker = Worker(config, layout, watch)
        self._engine: PolicyEngine | None = None
        self._replies: list[Reply] = []

    @property
    def peak_rss_bytes(self) -> Sequence[int]:
        return ()

    def adopt(self, engine: PolicyEngine | None) -> bool:
        self._engine = engine
        return True

    def tell(self, command: AnyCommand, frames: Sequence[bytes] = ()) -> None:
        self._replies = self.ask(command, frames)

    def replies(self) -> list[Reply]:
        return self._replies

    def ask(self, command: AnyCommand, frames: Sequence[bytes] = ()) -> list[Reply]:
        return [self._worker.run(command, frames[0] if frames else b"", self._engine)]

    def close(self) -> None:
        with ending(groups.stop):
            self._worker.close()
