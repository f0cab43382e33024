"""Ends of episodes: whatever an environment or an engine does, each episode ends once, and with its reason."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest
from episode_streams import FakeStream, check, ends, one_turn, reason, request, response
from episode_texts import TEXTS

from moerl.contract.episodes import Session, in_thread
from moerl.contract.ports import RolloutRecord, RolloutRequest
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import FinishReason, Trajectory
from moerl.episodes.limits import Patience
from moerl.episodes.play import Episode, play
from moerl.errors import ContractError, EngineError, RequestRefusedError, RewardError
from moerl.rollout.stream import left_out


def test_rewards_of_an_episode_are_those_of_its_records() -> None:
    (episode,) = ends(one_turn)
    assert [record.values["rewards"] for record in episode.records] == [{"reward": 1.0}]
    assert episode.error is None


def test_no_episodes_end_at_once() -> None:
    assert ends(one_turn, count=0) == []


class Panic(BaseException):
    """An error of native code, as Python sees it."""


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("problem", "expected", "cause"),
    [
        (KeyError("x"), Reason.EPISODE_FAILED, "KeyError: 'x'"),
        (SystemExit(3), Reason.EPISODE_FAILED, "SystemExit: 3"),
        (asyncio.CancelledError(), Reason.EPISODE_FAILED, "cancelled its own episode"),
        (RewardError("no reward", seen="nan"), Reason.REWARD_FAILED, "no reward: nan"),
        (TimeoutError("tool"), Reason.EPISODE_FAILED, "TimeoutError: tool"),
        (KeyboardInterrupt(), Reason.EPISODE_FAILED, "KeyboardInterrupt"),
        (GeneratorExit(), Reason.EPISODE_FAILED, "GeneratorExit"),
        (Panic(), Reason.EPISODE_FAILED, "Panic"),
        (MuteError(), Reason.EPISODE_FAILED, "MuteError"),
    ],
)
def test_an_environment_that_raises_is_refused_with_what_it_raised(
    problem: BaseException, expected: Reason, cause: str
) -> None:
    async def raises(session: Session) -> Mapping[str, float]:
        await session.sample()
        raise problem

    seen = reason(raises)
    assert seen[0] == expected
    assert cause in seen[1]


def test_an_exit_in_a_task_that_an_environment_started_ends_its_episode_alone() -> None:
    async def leaves() -> None:
        raise SystemExit(3)

    async def exits_once(session: Session) -> Mapping[str, float]:
        await session.sample()
        if not left:
            left.append(True)
            await asyncio.gather(leaves())
        return {"reward": 1.0}

    left: list[bool] = []
    found = ends(exits_once, count=3)
    assert sorted(str(each.error.seen) if each.error else "" for each in found) == ["", "", "SystemExit: 3"]


def test_an_environment_that_swallows_its_limit_is_refused_all_the_same() -> None:
    async def swallows(session: Session) -> Mapping[str, float]:
        await session.sample()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        return {"reward": 1.0}

    (episode,) = ends(swallows, turn_seconds=0.5)
    assert episode.error is not None
    assert episode.error.reason == Reason.EPISODE_FAILED


def test_a_broken_answer_refuses_the_episode_also_if_its_environment_swallows_the_error() -> None:
    def broken_once(asked: RolloutRequest) -> list[RolloutRecord]:
        is_first = asked.lineage.rollout_id.endswith("#0")
        return [response(asked, token_ids=np.full(6, 1000, np.int32)) if is_first else response(asked)]

    async def swallows(session: Session) -> Mapping[str, float]:
        with suppress(ContractError):
            await session.sample()
        await session.sample()
        return {"reward": 1.0}

    (episode,) = ends(swallows, FakeStream(broken_once))
    assert episode.error is not None
    assert episode.error.reason == Reason.TOKEN_ID_OUT_OF_RANGE
    assert episode.records[0].values["token_ids"].max() == 1000, "the answer is kept as it came"
    assert len(episode.records) == 2


def test_a_turn_that_the_engine_leaves_out_refuses_the_episode() -> None:
    def refused(record: RolloutRecord) -> Trajectory:
        assert record.refusal is not None
        raise record.refusal

    stream = FakeStream(lambda asked: [left_out(asked.lineage.rollout_id)])
    (episode,) = play([Episode(request(), one_turn)], stream, refused, TEXTS, turn_seconds=300.0)
    assert episode.error is not None
    assert episode.error.reason == Reason.NOTHING_SAMPLED


def test_an_engine_that_takes_no_request_is_the_callers_error_not_the_environments() -> None:
    class Gone(FakeStream):
        def submit(self, requests: Sequence[RolloutRequest]) -> None:
            if requests:
                raise EngineError("the engine is gone")
            super().submit(requests)

    with pytest.raises(EngineError, match="is gone"):
        ends(one_turn, Gone(), count=3)


def test_a_request_that_no_engine_takes_is_its_episodes_error() -> None:
    class Picky(FakeStream):
        def submit(self, requests: Sequence[RolloutRequest]) -> None:
            if requests:
                raise RequestRefusedError("request 'r0#0': prompt_ids", seen="300 tokens")
            super().submit(requests)

    assert "prompt_ids" in reason(one_turn, Picky())[1]


@pytest.mark.parametrize(("limit", "observed", "expected"), [(2, 0, "stop"), (None, 40, "length"), (None, 0, "stop")])
def test_a_session_counts_as_cut_off_if_its_tokens_were_used_up(
    limit: int | None, observed: int, expected: str
) -> None:
    async def one(session: Session) -> Mapping[str, float]:
        await session.sample(limit)
        if observed:
            session.observe("x" * observed)
        return {"reward": 1.0}

    cut = FakeStream(lambda asked: [response(asked, FinishReason.LENGTH if limit else FinishReason.STOP)])
    (episode,) = ends(one, cut)
    assert episode.records[0].values["finish_reason"] == expected


def test_a_blocking_call_in_a_thread_of_its_own_holds_up_neither_others_nor_the_end() -> None:
    async def blocks(session: Session) -> Mapping[str, float]:
        await session.sample()
        if not stuck:
            stuck.append(True)
            await in_thread(released.wait)
        return {"reward": await in_thread(lambda: 1.0)}

    stuck: list[bool] = []
    released = threading.Event()
    found = ends(blocks, count=2, turn_seconds=2.0)
    assert sorted(each.error is None for each in found) == [False, True]
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "environment")
    released.set()


def test_what_was_sampled_before_the_failure_is_kept_in_its_record() -> None:
    async def raises(session: Session) -> Mapping[str, float]:
        await session.sample()
        raise KeyError("x")

    (episode,) = ends(raises)
    assert [len(record.values["token_ids"]) for record in episode.records] == [6]


def test_an_environment_that_takes_too_long_is_refused_and_the_others_go_on() -> None:
    async def hangs_once(session: Session) -> Mapping[str, float]:
        turn = await session.sample()
        if not hung:
            hung.append(turn)
            await asyncio.sleep(3600)
        return {"reward": 1.0}

    hung: list[object] = []
    found = ends(hangs_once, count=3, turn_seconds=2.0)
    assert [episode.error is None for episode in found] == [True, True, False]
    assert found[-1].error is not None
    assert "no request for 2 s" in str(found[-1].error.seen)


class FakeTimeout:
    """Keeps the deadlines that it was given; None for none."""

    def __init__(self) -> None:
        self.deadlines: list[float | None] = []

    def reschedule(self, when: float | None) -> None:
        self.deadlines.append(when)

    def expired(self) -> bool:
        return False


def test_the_clock_of_an_environment_stands_still_while_any_of_its_sessions_samples() -> None:
    times = iter([10.0, 12.0, 20.0, 21.5])
    limit = FakeTimeout()
    patience = Patience(cast(Any, limit), 7.0, lambda: next(times))
    with patience.waiting():
        with patience.waiting():
            assert limit.deadlines == [None, None]
        assert limit.deadlines == [None, None]
    assert limit.deadlines == [None, None, 27.0]
    patience.ran()
    assert patience.environment_seconds == 2.0 + 1.5


def test_the_first_session_of_an_episode_has_the_seconds_of_its_environment() -> None:
    async def forks(session: Session) -> Mapping[str, float]:
        await session.sample()
        await session.fork().sample()
        return {"reward": 1.0}

    (episode,) = ends(forks)
    timings = [record.values["timings"] for record in episode.records]
    assert timings[0]["environment_seconds"] > 0.0
    assert "environment_seconds" not in timings[1]


def test_an_episode_without_a_sampled_token_is_refused() -> None:
    async def nothing(session: Session) -> Mapping[str, float]:
        return {"reward": 1.0}

    assert reason(nothing) == (Reason.EPISODE_FAILED, "no token was sampled")


@pytest.mark.parametrize("rewards", [{"accuracy": 1.0}, None, 7])
def test_an_episode_without_rewards_is_refused(rewards: Any) -> None:
    async def unrewarded(session: Session) -> Mapping[str, float]:
        await session.sample()
        return rewards

    assert reason(unrewarded)[0] in (Reason.REWARD_FAILED, Reason.EPISODE_FAILED)


def test_an_answer_that_breaks_the_contract_ends_its_episode_before_the_environment_sees_it() -> None:
    stream = FakeStream(lambda r: [response(r, token_ids=np.full(6, 1000, np.int32))])
    seen: list[object] = []

    async def looks(session: Session) -> Mapping[str, float]:
        seen.append(await session.sample())
        return {"reward": 1.0}

    assert reason(looks, stream)[0] == Reason.TOKEN_ID_OUT_OF_RANGE
    assert seen == []


def test_an_answer_behind_other_tokens_is_refused() -> None:
    def other_prompt(asked: RolloutRequest) -> list[RolloutRecord]:
        record = response(asked)
        ids = record.values["token_ids"].copy()
        ids[1] += 1
        return [RolloutRecord(record.rollout_id, "fake", 0, {**record.values, "token_ids": ids})]

    assert reason(one_turn, FakeStream(other_prompt)) == (Reason.TURN_BREAKS_OFF, "3 tokens, another one at place 1")


def test_an_answer_that_nobody_asked_for_is_refused_and_counts_for_no_episode() -> None:
    async def two_turns(session: Session) -> Mapping[str, float]:
        # What comes after the last turn of all may come too late to be seen.
        await session.sample()
        await session.sample()
        return {"reward": 1.0}

    def answers(asked: RolloutRequest) -> list[RolloutRecord]:
        is_first = asked.lineage.rollout_id == "r0#0"
        return [response(request("somebody")), response(asked), response(asked)] if is_first else [response(asked)]

    found = ends(two_turns, FakeStream(answers))
    assert sorted((each.rollout_id, getattr(each.error, "reason", "")) for each in found) == [
        ("r0", ""),
        ("r0#0", Reason.ROLLOUT_UNREQUESTED),
        ("somebody", Reason.ROLLOUT_UNREQUESTED),
    ]


def test_an_answer_that_comes_after_its_environment_gave_it_up_is_dropped() -> None:
    held: list[RolloutRequest] = []

    async def gives_up(session: Session) -> Mapping[str, float]:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.sample(), 0.01)
        stream.answers = lambda r: [response(held.pop()), response(r)]
        turn = await session.sample()
        return {"reward": float(len(turn.token_ids))}

    stream = FakeStream(lambda r: held.append(r) or [])
    (episode,) = ends(gives_up, stream)
    assert episode.error is None
    assert [r.lineage.rollout_id for r in stream.asked] == ["r0#0", "r0#1"]


def test_an_error_of_the_engine_is_raised_and_leaves_no_thread() -> None:
    stream = FakeStream()
    stream.error = EngineError("all servers are lost")
    with pytest.raises(EngineError, match="all servers"):
        ends(one_turn, stream, count=4)
    assert stream.is_closed


def test_a_caller_that_stops_cancels_the_rest() -> None:
    cancelled: list[bool] = []

    async def waits(session: Session) -> Mapping[str, float]:
        await session.sample()
        if len(stream.asked) > 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
        return {"reward": 1.0}

    stream = FakeStream()
    played = play(
        [Episode(request(), one_turn), Episode(request("r1"), waits)], stream, check, TEXTS, turn_seconds=60.0
    )
    assert next(played).rollout_id == "r0"
    played.close()
    assert stream.is_closed


def test_an_environment_that_does_not_let_itself_be_cancelled_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moerl.episodes.play._CANCEL_SECONDS", 0.05)
    sampled, may_block, blocks, released = (threading.Event() for _ in range(4))

    async def ends_behind_it(session: Session) -> Mapping[str, float]:
        await session.sample()
        await in_thread(sampled.wait)
        return {"reward": 1.0}

    async def stubborn(session: Session) -> Mapping[str, float]:
        await session.sample()
        sampled.set()
        await in_thread(may_block.wait)
        blocks.set()
        released.wait()
        return {"reward": 1.0}

    stream, episodes = FakeStream(), [Episode(request(), ends_behind_it), Episode(request("r1"), stubborn)]
    played = play(episodes, stream, check, TEXTS, turn_seconds=300.0)
    assert next(played).rollout_id == "r0"
    may_block.set()
    assert blocks.wait(60.0)
    played.close()
    assert stream.is_closed
    released.set()


def test_an_answer_that_comes_in_the_step_in_which_it_is_given_up_is_left_and_not_unrequested() -> None:
    async def gives_up(session: Session) -> Mapping[str, float]:
        for number in range(400):
            sampling = asyncio.ensure_future(session.fork(num_turns=0).sample(1))
            for _ in range(number % 40):
                await asyncio.sleep(0)
            await asyncio.sleep(number % 7 * 5e-5)
            sampling.cancel()
            await asyncio.wait({sampling})
        await session.sample()
        return {"reward": 1.0}

    (episode,) = ends(gives_up)
    assert episode.error is None
