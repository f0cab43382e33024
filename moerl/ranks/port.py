"""The port to a trainer's ranks, in any placement. Runs in the controller."""

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
        """Gives the engine of the next `Build` to a rank in this process, which hands buckets to it directly.

        Returns:
            False if the ranks run in other processes.
        """
        ...

    def ask(self, command: AnyCommand, frames: Sequence[bytes] = ()) -> list[Reply]:
        """Has every rank run a command, and returns the replies in rank order.

        Args:
            frames: with `Load`, one for each rank.

        Raises:
            MoerlError: the error that a rank raised, or a rank is gone or silent. Ranks that cannot go on are ended.
        """
        ...

    def tell(self, command: AnyCommand, frames: Sequence[bytes] = ()) -> None:
        """Sends a command as `ask` does, without waiting for the replies. Call `replies` before the next command;
        otherwise that command waits for them."""

    def replies(self) -> list[Reply]:
        """Waits for the replies to the command that `tell` sent, and returns them. Raises the errors of `ask`."""
        ...

    def close(self) -> None:
        """Ends the ranks; after an error at once."""
