"""Check that the texts of a task fit the tokenizer and the model, before anything is trained or sampled.

Runs in the controller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from moerl.config.schema import SftConfig
from moerl.contract.episodes import ExpertTask
from moerl.contract.ports import DemonstrationTask, Prompt, Task, WorkedTask
from moerl.contract.tokenizer import Tokenizer, encode_checked
from moerl.errors import ConfigError, as_config_error


@dataclass(frozen=True, slots=True)
class TextUse:
    """Use that a command makes of the texts of a task."""

    command: str
    """Name of the command."""
    task: str
    """Name of the task."""
    problems: Sequence[tuple[str, str, int]]
    """Key, split and number of the problems that the command asks for (`moerl.config.checks.wanted_problems`)."""
    sft: SftConfig
    """Section of the cold start."""
    seed: int
    """Seed of the run, by which demonstrations are drawn."""
    max_new_tokens: int
    """Longest response, in tokens."""
    max_positions: int
    """Longest sequence of the model, in tokens."""


def check_prompts(task: Task, tokenizer: Tokenizer, use: TextUse) -> None:
    """Encodes every text that a command may use, so that none of them stops a run that is under way.

    Raises:
        ConfigError: the tokenizer cannot represent a prompt or demonstration, a prompt leaves no room for
            `rollout.max_new_tokens`, or a demonstration is missing or too long. The error names the prompt.
    """
    lengths: dict[str, int] = {}
    for prompt in _prompts(use, task):
        lengths[prompt.prompt_id] = length = len(_encoded(task, prompt, prompt.text, tokenizer))
        _check_length(task, prompt, length, "rollout.max_new_tokens", use.max_new_tokens, use.max_positions)
    if use.command not in ("train", "sft") or use.sft.steps == 0:
        return
    for prompt, response in _demonstrations(use, task):
        length = lengths.get(prompt.prompt_id) or len(_encoded(task, prompt, prompt.text, tokenizer))
        num_learned = len(_encoded(task, prompt, response, tokenizer)) + 1
        _check_length(task, prompt, length, "demonstration and its end", num_learned, use.max_positions)


def _prompts(use: TextUse, task: Task) -> Iterable[Prompt]:
    """Yields the prompts that a command samples responses to; for a training run all training prompts, which it reaches
    given enough steps."""
    for key, split, count in use.problems:
        if key != "sft.num_examples":
            whole_split = use.command == "train" and split == "train"
            for prompt in task.prompts(split, task.size(split) if whole_split else count):
                # An evaluation can add the start of the work to held-out prompts.
                work = task.work_prefix(prompt) if split == "heldout" and isinstance(task, WorkedTask) else ""
                yield replace(prompt, text=prompt.text + work)


def _encoded(task: Task, prompt: Prompt, text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        return encode_checked(tokenizer, text)
    except ConfigError as error:
        raise as_config_error(error, f"{task.place(prompt)}: {error.what}") from error


def _check_length(
    task: Task, prompt: Prompt, num_prompt: int, follower: str, num_following: int, max_positions: int
) -> None:
    if num_prompt + num_following > max_positions:
        raise ConfigError(
            f"{task.place(prompt)}: longer than the model's sequences",
            seen=f"{num_prompt} tokens of prompt + {num_following} ({follower})",
            expected=f"at most {max_positions} tokens",
            remedy="shorten or remove the problem, lower rollout.max_new_tokens, or take a model for longer sequences",
        )


def _demonstrations(use: TextUse, task: Task) -> list[tuple[Prompt, str]]:
    """Returns the demonstrations of a cold start; none of an expert, whose episodes keep the limits of the prompts.
    Raises `ConfigError` if the task does not have that many."""
    if isinstance(task, ExpertTask):
        return []
    if not isinstance(task, DemonstrationTask):
        raise ConfigError(
            "sft.steps: the task has no demonstrations to learn from",
            seen=use.task,
            expected="a task that writes worked solutions, or a JSONL with responses (task.response_key)",
            remedy="set sft.steps=0, or give the task demonstrations",
        )
    prompts = task.prompts("train", use.sft.num_examples)
    return list(zip(prompts, task.demonstrations(prompts, use.seed), strict=True))
