"""Turns of episodes that have not ended, as the journal keeps them: the new tokens of an answer, and enough to know it
again. Runs in the controller."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import FinishReason, KeptSets, Lineage, Trajectory, Turn

_PER_TOKEN = ("token_ids", "sampled", "rollout_logprobs", "kept_logmass", "policy_versions", "truncated")
_PER_ROW = ("expert_ids", "routed")


@dataclass(frozen=True, slots=True, eq=False)
class KeptTurn:
    """A turn that was sampled."""

    number: int
    """Number of the group of its episode."""
    prompt_checksum: int
    """Checksum of all tokens that were sent for it."""
    num_known: int
    """Tokens sent whose rows an earlier turn has; they are left out of `tokens`."""
    tokens: Trajectory
    """The answer from there on, under the rollout id of the turn."""

    @classmethod
    def of(cls, answer: Trajectory, request: RolloutRequest, number: int) -> KeptTurn:
        """Returns the new part of a checked answer to a request of a group."""
        start = request.known_rows
        offsets, (context, sampled) = answer.kept.offsets, answer.turns
        values: dict[str, Any] = {
            **{name: getattr(answer, name)[start:].copy() for name in (*_PER_TOKEN, *_PER_ROW)},
            "kept": KeptSets(offsets[start:] - offsets[start], answer.kept.ids[offsets[start] :].copy()),
            "turns": (_moved(context, -start), _moved(sampled, -start)),
        }
        return cls(number, _checksum(request.prompt_ids), start, replace(answer, **values))

    @property
    def newest_version(self) -> int:
        """Largest version of any token."""
        return int(self.tokens.policy_versions.max())

    def answers(self, request: RolloutRequest) -> bool:
        """Returns whether this turn was sampled for the same tokens, in the same place, under the same limit if it was
        cut."""
        if (self.num_known, self.prompt_checksum) != (request.known_rows, _checksum(request.prompt_ids)):
            return False
        room = request.max_new_tokens - self.tokens.num_sampled
        return room == 0 if self.tokens.finish_reason is FinishReason.LENGTH else room >= 0

    def values(self, request: RolloutRequest) -> dict[str, Any]:
        """Returns the `Trajectory` fields of the whole answer. Rows that an earlier turn has are not captured, as an
        engine may answer (`RolloutRequest.known_rows`)."""
        part, start = self.tokens, self.num_known
        found = {field.name: getattr(part, field.name) for field in fields(part)}
        for name in (*_PER_TOKEN, *_PER_ROW):
            new = found[name]
            before = np.zeros((start, *new.shape[1:]), new.dtype)
            found[name] = np.concatenate([before, new])
        found["token_ids"][:start] = request.prompt_ids[:start]
        found["policy_versions"][:start] = -1
        found["kept"] = KeptSets(np.concatenate([np.zeros(start, np.int64), part.kept.offsets]), part.kept.ids)
        found["turns"] = (replace(_moved(part.turns[0], start), start=0), _moved(part.turns[1], start))
        found["lineage"] = request.lineage
        return found


@dataclass(frozen=True, slots=True)
class TurnMemory:
    """Turns of the episodes that are asked for together."""

    known: dict[str, KeptTurn]
    """Turns of an earlier process of the run, by rollout id of the turn; one that is asked for is taken out."""
    keep: Callable[[Trajectory, RolloutRequest], None]
    """Callback with a checked answer to a turn and its request."""


def _moved(turn: Turn, by: int) -> Turn:
    return replace(turn, start=max(turn.start + by, 0), end=turn.end + by)


def _checksum(ids: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(ids, np.int32).tobytes())


class KeptTurns:
    """Turns that an earlier process of the run left in the journal, for its unfinished episodes."""

    def __init__(self, turns: Sequence[KeptTurn] = (), newest_version: int = -1) -> None:
        """Takes over turns; those with tokens of later versions than `newest_version` are of lost steps, and left out.
        Of several under one id the latest counts."""
        self._known = {turn.tokens.lineage.rollout_id: turn for turn in turns if turn.newest_version <= newest_version}
        self._episodes = {(turn.number, _episode(turn.tokens.lineage)) for turn in self._known.values()}

    def num_episodes(self, number: int) -> int:
        """Returns the number of episodes of a group of which a turn is known."""
        return sum(group == number for group, _ in self._episodes)

    def memory(self, numbers: Mapping[str, int], append: Callable[[KeptTurn], None]) -> TurnMemory:
        """Returns the memory of episodes that are asked for together.

        Args:
            numbers: numbers of their groups, by group id. append: called with each new turn.
        """
        return TurnMemory(
            self._known, lambda answer, asked: append(KeptTurn.of(answer, asked, numbers[asked.lineage.group_id]))
        )


def _episode(lineage: Lineage) -> str:
    """Returns the id of the episode of a turn, whose session may be `EPISODE~NUMBER`."""
    return re.sub(r"~[0-9]+\Z", "", lineage.session)
