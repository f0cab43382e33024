"""The `reasoning_gym` task: problems of one of reasoning-gym's sets, in several tries. Runs in the controller.

The policy answers, the set's own score judges, and a wrong answer gets feedback and another try. As plain text a turn
is the answer; in a conversation it stands between ``<answer>`` and ``</answer>``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from moerl.contract.episodes import ExpertTask, SampledTurn, Session
from moerl.contract.ports import Chat, ChatTask, Prompt
from moerl.contract.trajectory import FinishReason
from moerl.errors import ConfigError, RewardError, as_config_error
from moerl.sections import Count, Positive, Share
from moerl.tasks.games.talk import Talk
from moerl.tasks.rewards.pool import RewardPool
from moerl.tasks.rewards.process import RewardProcess
from moerl.tasks.section import TaskSection, of_split, require_prompts

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

WRONG, NO_ANSWER = "That is wrong. Try again.", "There is no answer between <answer> and </answer>. Try again."
"""Texts of the environment."""
_WORDING = "\n\nPut the final answer between <answer> and </answer>."
_SEEDS = {"dev": 1, "heldout": 2, "train": 3}
_DRAWS_PER_PROBLEM = 4
"""Draws of a split for each of its problems: some questions are drawn again, or belong to another split."""


class ReasoningGymTaskConfig(TaskSection):
    """Problems of one of reasoning-gym's sets, in several tries."""

    name: Literal["reasoning_gym"] = Field(description="Task.")
    dataset: Annotated[str, Field(min_length=1)] = Field(description="Name of the set in reasoning-gym.")
    options: dict[str, Any] = Field(description="Settings of the set, by their names there.")
    max_tries: Count = Field(description="Most answers of an episode.")
    try_discount: Share = Field(description="Factor of the reward for each try after the first; 1 = none.")
    num_train: Count = Field(description="Training problems.")
    num_dev: Count = Field(description="Problems of the dev split.")
    num_heldout: Count = Field(description="Problems of the held-out split.")
    text_as: Literal["raw", "chat"] = Field(
        description="raw = plain lines; chat = messages of a user, by the model's chat template."
    )
    reward_workers: Annotated[int, Field(ge=1, le=1024)] = Field(description="Most processes that score answers.")
    reward_timeout_seconds: Positive = Field(description="Longest time that the score of one answer may take.")
    reward_memory_bytes: Annotated[int, Field(ge=2**27)] = Field(description="Most memory of one of these processes.")

    plan_values: ClassVar = {"dataset": "chain_sum"}

    def open(self) -> ReasoningGymTask:
        return ReasoningGymTask(self)


class ReasoningGymTask(ExpertTask, ChatTask):
    """Problems of a set, in splits that are disjoint by the text of the question."""

    repeatable = True

    def __init__(self, config: ReasoningGymTaskConfig) -> None:
        self.config = config
        self._sizes = {"dev": config.num_dev, "heldout": config.num_heldout, "train": config.num_train}
        self._splits: dict[str, list[Prompt]] = {}
        # Some sets make all problems at once, and those depend on the size.
        self._set_size = _DRAWS_PER_PROBLEM * max(self._sizes.values())
        settings = {"dataset": config.dataset, "size": self._set_size, "options": config.options}
        limits = (config.reward_timeout_seconds, config.reward_memory_bytes, "task.reward", settings)
        maker = "moerl.tasks.rewards.builtin:reasoning"
        self._pool = RewardPool([RewardProcess(maker, *limits) for _ in range(config.reward_workers)])
        self._sets = {split: self._set(seed) for split, seed in _SEEDS.items()}

    @property
    def has_chats(self) -> bool:
        return self.config.text_as == "chat"

    def write_prompts(self, write: Callable[[Prompt], Prompt | None]) -> None:
        for split in self._sizes:
            written = [write(prompt) for prompt in self._split(split)]
            self._splits[split] = [prompt for prompt in written if prompt is not None]

    def size(self, split: str) -> int:
        size = of_split(self._sizes, split)
        return len(self._splits[split]) if split in self._splits else size

    def prompts(self, split: str, count: int) -> list[Prompt]:
        """Returns the first `count` prompts of a split. `ConfigError` if the split has fewer."""
        require_prompts("reasoning_gym", split, count, self.size(split), f"task.num_{split}")
        return self._split(split)[:count]

    async def play(self, prompt: Prompt, session: Session) -> Mapping[str, float]:
        """Returns `reward`: the score of the last answer, times `try_discount` for each try after the first;
        `accuracy`: 1 if that score is 1, else 0; `tries`: the number of answers. An answer that was cut off scores
        0."""
        score, talk = 0.0, Talk.of(prompt, session)
        while talk.num_turns < self.config.max_tries and score < 1.0 and not session.is_over:
            answer = self._answer(await talk.sample())
            score = 0.0
            if answer is not None:
                score = (await asyncio.wrap_future(self._pool.submit(prompt, answer)))["reward"]
            if score < 1.0:
                await talk.hear(NO_ANSWER if answer is None and self.has_chats else WRONG)
        reward = score * self.config.try_discount ** (talk.num_turns - 1)
        return {"reward": reward, "accuracy": float(score >= 1.0), "tries": float(talk.num_turns)}

    def expert(self, prompt: Prompt, agent_id: str, text: str, seed: int) -> str:
        """Returns the answer that the set gives for the problem."""
        answer = prompt.facts["answer"]
        return f"<answer>{answer}</answer>" if self.has_chats else answer

    def check(self, *, num_demonstrations: int) -> None:
        """Raises `ConfigError` if a problem of a cold start has no answer to learn from: some sets have only scores."""
        for prompt in self.prompts("train", num_demonstrations):
            if not isinstance(prompt.facts["answer"], str):
                raise ConfigError(
                    f"task.dataset: {self.config.dataset} gives no answer to learn from",
                    seen=f"{prompt.facts['answer']!r} for {prompt.prompt_id}",
                    expected="a text",
                    remedy="set sft.steps=0, or take another set",
                )

    def try_rewards(self) -> None:
        """Scores one answer. Raises `ConfigError` if that fails."""
        try:
            self._pool.submit(self.prompts("train", 1)[0], "1").result()
        except RewardError as error:
            raise as_config_error(error, error.what) from error

    def tokenizer_texts(self, count: int) -> list[str]:
        """Returns questions with their answers, the texts of the environment, and the roles of messages."""
        prompts = self.prompts("train", min(count, self.size("train")))
        texts = [text for p in prompts for text in (p.facts["question"], str(p.facts["answer"]))]
        return [*texts, f"\n{WRONG}\n", NO_ANSWER, _WORDING, "user\nassistant\n"]

    def close(self) -> None:
        self._pool.close()

    def _answer(self, turn: SampledTurn) -> str | None:
        """Returns the answer of a turn; None if it has none."""
        if turn.finish_reason is not FinishReason.STOP:
            return None
        if not self.has_chats:
            return turn.text
        _, start, last = turn.text.rpartition("<answer>")
        answer, end, _ = last.partition("</answer>")
        return answer.strip() if start and end else None

    def _set(self, seed: int) -> ProceduralDataset:
        # reasoning-gym takes seconds to import, and every command reads the settings of all tasks.
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self.config.dataset not in DATASETS:
            raise ConfigError(
                "task.dataset: no such set",
                seen=self.config.dataset,
                expected="one of reasoning-gym's: " + ", ".join(sorted(DATASETS)),
                remedy="name one of these sets",
            )
        try:
            return reasoning_gym.create_dataset(
                self.config.dataset, seed=seed, size=self._set_size, **self.config.options
            )
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"task.options: reasoning-gym's set {self.config.dataset} refuses them",
                seen=f"{self.config.options}: {error}",
                expected="settings of that set",
                remedy="correct task.options",
            ) from error

    def _split(self, split: str) -> list[Prompt]:
        """Returns the prompts of a split; draws it, and those whose questions it must not have, when first needed."""
        for name in list(self._sizes)[: list(self._sizes).index(split) + 1]:
            if name not in self._splits:
                self._splits[name] = self._drawn(name)
        return self._splits[split]

    def _drawn(self, split: str) -> list[Prompt]:
        taken = {prompt.facts["question"] for prompts in self._splits.values() for prompt in prompts}
        drawn: list[Prompt] = []
        for index in range(self._set_size):
            if len(drawn) == self._sizes[split]:
                break
            entry = self._sets[split][index]
            if entry["question"] not in taken:
                taken.add(entry["question"])
                drawn.append(self._prompt(f"{self.config.dataset}-{split}-{len(drawn)}", split, index, entry))
        if len(drawn) < self._sizes[split]:
            raise ConfigError(
                f"task.num_{split}: reasoning-gym's set {self.config.dataset} has too few problems",
                seen=f"{len(drawn)} new ones in {self._set_size} draws",
                expected=f"{self._sizes[split]}",
                remedy=f"lower task.num_{split}, or choose task.options with more problems",
            )
        return drawn

    def _prompt(self, prompt_id: str, split: str, index: int, entry: Mapping[str, Any]) -> Prompt:
        question: str = entry["question"]
        facts = {"seed": _SEEDS[split], "index": index, "question": question, "answer": entry["answer"]}
        if not self.has_chats:
            return Prompt(prompt_id, f"{question}\n", facts)
        return Prompt(prompt_id, "", facts, Chat(({"role": "user", "content": question + _WORDING},)))
