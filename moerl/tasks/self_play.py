"""The `self_play` task: one policy writes sums, and solves them. Runs in the controller.

A prompt of the proposer is ``Continue the sum: 7 - 3``, and it goes on with more terms. Solvers, side by side, get the
sum as a problem of `task=chain_sum`. They are rewarded for the answer, the proposer for a sum that some of them solve
and others do not. The prompts of dev and heldout are problems of `task=chain_sum`, given to one solver.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from moerl.contract.episodes import ExpertTask, SampledTurn, Session
from moerl.contract.ports import Prompt
from moerl.contract.trajectory import FinishReason
from moerl.sections import Count, Digits, Share, Terms
from moerl.tasks.chain_sum import ChainSumTask, ChainSumTaskConfig, solve
from moerl.tasks.section import TaskSection

PROPOSER, SOLVER = "proposer", "solver"
"""Agents of the lineage of a session."""
_START_TERMS = 2
_QUESTION = "Continue the sum: "
_SUM = re.compile(r"[0-9]+(?: [+-] [0-9]+)+")


class SelfPlayTaskConfig(TaskSection):
    """Sums that the policy writes, and solves."""

    name: Literal["self_play"] = Field(description="Task.")
    min_terms: Terms = Field(description="Fewest terms of a sum.")
    max_terms: Terms = Field(description="Most terms of a sum.")
    min_digits: Digits = Field(description="Fewest digits of a term.")
    max_digits: Digits = Field(description="Most digits of a term.")
    num_train: Count = Field(description="Training prompts.")
    worked_probability: dict[int, Share] = Field(
        description="Per number of terms: share of the solvers of a cold start that show their work."
    )
    num_solvers: Annotated[int, Field(ge=2, le=64)] = Field(description="Solvers of a sum that the proposer writes.")

    @property
    def sums(self) -> ChainSumTaskConfig:
        """Settings of the sums."""
        values = self.model_dump(exclude={"name", "num_solvers"})
        return ChainSumTaskConfig(name="chain_sum", **values)

    def open(self) -> SelfPlayTask:
        return SelfPlayTask(self)

    def check(self, *, sft_steps: int) -> None:
        self.sums.check(sft_steps=sft_steps)


class SelfPlayTask(ExpertTask):
    """Starts of sums for the proposer in train, given sums for a solver in dev and heldout."""

    open_vocabulary = False
    repeatable = True

    def __init__(self, config: SelfPlayTaskConfig) -> None:
        self.config = config
        self._sums = ChainSumTask(config.sums)

    def size(self, split: str) -> int:
        return self._sums.size(split)

    def prompts(self, split: str, count: int) -> list[Prompt]:
        """Returns the first `count` prompts of a split: starts of sums in train, given sums in the others.
        `ConfigError` if the split has fewer."""
        prompts = self._sums.prompts(split, count)
        return [_start(prompt) for prompt in prompts] if split == "train" else prompts

    async def play(self, prompt: Prompt, session: Session) -> Mapping[str, float]:
        """Returns no rewards of the episode, since each session has its own.

        Solvers have `reward` and `accuracy`: 1 if the answer is right, else 0. The proposer has `valid`, 1 if its text
        is a sum within the bounds that is in neither dev nor heldout, else 0; `solved`, the share p of its solvers that
        were right; `terms`, the number of terms; and `reward`, 1 - |2 p - 1|, or 0 if the sum is not valid.
        """
        if "start" not in prompt.facts:
            await self._solve(prompt, session.fork(SOLVER, 0))
            return {}
        proposer = session.fork(PROPOSER, 0)
        problem = self._read(prompt, await proposer.sample())
        if problem is None:
            proposer.rewards |= {"reward": 0.0, "valid": 0.0}
            return {}
        solvers = [session.open(problem.text, SOLVER) for _ in range(self.config.num_solvers)]
        right = await asyncio.gather(*(self._solve(problem, solver) for solver in solvers))
        solved = sum(right) / len(right)
        proposer.rewards |= {
            "reward": 1.0 - abs(2.0 * solved - 1.0),
            "valid": 1.0,
            "solved": solved,
            "terms": float(problem.facts["num_terms"]),
        }
        return {}

    def expert(self, prompt: Prompt, agent_id: str, text: str, seed: int) -> str:
        """Returns the rest of the sum for the proposer, and for solvers a solution as `task=chain_sum` demonstrates
        it."""
        if agent_id == PROPOSER:
            return prompt.facts["rest"]
        (solution,) = self._sums.demonstrations([prompt], seed)
        return solution

    def tokenizer_texts(self, count: int) -> list[str]:
        """Returns the texts of `task=chain_sum`, and prompts of the proposer."""
        prompts = self.prompts("train", min(count, self.size("train")))
        return [*self._sums.tokenizer_texts(count), *(prompt.text for prompt in prompts)]

    async def _solve(self, problem: Prompt, solver: Session) -> float:
        """Has a solver answer, and rewards it; returns 1 if it was right, else 0."""
        turn = await solver.sample()
        rewards = self._sums.reward(problem, turn.text, turn.finish_reason).result()
        solver.rewards |= rewards
        return rewards["accuracy"]

    def _read(self, prompt: Prompt, turn: SampledTurn) -> Prompt | None:
        """Returns the problem that the proposer has written; None if it is no valid one."""
        expression = f"{prompt.facts['start']}{turn.text}"
        if turn.finish_reason is not FinishReason.STOP or not self._is_valid(expression):
            return None
        text = prompt.facts["problem"].replace(prompt.facts["expression"], expression)
        answer = str(solve(expression)[-1].result)
        num_terms = len(expression.split()) // 2 + 1
        return Prompt("", text, {"expression": expression, "answer": answer, "num_terms": num_terms})

    def _is_valid(self, expression: str) -> bool:
        bounds = self._sums.config
        if not _SUM.fullmatch(expression):
            return False
        terms = expression.split()[::2]
        digits = {len(term) for term in terms}
        return (
            bounds.min_terms <= len(terms) <= bounds.max_terms
            and len(digits) == 1
            and bounds.min_digits <= digits.pop() <= bounds.max_digits
            and not any(len(term) > 1 and term[0] == "0" for term in terms)
            and expression not in self._held_back
        )

    @cached_property
    def _held_back(self) -> frozenset[str]:
        """Sums of dev and heldout, on which nothing may be trained."""
        prompts = [each for split in ("dev", "heldout") for each in self._sums.prompts(split, self._sums.size(split))]
        return frozenset(prompt.facts["expression"] for prompt in prompts)


def _start(prompt: Prompt) -> Prompt:
    """Returns the proposer's prompt from the first terms of a given sum."""
    expression: str = prompt.facts["expression"]
    start = " ".join(expression.split()[: 2 * _START_TERMS - 1])
    facts = {**prompt.facts, "start": start, "rest": expression[len(start) :], "problem": prompt.text}
    return Prompt(prompt.prompt_id, f"{_QUESTION}{start}", facts)
