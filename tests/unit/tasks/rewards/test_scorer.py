"""Several rewards of one response: the sum, each by its name, and one that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path

import pytest

from moerl.contract.ports import Prompt
from moerl.errors import RewardError
from moerl.tasks.rewards.make import make_scorer
from moerl.tasks.rewards.pool import RewardPool
from moerl.tasks.rewards.process import RewardProcess
from moerl.tasks.rewards.scorer import RewardScorer, WeightedReward
from moerl.tasks.rewards.section import ExactReward, FunctionReward, RegexReward, Reward

FUNCTIONS = """
import asyncio, time

def length(row, response):
    if response == "raise":
        raise KeyError("no such dish")
    return {"reward": len(response) / 10, "blanks": float(response.count(" "))}

waiting = 0

async def slow(row, response):
    global waiting
    waiting += 1
    await asyncio.sleep(1.0)
    seen, waiting = waiting, waiting - 1
    return float(seen)

def second(row, response):
    time.sleep(0.05)
    return 1.0
"""
PROMPT = Prompt("a:1", "2 + 3 =", {"answer": "5"})
Make = Callable[..., RewardScorer]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "dishes.py").write_text(FUNCTIONS)
    made: list[RewardScorer] = []

    def begin(accuracy: str | None = None, **rewards: Reward) -> RewardScorer:
        made.append(make_scorer(rewards, accuracy))
        return made[-1]

    yield begin
    for scorer in made:
        scorer.close()


def function(name: str, **keys: float | int | str) -> FunctionReward:
    return FunctionReward.model_validate({"kind": "function", "function": f"dishes:{name}", **keys})


def test_rewards_are_named_and_summed_by_their_weights(make: Make):
    right = ExactReward(kind="exact", column="answer")
    form = RegexReward(kind="regex", pattern=r"\d", weight=-0.5)
    scorer = make(right=right, form=form, long=function("length", weight=0.0))
    assert scorer.score(PROMPT, "a:1", "5").result() == {
        "reward": 0.5,
        "accuracy": 1.0,
        "right": 1.0,
        "right.unscored": 0.0,
        "form": 1.0,
        "form.unscored": 0.0,
        "long": 0.1,
        "long.blanks": 0.0,
    }
    assert make("form", right=right, form=form).score(PROMPT, "a:1", "6").result()["accuracy"] == 1.0


def test_one_reward_that_fails_fails_the_sum_and_is_named_and_counted(make: Make):
    scorer = make(right=ExactReward(kind="exact", column="answer"), long=function("length"))
    with pytest.raises(RewardError) as caught:
        scorer.score(PROMPT, "set:7", "raise").result()
    assert "reward long: reward function dishes:length raised at set:7; seen: KeyError: 'no such dish'" in str(
        caught.value
    )
    assert caught.value.reward == "long"
    assert scorer.score(PROMPT, "set:7", "5").result()["right"] == 1.0


def test_async_functions_of_a_batch_wait_together(make: Make):
    scorer = make(slow=function("slow", workers=1, batch_size=64))
    futures = [scorer.score(PROMPT, "a:1", str(i)) for i in range(64)]
    # The first may be a batch of its own; the others come while it waits.
    assert max(future.result()["reward"] for future in futures) > 8


class _Held:
    """Rewards that come when the test says so."""

    def __init__(self) -> None:
        self.futures: list[Future[dict[str, float]]] = []

    def submit(self, prompt: Prompt, response: str) -> Future[dict[str, float]]:
        self.futures.append(Future())
        return self.futures[-1]

    def close(self) -> None: ...


def test_a_reward_that_raises_in_the_run_itself_fails_one_sample():
    part = _Held()
    asked = RewardScorer([WeightedReward("a", 1.0, part)], "a").score(PROMPT, "set:7", "\ud800")
    part.futures[0].set_exception(UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"))
    with pytest.raises(RewardError, match=r"reward a: the reward raised at set:7; seen: UnicodeEncodeError: .*row: "):
        asked.result()


def test_no_response_escapes_a_penalty_by_being_unscored(make: Make):
    form = {"kind": "regex", "pattern": "(a+)+b", "timeout_seconds": 1.0}
    scorer = make(
        right=ExactReward(kind="exact", column="answer", pattern="(5)"),
        bonus=RegexReward.model_validate(form),
        penalty=RegexReward.model_validate({**form, "weight": -0.5}),
    )
    rewards = scorer.score(PROMPT, "a:1", "5 " + "a" * 40_000).result()
    assert (rewards["right"], rewards["bonus.unscored"], rewards["penalty.unscored"]) == (1.0, 1.0, 1.0)
    assert (rewards["bonus"], rewards["penalty"], rewards["reward"]) == (0.0, 0.0, 0.5)


def test_a_cancelled_sum_cancels_its_parts_and_a_cancelled_part_its_sum():
    parts = [_Held(), _Held()]
    scorer = RewardScorer([WeightedReward("a", 1.0, parts[0]), WeightedReward("b", 1.0, parts[1])], "a")
    first, second = (scorer.score(PROMPT, "a:1", "") for _ in range(2))
    assert first.cancel()
    assert [part.futures[0].cancelled() for part in parts] == [True, True]
    parts[0].futures[1].set_result({"reward": 1.0, "accuracy": 1.0})
    parts[1].futures[1].cancel()
    with pytest.raises(CancelledError):
        second.result(timeout=5)


def test_a_step_waits_for_its_rewards_no_longer_than_the_pool_size_says(make: Make):
    scorer = make(slow=function("second", workers=8))
    futures = [scorer.score(PROMPT, "a:1", "") for _ in range(64)]
    assert len(wait(futures, timeout=60).done) == 64
    assert len([t for t in threading.enumerate() if t.name == "reward"]) >= 8


def test_a_process_gets_what_waits_at_once_and_no_more_than_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "batches.py").write_text(
        "def many(rows, responses):\n    return [{'reward': float(row['n']), 'size': len(rows)} for row in rows]\n"
    )
    source = RewardPool([RewardProcess("batches:many", 60.0, 1 << 32, many=True)], batch_size=4)
    try:
        futures = [source.submit(Prompt("a", "", {"n": i}), "") for i in range(9)]
        results = [future.result() for future in futures]
        assert [each["reward"] for each in results] == [float(i) for i in range(9)]
        assert max(each["size"] for each in results) == 4
    finally:
        source.close()
