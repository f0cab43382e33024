"""Slots and window: which groups are sampled, which are trained next, and how old they can be by then.

A group is the responses to one prompt; groups are numbered as they are dispatched. P groups make a step, S is the
staleness asked for, W the window:

    slots      (S + 1) P; a group takes one when it is dispatched and gives it back when engines hold the weights that
               its training produced, or at once if it is filtered
    window     the W groups from the oldest one on that is not in a batch yet; finished groups of the window are taken,
               the oldest first, others wait
    bound      no token of a batch is older than S + ceil((W - 1) / P) versions, however many steps lie between two
               updates of engines: S + 1 at most, which are as many as slots last for

Why: a group that is dispatched as the n-th of those that are trained finds at most (S + 1) P - 1 others in slots, so
engines hold version ceil((n + 1) / P) - S - 1 at least. At most n + W - 1 groups are taken before it, so it is trained
by version floor((n + W - 1) / P) at most. The difference is largest for n + 1 a multiple of P. The window is the
one of MiniMax-M2 (arXiv 2605.26494, section 6.2.4) and torchtitan. Nothing is dropped for its age.

If too old groups are dropped instead, there is no window: all finished groups are taken, the oldest first, and the
bound is S.

Pure: no clock, no thread, no I/O. Runs in the controller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from moerl.errors import ConfigError, MoerlError


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queue.

    Raises:
        ConfigError: a window, dropping or rare updates without the staleness that they need, or a window and dropping.
    """

    groups_per_step: int
    """P, at least 1."""
    max_staleness: int = 0
    """S, in versions, at least 0."""
    window: int = 1
    """W, in groups, at least 1."""
    drops: bool = False
    """True if groups that are too old are dropped."""
    update_every: int = 1
    """Steps between two updates of engines."""

    def __post_init__(self) -> None:
        if self.window > 1 and not self.max_staleness:
            raise ConfigError(
                "buffer.window: nothing can pass a slow group if every step waits for all of its own",
                seen=f"window {self.window}, max_staleness 0",
                expected="a window of 1 without staleness",
                remedy="set buffer.window=1, or buffer.max_staleness to 1 or more",
            )
        if self.drops and (self.window > 1 or not self.max_staleness):
            raise ConfigError(
                "buffer.when_stale=drop: groups are trained as they finish, and none is older than max_staleness",
                seen=f"window {self.window}, max_staleness {self.max_staleness}",
                expected="a window of 1, and a staleness of at least 1",
                remedy="set buffer.window=1 and buffer.max_staleness to 1 or more, or buffer.when_stale=wait",
            )
        if not 1 <= self.update_every <= self.max_staleness + 1:
            raise ConfigError(
                "weights.every: slots would not last until engines are updated",
                seen=f"an update after {self.update_every} steps, max_staleness {self.max_staleness}",
                expected=f"1 to {self.max_staleness + 1}",
                remedy=f"set buffer.max_staleness={self.update_every - 1} or more, or a smaller weights.every",
            )

    @property
    def slots(self) -> int:
        """Groups that are sampled, wait or are trained at a time."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def max_age(self) -> int:
        """Versions between the oldest token of a batch and the version that is trained, at most."""
        return self.max_staleness - (1 - self.window) // self.groups_per_step

    @property
    def formula(self) -> str:
        """Formula of `max_age`, for messages."""
        return "max_staleness" if self.drops else "max_staleness + ceil((window - 1) / prompts_per_step)"

    def describe(self) -> list[str]:
        """Returns lines for the user; none without staleness."""
        if not self.max_staleness:
            return []
        window = ", and dropped if they get too old" if self.drops else f" in a window of {self.window}"
        return [
            f"groups are sampled during training, {self.slots} at a time{window}: no token that is trained is"
            f" older than {self.max_age} versions ({self.formula})"
        ]


class GroupState(StrEnum):
    """State of a group. running: sampled or to be sampled. finished: waits for its batch. taken: in a batch, its slot
    not given back. released: trained, kept for the window alone."""

    RUNNING = "running"
    FINISHED = "finished"
    TAKEN = "taken"
    RELEASED = "released"


class GroupQueue:
    """Queue of groups, which hands out their numbers, slot by slot, and the batches.

    Args:
        limits: as the run's configuration has them.
        first: number of the first group.

    Attributes:
        next_number: number of the group that is dispatched next; every smaller number was dispatched.
    """

    def __init__(self, limits: QueueLimits, first: int = 0) -> None:
        self.limits = limits
        self.next_number = first
        # In the order of dispatch, from the head of the window on; without filtered groups.
        self._states: dict[int, GroupState] = {}
        # Slots that are taken: all of them but those of released groups.
        self._num_held = 0

    @property
    def num_free(self) -> int:
        """Groups that may be dispatched now."""
        return self.limits.slots - self._num_held

    def count(self, *states: GroupState) -> int:
        """Returns how many groups are in these states."""
        return sum(state in states for state in self._states.values())

    def numbers(self, *states: GroupState) -> list[int]:
        """Returns the groups in these states, in the order of dispatch."""
        return [number for number, state in self._states.items() if state in states]

    def dispatch(self) -> int:
        """Takes a slot, and returns the number of the group that is to be sampled.

        Raises:
            MoerlError: no slot is free.
        """
        if self.num_free < 1:
            raise MoerlError("buffer: no slot is free", seen=self.limits.slots, expected="num_free of at least 1")
        number = self.next_number
        self.next_number += 1
        self._states[number] = GroupState.RUNNING
        self._num_held += 1
        return number

    def finish(self, number: int) -> None:
        """Marks a group as finished: it has all its responses and rewards."""
        self._move(number, GroupState.RUNNING, GroupState.FINISHED)

    def filter(self, number: int) -> None:
        """Removes a group that is not trained: its slot is free, and the window closes up."""
        self._require(number, GroupState.RUNNING, GroupState.FINISHED)
        del self._states[number]
        self._num_held -= 1

    def next_batch(self) -> list[int]:
        """Returns the groups that `take` would return."""
        taken, window_ends = list[int](), len(self._states)
        for place, (number, state) in enumerate(self._states.items()):
            if place >= window_ends or len(taken) == self.limits.groups_per_step:
                break
            if state == GroupState.FINISHED:
                taken.append(number)
            elif state == GroupState.RUNNING and not self.limits.drops:
                # All before it are trained or in this batch: the window begins with the first that is not.
                window_ends = min(window_ends, place + self.limits.window)
        return taken if len(taken) == self.limits.groups_per_step else []

    def take(self) -> list[int]:
        """Takes and returns the groups of the next batch, the oldest first; empty while fewer than P can be taken."""
        taken = self.next_batch()
        for number in taken:
            self._states[number] = GroupState.TAKEN
        return taken

    def release(self, numbers: Iterable[int]) -> None:
        """Frees the slots of these groups, of one batch or several: engines hold the weights trained on them."""
        for number in numbers:
            self._move(number, GroupState.TAKEN, GroupState.RELEASED)
            self._num_held -= 1
        # Groups before the head count in no window any more.
        for number in list(self._states):
            if self._states[number] == GroupState.RELEASED:
                del self._states[number]
            elif not self.limits.drops:
                break

    def _move(self, number: int, before: GroupState, after: GroupState) -> None:
        self._require(number, before)
        self._states[number] = after

    def _require(self, number: int, *states: GroupState) -> None:
        if self._states.get(number) not in states:
            raise MoerlError(
                f"buffer: group {number}",
                seen=self._states.get(number, "not in the queue"),
                expected=" or ".join(states),
            )

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Returns the state that a checkpoint between two steps keeps, as plain JSON. Groups of a batch count as
        released: they were trained, and a run that goes on from the checkpoint gives engines its weights first."""
        return {
            "next_number": self.next_number,
            "open": self.numbers(GroupState.RUNNING, GroupState.FINISHED),
            "released": self.numbers(GroupState.TAKEN, GroupState.RELEASED),
        }

    @classmethod
    def restored(cls, limits: QueueLimits, snapshot: Mapping[str, Any]) -> GroupQueue:
        """Returns the queue of a checkpoint. Groups that were not trained are to be sampled again, under their
        numbers."""
        queue = cls(limits)
        queue.next_number = snapshot["next_number"]
        states = dict.fromkeys(snapshot["open"], GroupState.RUNNING) | dict.fromkeys(
            snapshot["released"], GroupState.RELEASED
        )
        queue._states = {number: states[number] for number in sorted(states)}
        queue._num_held = len(snapshot["open"])
        return queue


def age(trained_version: int, sampled_versions: Sequence[int]) -> int:
    """Returns the versions between the oldest token and the version that is trained on it."""
    return trained_version - min(sampled_versions)


def check_ages(ages: Iterable[int], limits: QueueLimits) -> None:
    """Raises `MoerlError` if an age of a batch is above the bound."""
    oldest = max(ages, default=0)
    if oldest > limits.max_age:
        raise MoerlError(
            "a batch holds a token that is older than the settings allow",
            seen=f"{oldest} versions",
            expected=f"at most {limits.max_age}: {limits.formula}",
            remedy="this is an error of moerl or of an engine that answers with weights it should no longer hold; the"
            " weights are those of the last step, so resume the run",
        )
