"""Plays episodes on one stream of an engine.

    caller's thread    iterates `play`: runs the stream, has every answer checked, yields episodes that have ended
    episodes           an event loop with one coroutine per episode, which runs the environment

The caller waits for the stream, and an episode that ends wakes it. An episode waits for its answers as long as the
engine samples, and for its environment `turn_seconds` at most; then it is refused. Whatever an environment raises, its
episode ends. An error of the engine is raised to the caller. If the caller stops, the coroutines are cancelled and the
stream is closed; an environment that holds on to the loop is left behind, and its thread ends with the process.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from moerl.config.rollouts import EpisodeConfig
from moerl.contract.episodes import Session
from moerl.contract.ports import RolloutRecord, RolloutRequest, RolloutStream
from moerl.contract.reasons import Reason
from moerl.contract.requirements import shown
from moerl.contract.trajectory import Trajectory
from moerl.episodes.door import open_door
from moerl.episodes.join import check_answer
from moerl.episodes.limits import Meter, Patience
from moerl.episodes.session import Texts, TokenSession, Voice
from moerl.errors import ContractError, EngineError, MoerlError, RequestRefusedError, RewardError, closing
from moerl.http.server import JsonServer

NO_LIMITS = EpisodeConfig()
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
    """Id of the episode; of an answer that was not requested its own, or empty."""
    records: tuple[RolloutRecord, ...] = ()
    """One record per session in which something was sampled, with its rewards; with an error, the answer that broke
    the contract, if one did, and the sessions without rewards."""
    error: ContractError | None = None
    """Reason for which the episode is refused; None if it is whole."""
    failed_reward: str | None = None
    """Name of the reward that failed, may be empty; None if none did."""
    stopped_by: str = ""
    """Limit that kept the episode from another turn, by its name in `EpisodeConfig`; empty if none did."""


def play(
    episodes: Sequence[Episode],
    stream: RolloutStream,
    check: Check,
    texts: Texts,
    *,
    turn_seconds: float,
    limits: EpisodeConfig = NO_LIMITS,
) -> Generator[PlayedEpisode]:
    """Yields every episode once, in the order in which they end; an answer that was not requested as a refused one.

    Args:
        stream: of the engine; closed at the end.
        check: called in the caller's thread.
        turn_seconds: as `EpisodeTask.turn_seconds`.
        limits: of each episode.

    Raises:
        EngineError: of the stream.
    """
    with closing(stream), closing(_Stage(episodes, stream, texts, turn_seconds, limits)) as stage:
        for records in stream:
            for record in records:
                stage.deliver(record, check)
            yield from stage.ended()
        yield from stage.ended()


_Answer = tuple[RolloutRecord, Trajectory | ContractError]
"""Answer as it came and as it was checked, or the reason for which it breaks the contract."""


class _Play:
    """One episode that is being played. Belongs to the event loop."""

    def __init__(self, stage: _Stage, episode: Episode) -> None:
        self._stage, self._episode = stage, episode
        self._family: list[TokenSession] = []
        self._broken: tuple[RolloutRecord, ContractError] | None = None
        self._meter = Meter(stage.limits)

    async def run(self) -> PlayedEpisode:
        """Plays it to its end, of whatever kind."""
        seconds = self._stage.turn_seconds
        limit = asyncio.timeout(seconds)
        patience = Patience(limit, seconds, asyncio.get_running_loop().time)
        voice = Voice(self._ask, self._stage.texts, patience.waiting, partial(open_door, self._stage.server))
        rewards: list[dict[str, float]] = []
        error, failed_reward = None, None
        try:
            async with limit:
                root = TokenSession(self._episode.request, voice, self._meter, self._family, self._episode.prefix)
                named = await self._episode.play(root)
            # Also if the environment has caught the error of its own limit.
            error = _failed(f"no request for {seconds:g} s") if limit.expired() else None
            rewards = [{**named, **each.rewards} for each in self._family if each.turns]
            for each in rewards:
                if "reward" not in each:  # values are checked with the trajectory
                    raise ContractError(
                        Reason.REWARD_FAILED, field="rewards", seen=sorted(map(str, each)), expected="one named reward"
                    )
        except ContractError as broken:
            error = broken
        except RewardError as failed:
            failed_reward = failed.reward
            why = ": ".join(filter(None, (failed.what, failed.seen)))
            error = ContractError(Reason.REWARD_FAILED, field="rewards", seen=why, expected="finite rewards")
        except BaseException as problem:
            if self._stage.is_closing:
                raise
            error = _failed(f"no request for {seconds:g} s" if limit.expired() else _text(problem))
        if error is None and not rewards:
            error = _failed("no token was sampled")
        patience.ran()
        records: list[RolloutRecord] = []
        if self._broken is not None:
            record, error = self._broken
            records.append(record)
        try:
            for number, session in enumerate(each for each in self._family if each.turns):
                values = session.record()
                if error is None:
                    values["rewards"] = rewards[number]
                if not number:
                    values["timings"] |= {"environment_seconds": patience.environment_seconds}
                version = int(values["policy_versions"].max())
                records.append(RolloutRecord(session.rollout_id, values["engine_id"], version, values))
        except ContractError as broken:
            error = error or broken
        name, stopped_by = self._episode.request.lineage.rollout_id, self._meter.stopped_by
        return PlayedEpisode(name, tuple(records), error, failed_reward, stopped_by)

    async def _ask(self, request: RolloutRequest) -> Trajectory:
        record, turn = await self._stage.ask(request)
        try:
            if isinstance(turn, ContractError):
                raise turn
            check_answer(turn, request.prompt_ids)
        except ContractError as error:
            # The episode is refused, whatever the environment makes of the error.
            self._broken = self._broken or (record, error)
            raise
        return turn


@dataclass(eq=False)
class _Stage:
    """Episodes that are being played, and their event loop."""

    episodes: Sequence[Episode]
    stream: RolloutStream
    texts: Texts
    turn_seconds: float
    limits: EpisodeConfig
    is_closing: bool = False

    def __post_init__(self) -> None:
        self.server = JsonServer()
        self._ended: queue.SimpleQueue[PlayedEpisode | Exception] = queue.SimpleQueue()
        # Of the loop alone: what each request that is under way resolves, and those that nobody waits for any more.
        self._asked: dict[str, asyncio.Future[_Answer]] = {}
        self._left: set[str] = set()
        self._tasks: set[asyncio.Task[PlayedEpisode]] = set()
        self._loop = asyncio.new_event_loop()
        self._loop.call_soon(self._begin)
        self._thread = threading.Thread(target=self._serve, name="episodes", daemon=True)
        self._thread.start()

    def deliver(self, record: RolloutRecord, check: Check) -> None:
        """Checks an answer and hands it to the episode that waits for it."""
        try:
            answer: Trajectory | ContractError = check(record)
        except ContractError as error:
            answer = error
        self._loop.call_soon_threadsafe(self._resolve, record, answer)

    def ended(self) -> Iterator[PlayedEpisode]:
        """Yields the episodes that have ended since the last call. Raises an error of the engine."""
        while not self._ended.empty():  # nobody else takes any
            found = self._ended.get()
            if isinstance(found, Exception):
                raise found
            yield found

    def close(self) -> None:
        """Cancels what is left and ends the loop."""
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(_CANCEL_SECONDS)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
        else:
            self._loop.close()

    # --- in the event loop -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                self._loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):
                # A task of an environment raised it; whoever awaits that task gets it, too.
                continue

    def _begin(self) -> None:
        for episode in self.episodes:
            task = self._loop.create_task(_Play(self, episode).run())
            self._tasks.add(task)
            task.add_done_callback(partial(self._take, episode))
        if not self.episodes:
            self.stream.end()

    def _take(self, episode: Episode, task: asyncio.Task[PlayedEpisode]) -> None:
        """Takes the end of an episode."""
        self._tasks.discard(task)
        if self.is_closing:
            return
        problem = asyncio.CancelledError() if task.cancelled() else task.exception()
        name = episode.request.lineage.rollout_id
        self._ended.put(task.result() if problem is None else PlayedEpisode(name, error=_failed(_text(problem))))
        if self._tasks:
            self.stream.submit(())
        else:
            self.stream.end()

    def _cancel(self) -> None:
        self.is_closing = True
        for task in self._tasks:
            task.cancel()
        self._stop_when_idle()

    def _stop_when_idle(self) -> None:
        if self._tasks:
            self._loop.call_later(_POLL_SECONDS, self._stop_when_idle)
        else:
            closed = self._loop.create_task(self.server.close())
            closed.add_done_callback(lambda done: self._loop.stop())

    async def ask(self, request: RolloutRequest) -> _Answer:
        """Returns the answer to a request."""
        name = request.lineage.rollout_id
        self._asked[name] = answer = self._loop.create_future()
        try:
            self.stream.submit([request])
            return await answer
        except RequestRefusedError:
            raise
        except EngineError as error:
            # Not of this request: the caller raises it.
            self._ended.put(error)
            self.stream.submit(())
            raise
        finally:
            del self._asked[name]
            if not answer.done() or answer.cancelled():
                self._left.add(name)

    def _resolve(self, record: RolloutRecord, answer: Trajectory | ContractError) -> None:
        name: object = record.rollout_id
        waiting = self._asked.get(name) if type(name) is str else None
        if waiting is not None and waiting.cancelled():
            return  # given up in this very step: whoever asked has not run yet
        if waiting is None or waiting.done():
            if type(name) is not str or name not in self._left:
                expected = "the id of a turn that was requested"
                error = ContractError(
                    Reason.ROLLOUT_UNREQUESTED, field="rollout_id", seen=shown(name), expected=expected
                )
                self._ended.put(PlayedEpisode(name if type(name) is str else "", (record,), error))
        else:
            waiting.set_result((record, answer))


def _failed(seen: str) -> ContractError:
    return ContractError(
        Reason.EPISODE_FAILED,
        field="episode",
        seen=seen,
        expected="an episode that ends with rewards",
        remedy="correct the environment, or raise its turn_seconds",
    )


def _text(problem: BaseException) -> str:
    """Returns what an environment raised, also if it cannot say so itself."""
    if isinstance(problem, asyncio.CancelledError):
        return "the environment cancelled its own episode"
    try:
        return str(problem) if isinstance(problem, MoerlError) else f"{type(problem).__name__}: {problem}"
    except Exception:  # noqa: BLE001 - code of users
        return type(problem).__name__
