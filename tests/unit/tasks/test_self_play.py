"""The task `self_play`: a proposer and its solvers, each session with rewards of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from moerl.config.load import load_config
from moerl.contract.episodes import ExpertTask, SampledTurn
from moerl.contract.ports import Prompt
from moerl.contract.trajectory import FinishReason
from moerl.tasks.self_play import SelfPlayTask


def opened(*overrides: str) -> SelfPlayTask:
    keys = ("recipe=tiny", "task=self_play", "task.num_train=200", "task.max_terms=4")
    task = load_config([*keys, *overrides], command="train").task.open()
    assert isinstance(task, SelfPlayTask)
    return task


@pytest.fixture(scope="module")
def task() -> SelfPlayTask:
    return opened()


class FakeSession:
    """Samples the next text of its agent; keeps all sessions of the episode."""

    def __init__(self, texts: dict[str, list[str]], reason: FinishReason, family: list[FakeSession], who: str) -> None:
        self.texts, self.reason, self.family, self.who = texts, reason, family, who
        self.text, self.rewards = "", dict[str, float]()
        family.append(self)

    async def sample(self, max_tokens: int | None = None, stop: Sequence[str] = ()) -> SampledTurn:
        return SampledTurn(self.texts[self.who].pop(0), (1,), self.reason)

    def fork(self, agent_id: str, num_turns: int) -> FakeSession:
        assert num_turns == 0
        return FakeSession(self.texts, self.reason, self.family, agent_id)

    def open(self, text: str, agent_id: str) -> FakeSession:
        other = FakeSession(self.texts, self.reason, self.family, agent_id)
        other.text = text
        return other


def played(
    task: SelfPlayTask, prompt: Prompt, proposal: str, *answers: str, reason: FinishReason = FinishReason.STOP
) -> list[FakeSession]:
    family: list[FakeSession] = []
    root = FakeSession({"proposer": [proposal], "solver": list(answers)}, reason, family, "")
    assert asyncio.run(task.play(prompt, cast(Any, root))) == {}
    return family[1:]


START = Prompt(
    "p", "Continue the sum: 7 - 3", {"start": "7 - 3", "expression": "7 - 3 + 1", "problem": "Sum: 7 - 3 + 1 =\n"}
)


@pytest.mark.parametrize(("num_right", "reward"), [(0, 0.0), (1, 0.5), (2, 1.0), (3, 0.5), (4, 0.0)])
def test_a_proposer_is_rewarded_for_a_sum_that_some_solvers_solve(
    task: SelfPlayTask, num_right: int, reward: float
) -> None:
    answers = ["#### 6"] * num_right + ["#### 5"] * (4 - num_right)
    proposer, *solvers = played(task, START, " + 2", *answers)
    assert proposer.rewards == {"reward": reward, "valid": 1.0, "solved": num_right / 4, "terms": 3.0}
    assert {solver.text for solver in solvers} == {"Sum: 7 - 3 + 2 =\n"}
    assert [solver.rewards["accuracy"] for solver in solvers] == [1.0] * num_right + [0.0] * (4 - num_right)
    assert all(solver.rewards["reward"] == solver.rewards["accuracy"] for solver in solvers)
    assert [proposer.who, *(solver.who for solver in solvers)] == ["proposer", *["solver"] * 4]


@pytest.mark.parametrize("text", [" + 1 + 1 + 1", "+ 2", " + 2 ", " + 12", " + x", " + 2\n", " + -2", "4"])
def test_what_is_no_sum_within_the_bounds_has_no_solvers_and_no_reward(task: SelfPlayTask, text: str) -> None:
    (proposer,) = played(task, START, text)
    assert proposer.rewards == {"reward": 0.0, "valid": 0.0}


def test_a_sum_that_was_cut_off_is_not_valid(task: SelfPlayTask) -> None:
    (proposer,) = played(task, START, " + 2", reason=FinishReason.LENGTH)
    assert proposer.rewards["valid"] == 0.0


@pytest.mark.parametrize("split", ["dev", "heldout"])
def test_a_sum_of_another_split_is_not_valid(task: SelfPlayTask, split: str) -> None:
    given = task.prompts(split, 1)[0]
    start = " ".join(given.facts["expression"].split()[:3])
    rest = given.facts["expression"][len(start) :]
    prompt = Prompt("p", "", {"start": start, "expression": "1 + 1", "problem": "1 + 1 ="})
    (proposer,) = played(task, prompt, rest)
    assert proposer.rewards["valid"] == 0.0


def test_longer_numbers_have_no_leading_zero_and_the_same_number_of_digits() -> None:
    task = opened("task.max_digits=2")
    prompt = Prompt("p", "", {"start": "17 - 13", "expression": "1", "problem": "1"})
    assert played(task, prompt, " + 20", *["#### 24"] * 4)[0].rewards["valid"] == 1.0
    assert played(task, prompt, " + 02")[0].rewards["valid"] == 0.0
    assert played(task, prompt, " + 2")[0].rewards["valid"] == 0.0


def test_train_has_starts_and_the_other_splits_have_given_sums_for_one_solver(task: SelfPlayTask) -> None:
    assert all(p.text == f"Continue the sum: {p.facts['start']}" for p in task.prompts("train", 50))
    given = task.prompts("heldout", 1)[0]
    (solver,) = played(task, given, "", f"#### {given.facts['answer']}")
    assert (solver.who, solver.rewards["accuracy"]) == ("solver", 1.0)


def test_the_expert_plays_both_agents(task: SelfPlayTask) -> None:
    assert isinstance(task, ExpertTask)
    for prompt in task.prompts("train", 20):
        rest = task.expert(prompt, "proposer", prompt.text, 0)
        assert f"{prompt.facts['start']}{rest}" == prompt.facts["expression"]
        solution = task.expert(prompt, "solver", "", 0)
        proposer, *solvers = played(task, prompt, rest, *[solution] * 4)
        assert (proposer.rewards["valid"], proposer.rewards["solved"]) == (1.0, 1.0)
        assert len(solvers) == 4


def test_a_tokenizer_sees_the_prompts_of_both_agents(task: SelfPlayTask) -> None:
    texts = task.tokenizer_texts(10**6)
    assert sum(text.startswith("Continue the sum: ") for text in texts) == 200
    assert any(text.endswith("=\n") for text in texts)
