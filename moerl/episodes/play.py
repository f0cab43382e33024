"""Plays episodes on one stream of an engine.

    caller's thread    iterates `play`: runs the stream, has every answer checked, yields episodes that have ended
    episodes           an event loop with one coroutine per episode, which runs the environment

The caller waits for the stream, and an episode that ends wakes it. An episode waits for its answers as long as the
engine samples, and for its environment `turn_seconds` at most; then it is refused. An error of the stream is raised to
the caller. If the caller stops, the coroutines are cancelled and the stream is closed.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from moerl.contract.demands import shown
from moerl.contract.episodes import Message, Session
from moerl.contract.ports import RolloutRecord, RolloutRequest, RolloutStream
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import Trajectory
from moerl.episodes.session import TokenSession, Voice
from moerl.errors import ContractError, MoerlError, RewardError, closing

_CANCEL_SECONDS, _POLL_SECONDS = 5.0, 0.01

Check = Callable[[RolloutRecord], Trajectory]
"""Returns an answer as a checked trajectory; raises `ContractError`."""


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode to play."""

    request: RolloutRequest
    """Request for the first turn. Its `max_new_tokens` limits all tokens behind the prompt, and its rollout id is that
    of the episode."""
    play: Callable[[Session], Awaitable[Mapping[str, float]]]
    """Environment; returns the named rewards."""
    prefix: str = ""
    """Text at the end of the prompt that counts as the start of the first turn."""


@dataclass(frozen=True, slots=True, eq=False)
class PlayedEpisode:
    """An episode that has ended."""

    rollout_id: str
    """Id of the episode."""
    records: tuple[RolloutRecord, ...] = ()
    """One record per session in which something was sampled, with its rewards; with an error, those that could be
    made, without."""
    error: ContractError | None = None
    """Reason for which the episode is refused; None if it is whole."""


@dataclass(frozen=True, slots=True)
class Texts:
    """The tokenizer of a run, as sessions use it. Any thread."""

    encode: Callable[[str], list[int]]
    """Returns the ids of a text, without special tokens."""
    decode: Callable[[Sequence[int]], str]
    """Returns the text of ids."""
    render: Callable[[Sequence[Message], Sequence[Message], bool], str]
    """Writes messages as `Session.render` does, and may take seconds."""


def play(
    episodes: Sequence[Episode], stream: RolloutStream, check: Check, texts: Texts, *, turn_seconds: float
) -> Generator[PlayedEpisode]:
    """Yields every episode once, in the order in which they end.

    Args:
        stream: of the engine; closed at the end.
        check: called in the caller's thread.
        turn_seconds: as `EpisodeTask.turn_seconds`.

    Raises:
        EngineError: of the stream.
    """
    with closing(stream), closing(_Stage(stream, texts, turn_seconds, len(episodes))) as stage:
        stage.begin(episodes)
        for records in stream:
            for record in records:
                stage.deliver(record, check)
            yield from stage.ended()
        yield from stage.ended()


class _Stage:
    """Episodes that are being played, and their event loop."""

    def __init__(self, stream: RolloutStream, texts: Texts, turn_seconds: float, num_episodes: int) -> None:
        self._stream, self._texts, self._turn_seconds = stream, texts, turn_seconds
        self._num_open = num_episodes
        self._ended: queue.SimpleQueue[PlayedEpisode] = queue.SimpleQueue()
        # Of the loop alone: what each request that is under way resolves.
        self._asked: dict[str, asyncio.Future[Trajectory]] = {}
        # Requests that an environment stopped waiting for.
        self._left: set[object] = set()
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()

    def begin(self, episodes: Sequence[Episode]) -> None:
        """Starts all episodes; returns once each has asked for its first turn, or waits for its environment."""
        asyncio.run_coroutine_threadsafe(self._begin(episodes), self._loop).result()

    def deliver(self, record: RolloutRecord, check: Check) -> None:
        """Checks an answer and hands it to the episode that waits for it."""
        try:
            answer: Trajectory | ContractError = check(record)
        except ContractError as error:
            answer = error
        self._loop.call_soon_threadsafe(self._resolve, record, answer)

    def ended(self) -> Iterator[PlayedEpisode]:
        """Yields the episodes that have ended since the last call."""
        while True:
            try:
                yield self._ended.get_nowait()
            except queue.Empty:
                return

    def close(self) -> None:
        """Cancels what is left and ends the loop. An environment that holds on to the loop is left behind: its thread
        ends with the process."""
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(_CANCEL_SECONDS)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
        else:
            self._loop.close()

    # --- in the event loop -------------------------------------------------------------------------------------------

    async def _begin(self, episodes: Sequence[Episode]) -> None:
        if not episodes:
            self._stream.end()
        for episode in episodes:
            task = self._loop.create_task(self._run(episode))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.sleep(0)

    def _cancel(self) -> None:
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        self._stop_when_idle()

    def _stop_when_idle(self) -> None:
        if self._tasks:
            self._loop.call_later(_POLL_SECONDS, self._stop_when_idle)
        else:
            self._loop.stop()

    async def _ask(self, request: RolloutRequest) -> Trajectory:
        name = request.lineage.rollout_id
        self._asked[name] = answer = self._loop.create_future()
        try:
            self._stream.submit([request])
            return await answer
        finally:
            del self._asked[name]
            if not answer.done() or answer.cancelled():
                self._left.add(name)

    async def _render(self, messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
        return await asyncio.to_thread(self._texts.render, messages, tools, ask)

    def _resolve(self, record: RolloutRecord, answer: Trajectory | ContractError) -> None:
        name: object = record.rollout_id
        waiting = self._asked.get(name) if type(name) is str else None
        if waiting is None or waiting.done():
            if type(name) is not str or name not in self._left:
                self._ended.put(PlayedEpisode(name if type(name) is str else "", (record,), _unrequested(name)))
            return
        if isinstance(answer, ContractError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    async def _run(self, episode: Episode) -> None:
        """Plays one episode to its end, of whatever kind."""
        family: list[TokenSession] = []
        rewards: list[dict[str, float]] = []
        error: ContractError | None = None
        limit = asyncio.timeout(self._turn_seconds)
        patience = Patience(limit, self._turn_seconds)
        voice = Voice(self._ask, self._texts.encode, self._texts.decode, self._render, patience.waiting)
        try:
            async with limit:
                named = await episode.play(TokenSession(episode.request, voice, family, episode.prefix))
            rewards = [_checked_rewards({**named, **session.rewards}) for session in family if session.turns]
            error = None if rewards else _failed("no token was sampled")
        except ContractError as broken:
            error = broken
        except asyncio.CancelledError:
            if self._is_closing:
                raise
            error = _failed("the environment cancelled its own episode")
        except (Exception, SystemExit) as problem:  # noqa: BLE001 - code of users: refused with what it raised
            error = _failed(f"no request for {self._turn_seconds:g} s" if limit.expired() else problem)
        self._ended.put(_played(episode.request.lineage.rollout_id, family, rewards, error))
        self._num_open -= 1
        if self._num_open:
            self._stream.submit(())
        else:
            self._stream.end()


@dataclass(slots=True, eq=False)
class Patience:
    """Clock of an environment: stands still while any session of the episode waits for the engine."""

    limit: asyncio.Timeout
    """Limit of the episode."""
    seconds: float
    """Seconds that the environment has from the end of a wait on."""
    num_waiting: int = 0
    """Sessions that wait for the engine."""

    @contextmanager
    def waiting(self) -> Generator[None]:
        self.num_waiting += 1
        self.limit.reschedule(None)
        try:
            yield
        finally:
            self.num_waiting -= 1
            if not self.num_waiting and not self.limit.expired():
                self.limit.reschedule(asyncio.get_running_loop().time() + self.seconds)


def _played(
    rollout_id: str, family: Sequence[TokenSession], rewards: Sequence[dict[str, float]], error: ContractError | None
) -> PlayedEpisode:
    """Returns the end of an episode with the records of its sessions. rewards: of each of them, unless there is an
    error."""
    records: list[RolloutRecord] = []
    try:
        for number, session in enumerate(session for session in family if session.turns):
            values = session.record()
            if error is None:
                values["rewards"] = rewards[number]
            version = int(values["policy_versions"].max())
            records.append(RolloutRecord(session.rollout_id, values["engine_id"], version, values))
    except ContractError as broken:
        error = error or broken
    return PlayedEpisode(rollout_id, tuple(records), error)


def _checked_rewards(rewards: dict[str, float]) -> dict[str, float]:
    """Raises ContractError if there is no reward to train on; values are checked with the trajectory."""
    if "reward" not in rewards:
        raise ContractError(
            Reason.REWARD_FAILED, field="rewards", seen=sorted(map(str, rewards)), expected="one named reward"
        )
    return rewards


def _failed(problem: Exception | SystemExit | str) -> ContractError:
    if isinstance(problem, RewardError):
        seen, reason = ": ".join(filter(None, (problem.what, problem.seen))), Reason.REWARD_FAILED
    else:
        text = str(problem) if isinstance(problem, (str, MoerlError)) else f"{type(problem).__name__}: {problem}"
        seen, reason = text, Reason.EPISODE_FAILED
    remedy = "correct the environment, or raise its turn_seconds"
    return ContractError(
        reason, field="episode", seen=seen, expected="an episode that ends with rewards", remedy=remedy
    )


def _unrequested(name: object) -> ContractError:
    return ContractError(
        Reason.ROLLOUT_UNREQUESTED, field="rollout_id", seen=shown(name), expected="the id of a turn that was requested"
    )
