"""Episodes on a stream that answers as a test says."""

from __future__ import annotations

import queue
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from episode_texts import TEXTS
from factories import FULL, make_trajectory, values_of

from moerl.contract.episodes import Session
from moerl.contract.ports import RolloutRecord, RolloutRequest
from moerl.contract.trajectory import FinishReason, Lineage, Trajectory
from moerl.episodes.play import Episode, PlayedEpisode, play

NUM_TOKENS = 40
Environment = Callable[[Session], Awaitable[Mapping[str, float]]]


def response(request: RolloutRequest, reason: FinishReason = FinishReason.STOP, **changes: Any) -> RolloutRecord:
    """An answer of up to three tokens behind the prompt."""
    length = min(3, request.max_new_tokens)
    made = make_trajectory(
        np.random.default_rng(0), num_prompt=len(request.prompt_ids), num_sampled=length, sampling=FULL
    )
    ids = made.token_ids.copy()
    ids[: len(request.prompt_ids)] = request.prompt_ids
    values = values_of(made) | {"token_ids": ids, "lineage": request.lineage, "finish_reason": reason}
    return RolloutRecord(request.lineage.rollout_id, "fake", 0, values | changes)


class FakeStream:
    """Answers every request, by default at once; keeps the requests."""

    def __init__(self, answers: Callable[[RolloutRequest], Sequence[RolloutRecord]] = lambda r: [response(r)]) -> None:
        self.answers = answers
        self.asked: list[RolloutRequest] = []
        self.is_closed = False
        self.error: Exception | None = None
        self._records: queue.SimpleQueue[list[RolloutRecord] | None] = queue.SimpleQueue()

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self.asked += requests
        self._records.put([record for request in requests for record in self.answers(request)])

    def end(self) -> None:
        self._records.put(None)

    def __iter__(self) -> Iterator[list[RolloutRecord]]:
        while (records := self._records.get()) is not None:
            if self.error is not None:
                raise self.error
            yield records

    def close(self) -> None:
        self.is_closed = True


def check(record: RolloutRecord) -> Trajectory:
    return Trajectory(**record.values)


def request(name: str = "r0") -> RolloutRequest:
    return RolloutRequest(Lineage(name, "p", "g"), (5, 6, 7), FULL, NUM_TOKENS)


def ends(
    environment: Environment, stream: FakeStream | None = None, count: int = 1, turn_seconds: float = 300.0
) -> list[PlayedEpisode]:
    episodes = [Episode(request(f"r{i}"), environment) for i in range(count)]
    return list(play(episodes, stream or FakeStream(), check, TEXTS, turn_seconds=turn_seconds))


def reason(environment: Environment, stream: FakeStream | None = None) -> tuple[str, str]:
    """Returns reason and cause of the one episode, which was refused."""
    (episode,) = ends(environment, stream)
    assert episode.error is not None
    return str(episode.error.reason), str(episode.error.seen)


async def one_turn(session: Session) -> Mapping[str, float]:
    await session.sample()
    return {"reward": 1.0}
