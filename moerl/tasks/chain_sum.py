"""The `chain_sum` task of reasoning-gym: short sums, with worked solutions. Runs in the controller.

A prompt is ``State the final answer to the following arithmetic problem: 0 - 2 + 5 =`` and a newline. A
worked response is ``0-2=-2;-2+5=3`` and a last line ``#### 3``; a bare one is that last line alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from moerl.contract.ports import DemonstrationTask, Prompt, WorkedTask
from moerl.contract.trajectory import FinishReason
from moerl.errors import ConfigError
from moerl.sections import Count, Digits, Share, Terms
from moerl.tasks.rewards import at_once
from moerl.tasks.section import TaskSection, num_reserved, of_split, require_prompts

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

_FIRST_SEED = {"train": 0, "dev": 1_000_000_000, "heldout": 7_000_000_000}
_SEEDS_PER_SPLIT = 1_000_000_000
_MAX_BARREN_DRAWS = 100_000
_FINAL_ANSWER = re.compile(r"(?:\A|\n)#### (-?[0-9]+)\Z")
_STEP = re.compile(r"[0-9][+-][0-9]+=-?[0-9]")


class ChainSumTaskConfig(TaskSection):
    """Sums and differences in a row, from reasoning-gym."""

    name: Literal["chain_sum"] = Field(description="Task.")
    min_terms: Terms = Field(description="Fewest terms of a problem.")
    max_terms: Terms = Field(description="Most terms of a problem.")
    min_digits: Digits = Field(description="Fewest digits of a term.")
    max_digits: Digits = Field(description="Most digits of a term.")
    num_train: Count = Field(description="Training problems.")
    worked_probability: dict[int, Share] = Field(
        description="Per number of terms: share of demonstrations that show their work."
    )

    def open(self) -> ChainSumTask:
        return ChainSumTask(self)

    def check(self, *, sft_steps: int) -> None:
        for what, low, high in (
            ("terms", self.min_terms, self.max_terms),
            ("digits", self.min_digits, self.max_digits),
        ):
            if low > high:
                raise ConfigError(
                    f"task.min_{what}: above task.max_{what}",
                    seen=f"{low} > {high}",
                    expected=f"min_{what} <= max_{what}",
                    remedy=f"raise task.max_{what} or lower task.min_{what}",
                )
        missing = [n for n in range(self.min_terms, self.max_terms + 1) if n not in self.worked_probability]
        if missing:
            raise ConfigError(
                "task.worked_probability: a number of terms has no probability",
                seen=f"terms {sorted(self.worked_probability)}",
                expected=f"every number from {self.min_terms} to {self.max_terms}",
                remedy=f"add task.worked_probability.{missing[0]}=0.5",
            )


@dataclass(frozen=True, slots=True)
class SolutionStep:
    """One step of a worked solution: `left` `operator` `right` = `result`."""

    left: int
    """First term, or the result of the step before."""
    operator: str
    """+ or -."""
    right: int
    """Next term, 0 or more."""
    result: int
    """Sum or difference, exact."""

    def __str__(self) -> str:
        return f"{self.left}{self.operator}{self.right}={self.result}"


def solve(expression: str) -> list[SolutionStep]:
    """Returns the steps that evaluate ``a + b - c ...`` (tokens separated by blanks) from left to right."""
    tokens = expression.split()
    running = int(tokens[0])
    steps = []
    for operator, text in zip(tokens[1::2], tokens[2::2], strict=True):
        right = int(text)
        result = running + right if operator == "+" else running - right
        steps.append(SolutionStep(running, operator, right, result))
        running = result
    return steps


def final_answer(response: str) -> str | None:
    """Returns the integer, as written, of a last line ``#### <int>``; None if the response does not end in one."""
    match = _FINAL_ANSWER.search(response)
    return match.group(1) if match else None


class ChainSumTask(DemonstrationTask, WorkedTask):
    """Sums whose splits are disjoint.

    The splits are disjoint by the text of the sum: dev and heldout are pools of fixed size, drawn from seeds of their
    own; train skips every sum of either pool. No split depends on requests for another one, and the first n prompts of
    a split are the same whatever n is.
    """

    open_vocabulary = False
    """The texts of this task need a small, known set of characters."""

    def __init__(self, config: ChainSumTaskConfig) -> None:
        self.config = config
        self._dataset = _sums(config, seed=0, size=1)
        available = num_problems(config)
        num_dev, num_heldout = num_reserved(available)
        most = available - num_dev - num_heldout
        if config.num_train > most:
            left = f"{available} problems less those of dev ({num_dev}) and heldout ({num_heldout})"
            raise ConfigError(
                "task.num_train is larger than the number of different problems",
                seen=config.num_train,
                expected=f"at most {most}: {left}",
                remedy="lower task.num_train, or raise task.max_terms or task.max_digits",
            )
        self._sizes = {"train": config.num_train, "dev": num_dev, "heldout": num_heldout}
        self._splits: dict[str, _Split] = {}

    def size(self, split: str) -> int:
        """Counts the prompts of a split."""
        return of_split(self._sizes, split)

    def prompts(self, split: str, count: int) -> list[Prompt]:
        """Returns the first `count` prompts of a split, drawn when needed. `ConfigError` if the split has fewer."""
        require_prompts(
            "chain_sum", split, count, self.size(split), "task.num_train, task.max_terms or task.max_digits"
        )
        if split not in self._splits:
            others = {"dev": (), "heldout": ("dev",), "train": ("dev", "heldout")}[split]
            reserved = {p.facts["expression"] for other in others for p in self.prompts(other, self._sizes[other])}
            self._splits[split] = _Split(split, self.config, reserved)
        return self._splits[split].first(count)

    def reward(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Future[dict[str, float]]:
        """Returns `reward` and `accuracy`: 1 if the response stopped by itself and its last line holds exactly the
        answer, by reasoning-gym's own verifier, too; else 0. `worked`: 1 if a step is written out, else 0; never
        trained on."""
        answer = final_answer(response)
        correct = (
            finish_reason is FinishReason.STOP
            and answer == prompt.facts["answer"]
            and self._dataset.score_answer(answer, dict(prompt.facts)) == 1.0
        )
        worked = _STEP.search(response) is not None
        return at_once({"reward": float(correct), "accuracy": float(correct), "worked": float(worked)})

    def worked_solution(self, prompt: Prompt) -> str:
        """Returns the steps, separated by semicolons, then the answer."""
        steps = ";".join(str(step) for step in solve(prompt.facts["expression"]))
        return f"{steps}\n{self.bare_answer(prompt)}"

    def bare_answer(self, prompt: Prompt) -> str:
        return f"#### {prompt.facts['answer']}"

    def demonstrations(self, prompts: Sequence[Prompt], seed: int) -> list[str]:
        """Returns solutions, worked with the configured probability, else bare: each a pure function of `seed` and its
        prompt."""
        chances = self.config.worked_probability
        draws = [random.Random(f"{seed}/{prompt.prompt_id}").random() for prompt in prompts]
        return [
            self.worked_solution(prompt) if draw < chances[prompt.facts["num_terms"]] else self.bare_answer(prompt)
            for prompt, draw in zip(prompts, draws, strict=True)
        ]

    def work_prefix(self, prompt: Prompt) -> str:
        """Returns the first number and operator of the sum: the start of the first step, without any result."""
        first = solve(prompt.facts["expression"])[0]
        return f"{first.left}{first.operator}"

    def tokenizer_texts(self, count: int) -> list[str]:
        """Returns prompts and worked solutions of the first `count` training prompts: a tokenizer is trained on
        them."""
        prompts = self.prompts("train", min(count, self.size("train")))
        return [text for prompt in prompts for text in (prompt.text, self.worked_solution(prompt))]


class _Split:
    """The different sums of one split, in the order of their seeds; none of `taken` is among them."""

    def __init__(self, name: str, config: ChainSumTaskConfig, taken: set[str]) -> None:
        self._name = name
        self._taken = taken
        self._prompts: list[Prompt] = []
        self._next_index = 0
        self._dataset = _sums(config, seed=_FIRST_SEED[name], size=_SEEDS_PER_SPLIT)

    def first(self, count: int) -> list[Prompt]:
        while len(self._prompts) < count:
            entry = self._next_new()
            known = entry["metadata"]
            facts = {"expression": known["expression"], "answer": entry["answer"], "num_terms": known["num_terms"]}
            prompt_id = f"chain_sum-{self._name}-{len(self._prompts)}"
            self._prompts.append(Prompt(prompt_id, entry["question"] + "\n", facts))
        return self._prompts[:count]

    def _next_new(self) -> dict[str, Any]:
        for _ in range(_MAX_BARREN_DRAWS):
            entry = self._dataset[self._next_index]
            self._next_index += 1
            expression = entry["metadata"]["expression"]
            if expression not in self._taken:
                self._taken.add(expression)
                return entry
        raise ConfigError(
            f"chain_sum finds no new problem for the {self._name} split",
            seen=f"{len(self._prompts)} problems, then {_MAX_BARREN_DRAWS} repetitions in a row",
            expected="a new problem now and then",
            remedy="ask for fewer prompts, or raise task.max_terms or task.max_digits",
        )


def num_problems(config: ChainSumTaskConfig) -> int:
    """Counts the different sums of a configuration."""
    total = 0
    for digits in range(config.min_digits, config.max_digits + 1):
        numbers = 10 if digits == 1 else 9 * 10 ** (digits - 1)
        total += sum(numbers**n * 2 ** (n - 1) for n in range(config.min_terms, config.max_terms + 1))
    return total


def _sums(config: ChainSumTaskConfig, *, seed: int, size: int) -> ProceduralDataset:
    # reasoning-gym takes seconds to import, and every command reads the settings of all tasks.
    import reasoning_gym

    bounds = config.model_dump(include={"min_terms", "max_terms", "min_digits", "max_digits"})
    return reasoning_gym.create_dataset("chain_sum", seed=seed, size=size, **bounds)
