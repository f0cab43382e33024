"""The `guess` task: find a number from hints. An episode of several turns; runs in the controller.

The prompt is ``A number from 12 to 27:`` and a newline. A turn of the policy is a number; the environment writes
``higher``, ``lower`` or ``no number``, and a newline, until the number is found or all guesses are used.
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
from moerl.sections import Count
from moerl.tasks.section import TaskSection

DEV_POOL = 512
"""Problems of the dev split; fewer if there are less than eight times as many problems."""
HELDOUT_POOL = 2048
"""Problems of the held-out split; fewer if there are less than four times as many problems."""
_FEWEST_PROBLEMS = 16
_NUMBER = re.compile(r"[0-9]{1,18}")
HINTS = ("higher", "lower", "no number")
"""Texts of the environment, without the newlines around them."""


class GuessTaskConfig(TaskSection):
    """A number to be found from hints, in several turns."""

    name: Literal["guess"] = Field(description="Task.")
    largest: Count = Field(description="Largest number.")
    span: Count = Field(description="Numbers from which one is to be found, less one.")
    max_guesses: Count = Field(description="Most guesses of an episode.")

    def open(self) -> GuessTask:
        return GuessTask(self)

    def check(self, *, sft_steps: int) -> None:
        num_problems = max(self.largest - self.span, 0) * (self.span + 1)
        if num_problems < _FEWEST_PROBLEMS:
            raise ConfigError(
                "task.largest and task.span: too few problems",
                seen=f"{num_problems} problems",
                expected=f"at least {_FEWEST_PROBLEMS}: (largest - span) x (span + 1)",
                remedy="raise task.largest",
            )


class GuessTask(EpisodeTask, DemonstrationTask):
    """Ranges with a number in each; all problems that there are, in a fixed order, cut into three splits."""

    open_vocabulary = False

    def __init__(self, config: GuessTaskConfig) -> None:
        self.config = config

    def size(self, split: str) -> int:
        return len(self._split(split))

    def prompts(self, split: str, count: int) -> list[Prompt]:
        """Returns the first `count` prompts of a split. `ConfigError` if the split has fewer."""
        problems = self._split(split)
        if not 0 <= count <= len(problems):
            raise ConfigError(
                f"the {split} split of guess does not have that many prompts",
                seen=count,
                expected=f"0 to {len(problems)}",
                remedy="ask for fewer prompts, or raise task.largest or task.span",
            )
        return [self._prompt(f"guess-{split}-{i}", *problem) for i, problem in enumerate(problems[:count])]

    async def play(self, prompt: Prompt, session: Session) -> Mapping[str, float]:
        """Returns `reward` and `accuracy`: 1 if the number was found, else 0; `guesses`: the number of turns."""
        secret, num_guesses, found = prompt.facts["secret"], 0, False
        while num_guesses < self.config.max_guesses and not found and not session.is_over:
            turn = await session.sample()
            num_guesses += 1
            is_number = turn.finish_reason is FinishReason.STOP and _NUMBER.fullmatch(turn.text)
            found = bool(is_number) and int(turn.text) == secret
            if not found:
                hint = HINTS[2] if not is_number else HINTS[0] if int(turn.text) < secret else HINTS[1]
                session.observe(f"\n{hint}\n")
        return {"reward": float(found), "accuracy": float(found), "guesses": float(num_guesses)}

    def demonstrations(self, prompts: Sequence[Prompt], seed: int) -> list[str]:
        """Returns a first guess for each prompt: any number of its range, a pure function of `seed` and the prompt."""
        return [
            str(random.Random(f"{seed}/{p.prompt_id}").randint(p.facts["low"], p.facts["low"] + self.config.span))
            for p in prompts
        ]

    def tokenizer_texts(self, count: int) -> list[str]:
        """Returns prompts, numbers and hints."""
        prompts = self.prompts("train", min(count, self.size("train")))
        hints = [f"\n{hint}\n" for hint in HINTS]
        return [*(text for p in prompts for text in (p.text, str(p.facts["secret"]))), *hints, "0123456789"]

    def _split(self, split: str) -> Sequence[tuple[int, int]]:
        splits = _splits(self.config.largest, self.config.span)
        if split not in splits:
            raise ConfigError(
                "unknown split", seen=split, expected=", ".join(splits), remedy="name one of these splits"
            )
        return splits[split]

    def _prompt(self, prompt_id: str, low: int, secret: int) -> Prompt:
        text = f"A number from {low} to {low + self.config.span}:\n"
        return Prompt(prompt_id, text, {"low": low, "secret": secret})


@cache
def _splits(largest: int, span: int) -> dict[str, Sequence[tuple[int, int]]]:
    """Returns the problems (low, secret) of each split, drawn without replacement."""
    problems = [(low, low + place) for low in range(1, largest - span + 1) for place in range(span + 1)]
    random.Random(0).shuffle(problems)
    num_dev, num_heldout = min(DEV_POOL, len(problems) // 8), min(HELDOUT_POOL, len(problems) // 4)
    return {
        "dev": problems[:num_dev],
        "heldout": problems[num_dev : num_dev + num_heldout],
        "train": problems[num_dev + num_heldout :],
    }
