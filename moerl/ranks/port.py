"""The port to a trainer's ranks, wherever they run. Runs in the controller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moerl.contract.commands import AnyCommand, Reply
from moerl.contract.ports import PolicyEngine


class Ranks(Protocol):
    """Ranks of a trainer, in one placement. A new placement implements this."""

    @property
    def peak_rss_bytes(self) -> Sequence[int]:
        """Peak resident memory of the ranks' processes, as in `Trainer.peak_rss_bytes`."""
        ...

    def adopt(self, engine: PolicyEngine | None) -> bool:
        """Hands the engine of the next `Build` to ranks of this process, which give it buckets themselves.

        Returns:
            False if ranks run elsewhere.
        """
        ...

    def ask(self, command: AnyCommand, frames: Sequence[bytes] = ()) -> list[Reply]:
        """Has every rank run a command; the replies in rank order.

        Args:
            frames: with `Load`, one for each rank.

        Raises:
            MoerlError: what a rank raised, or it is gone or silent. Ranks that cannot go on are ended.
        """
        ...

    def tell(self, command: AnyCommand, frames: Sequence[bytes] = ()) -> None:
        """Sends a command as `ask` does, without waiting for the replies. Call `replies` before the next command;
        otherwise that command waits for them."""
        ...

    def replies(self) -> list[Reply]:
        """Waits for the replies to the command that `tell` sent, and returns them. Raises the errors of `ask`."""
        ...

    def close(self) -> None:
        """Ends the ranks; after an error at once."""
        ...
