"""The `guess` task: find a number from hints. An episode of several turns; runs in the controller.

The prompt is ``A number from 12 to 27:`` and a newline, or a message without it. A turn of the policy is a number; the
environment writes ``higher``, ``lower`` or ``no number`` until the number is found or all guesses are used.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Literal

from pydantic import Field

from moerl.contract.episodes import ExpertTask, Session
from moerl.contract.ports import Chat, ChatTask, Prompt
from moerl.contract.trajectory import FinishReason
from moerl.errors import ConfigError
from moerl.sections import Count
from moerl.tasks.games.talk import Talk
from moerl.tasks.section import DEV_POOL, HELDOUT_POOL, TaskSection, of_split, require_prompts

_FEWEST_RANGES = 8
_NUMBER = re.compile(r"[0-9]{1,18}")
_HINTED = re.compile(r"([0-9]+)[^0-9]*?(higher|lower)")
_EXPERT_LISTENS = 0.5
HINTS = ("higher", "lower", "no number")
"""Texts of the environment, without the newlines around them."""


class GuessTaskConfig(TaskSection):
    """A number to be found from hints, in several turns."""

    name: Literal["guess"] = Field(description="Task.")
    largest: Count = Field(description="Largest number.")
    span: Count = Field(description="Numbers from which one is to be found, less one.")
    max_guesses: Count = Field(description="Most guesses of an episode.")
    text_as: Literal["raw", "chat"] = Field(
        description="raw = plain lines; chat = messages of a user, by the model's chat template."
    )

    def open(self) -> GuessTask:
        return GuessTask(self)

    def check(self, *, sft_steps: int) -> None:
        num_ranges = max(self.largest - self.span, 0)
        if num_ranges < _FEWEST_RANGES:
            raise ConfigError(
                "task.largest and task.span: too few ranges",
                seen=f"{num_ranges} ranges: largest - span",
                expected=f"at least {_FEWEST_RANGES}",
                remedy="raise task.largest",
            )


class GuessTask(ExpertTask, ChatTask):
    """Ranges with a number in each: all problems that there are. Each split has ranges of its own."""

    open_vocabulary = False
    repeatable = True

    def __init__(self, config: GuessTaskConfig) -> None:
        self.config = config
        self._written: dict[int, str] | None = None

    @property
    def has_chats(self) -> bool:
        return self.config.text_as == "chat"

    def write_prompts(self, write: Callable[[Prompt], Prompt | None]) -> None:
        """Writes one prompt for each range: those of a range differ in their number alone."""
        written = {
            low: write(self._prompt("guess", low, low)) for low in range(1, self.config.largest - self.config.span + 1)
        }
        self._written = {low: prompt.text for low, prompt in written.items() if prompt is not None}

    def size(self, split: str) -> int:
        return len(self._split(split))

    def prompts(self, split: str, count: int) -> list[Prompt]:
        """Returns the first `count` prompts of a split. `ConfigError` if the split has fewer."""
        problems = self._split(split)
        require_prompts("guess", split, count, len(problems), "task.largest or task.span")
        return [self._prompt(f"guess-{split}-{i}", *problem) for i, problem in enumerate(problems[:count])]

    async def play(self, prompt: Prompt, session: Session) -> Mapping[str, float]:
        """Returns `reward`: the share of what was to be learned of the number, each turn's part credited to it;
        `accuracy`: 1 if it was found, else 0; `guesses`: the number of turns.

        With n numbers left that it can be, log2(1 + n) bits are to be learned; none are if it was found, so the reward
        is 1 then. A guess that earlier hints rule out earns nothing.
        """
        secret, talk = prompt.facts["secret"], Talk.of(prompt, session)
        left = range(prompt.facts["low"], prompt.facts["low"] + self.config.span + 1)
        bits = first_bits = _bits(left)
        while talk.num_turns < self.config.max_guesses and left and not session.is_over:
            turn = await talk.sample()
            is_number = turn.finish_reason is FinishReason.STOP and _NUMBER.fullmatch(turn.text)
            hint, left = _answer(int(turn.text) if is_number else None, secret, left)
            session.credit((bits - _bits(left)) / first_bits)
            bits = _bits(left)
            if left:
                await talk.hear(hint)
        return {"reward": 1.0 - bits / first_bits, "accuracy": float(not left), "guesses": float(talk.num_turns)}

    def expert(self, prompt: Prompt, agent_id: str, text: str, seed: int) -> str:
        """Returns any number that the hints leave, or, in every second turn or so, any of the range: there is something
        to learn."""
        draw = random.Random(f"{seed}/{prompt.prompt_id}/{text}")
        low, high = prompt.facts["low"], prompt.facts["low"] + self.config.span
        for number, hint in _HINTED.findall(text) if draw.random() < _EXPERT_LISTENS else ():
            low, high = (max(low, int(number) + 1), high) if hint == HINTS[0] else (low, min(high, int(number) - 1))
        return str(draw.randint(low, high))

    def tokenizer_texts(self, count: int) -> list[str]:
        """Returns questions, numbers and hints, and the roles of messages."""
        lows = {prompt.facts["low"] for prompt in self.prompts("train", min(count, self.size("train")))}
        questions = [f"{self._question(low)}\n" for low in sorted(lows)]
        return [*questions, *(f"\n{hint}\n" for hint in HINTS), "0123456789", "user\nassistant\n"]

    def _split(self, split: str) -> Sequence[tuple[int, int]]:
        problems, written = of_split(_splits(self.config.largest, self.config.span), split), self._written
        return problems if written is None else [each for each in problems if each[0] in written]

    def _question(self, low: int) -> str:
        return f"A number from {low} to {low + self.config.span}:"

    def _prompt(self, prompt_id: str, low: int, secret: int) -> Prompt:
        facts, question = {"low": low, "secret": secret}, self._question(low)
        if not self.has_chats:
            return Prompt(prompt_id, f"{question}\n", facts)
        text = "" if self._written is None else self._written[low]
        return Prompt(prompt_id, text, facts, Chat(({"role": "user", "content": question},)))


def _answer(guess: int | None, secret: int, left: range) -> tuple[str, range]:
    """Returns the hint to a guess, empty if it is the number, and the numbers that are left with the hint.

    Args:
        guess: None if there is no number.
        left: the numbers that were left before.
    """
    if guess is None:
        return HINTS[2], left
    if guess == secret:
        return "", range(0)
    if guess < secret:
        return HINTS[0], range(max(left.start, guess + 1), left.stop)
    return HINTS[1], range(left.start, min(left.stop, guess))


def _bits(left: range) -> float:
    return math.log2(1 + len(left))


@cache
def _splits(largest: int, span: int) -> dict[str, Sequence[tuple[int, int]]]:
    """Returns the problems (low, secret) of each split, in a fixed order. A range is in one split alone: in training
    one learns which numbers of a range are never asked for."""
    draw = random.Random(0)
    lows = list(range(1, largest - span + 1))
    draw.shuffle(lows)
    num_dev = max(min(DEV_POOL // (span + 1), len(lows) // 8), 1)
    num_heldout = max(min(HELDOUT_POOL // (span + 1), len(lows) // 4), 1)
    lows_of = {
        "dev": lows[:num_dev],
        "heldout": lows[num_dev : num_dev + num_heldout],
        "train": lows[num_dev + num_heldout :],
    }
    splits: dict[str, Sequence[tuple[int, int]]] = {}
    for split, chosen in lows_of.items():
        problems = [(low, low + place) for low in chosen for place in range(span + 1)]
        draw.shuffle(problems)
        splits[split] = problems
    return splits
