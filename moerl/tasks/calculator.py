"""The `calculator` task: sums, differences and products, with a calculator at hand. Runs in the controller.

The prompt is ``Compute 473*829:`` and a newline. A turn of the policy is the answer, ``392117``, or a call of the
calculator, ``[473*829]``, behind which the environment writes `` 392117`` and a newline, or `` error``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

from pydantic import Field

from moerl.contract.episodes import EpisodeTask, Session
from moerl.contract.ports import DemonstrationTask, Prompt
from moerl.contract.trajectory import FinishReason
from moerl.errors import ConfigError
from moerl.sections import Count, CountOrZero, Share
from moerl.tasks.section import TaskSection, num_reserved, of_split, require_prompts
from moerl.tasks.tools.arithmetic import calculate

_OPERATORS = "+-*"
_CALL = re.compile(r"\[([^\[\]]*)\]")


class CalculatorTaskConfig(TaskSection):
    """Sums, differences and products of two numbers, with a calculator at hand."""

    name: Literal["calculator"] = Field(description="Task.")
    smallest: CountOrZero = Field(description="Smallest number.")
    largest: Count = Field(description="Largest number.")
    num_train: Count = Field(description="Training problems.")
    called_probability: Share = Field(
        description="Share of demonstrations that call the calculator; the others guess, and are mostly wrong."
    )
    max_calls: Count = Field(description="Most calls of an episode.")

    def open(self) -> CalculatorTask:
        return CalculatorTask(self)

    def check(self, *, sft_steps: int) -> None:
        available = self.num_problems
        needed = self.num_train + sum(num_reserved(available))
        if self.smallest > self.largest or needed > available:
            raise ConfigError(
                "task.smallest, task.largest and task.num_train: too few problems",
                seen=f"{available} problems",
                expected=f"{needed} or more: those of task.num_train, dev and heldout",
                remedy="raise task.largest, or lower task.num_train",
            )

    @property
    def num_problems(self) -> int:
        """All problems that there are: two numbers and an operator."""
        return max(self.largest - self.smallest + 1, 0) ** 2 * len(_OPERATORS)


class CalculatorTask(EpisodeTask, DemonstrationTask):
    """Problems drawn without replacement, cut into three splits."""

    open_vocabulary = False
    repeatable = True

    def __init__(self, config: CalculatorTaskConfig) -> None:
        self.config = config

    def size(self, split: str) -> int:
        return len(self._problems(split))

    def prompts(self, split: str, count: int) -> list[Prompt]:
        """Returns the first `count` prompts of a split. `ConfigError` if the split has fewer."""
        problems = self._problems(split)
        require_prompts("calculator", split, count, len(problems), "task.num_train")
        return [self._prompt(f"calculator-{split}-{i}", number) for i, number in enumerate(problems[:count])]

    async def play(self, prompt: Prompt, session: Session) -> Mapping[str, float]:
        """Returns `reward` and `accuracy`: 1 if the last turn is the answer, else 0; `tool_calls`: the number of calls
        that were answered."""
        num_calls, turn = 0, await session.sample(stop=("]",))
        while num_calls < self.config.max_calls and (call := _CALL.fullmatch(turn.text)):
            session.count_calls(1)
            if session.is_over:
                break
            num_calls += 1
            session.observe(f" {_result(call[1])}\n")
            if session.is_over:
                break
            turn = await session.sample(stop=("]",))
        is_right = turn.finish_reason is FinishReason.STOP and turn.text == prompt.facts["answer"]
        return {"reward": float(is_right), "accuracy": float(is_right), "tool_calls": float(num_calls)}

    def demonstrations(self, prompts: Sequence[Prompt], seed: int) -> list[str]:
        """Returns a call with its result and the answer behind it, with the configured probability, else a guess with
        as many digits as the answer: each a pure function of `seed` and its prompt."""
        return [self._demonstration(prompt, random.Random(f"{seed}/{prompt.prompt_id}")) for prompt in prompts]

    def tokenizer_texts(self, count: int) -> list[str]:
        """Returns the first `count` prompts with the calls that answer them, and a call that fails."""
        prompts = self.prompts("train", min(count, self.size("train")))
        return [*(f"{prompt.text}{_called(prompt)}" for prompt in prompts), "0123456789+-*() []", " error\n"]

    def _demonstration(self, prompt: Prompt, draw: random.Random) -> str:
        if draw.random() < self.config.called_probability:
            return _called(prompt)
        answer = prompt.facts["answer"]
        digits = "".join(draw.choice("0123456789") for _ in answer.lstrip("-"))
        return str(int(f"-{digits}" if answer.startswith("-") else digits))

    def _problems(self, split: str) -> Sequence[int]:
        return of_split(_splits(self.config.num_problems, self.config.num_train), split)

    def _prompt(self, prompt_id: str, number: int) -> Prompt:
        count = self.config.largest - self.config.smallest + 1
        pair, operator = divmod(number, len(_OPERATORS))
        left, right = divmod(pair, count)
        text = f"{self.config.smallest + left}{_OPERATORS[operator]}{self.config.smallest + right}"
        return Prompt(prompt_id, f"Compute {text}:\n", {"expression": text, "answer": calculate(text)})


def _called(prompt: Prompt) -> str:
    """Returns a whole response with a call: the environment's part, too, is a part of a demonstration."""
    return f"[{prompt.facts['expression']}] {prompt.facts['answer']}\n{prompt.facts['answer']}"


def _result(expression: str) -> str:
    try:
        return calculate(expression)
    except ValueError:
        return "error"


@cache
def _splits(available: int, num_train: int) -> dict[str, Sequence[int]]:
    """Returns the numbers of the problems of each split."""
    num_dev, num_heldout = num_reserved(available)
    drawn = random.Random(0).sample(range(available), num_dev + num_heldout + num_train)
    return {"dev": drawn[:num_dev], "heldout": drawn[num_dev:][:num_heldout], "train": drawn[num_dev + num_heldout :]}
