"""What a command asks of its task, checked before anything is trained or sampled. Runs in the controller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from moerl.config.schema import RunConfig
from moerl.contract.ports import DemonstrationTask, Prompt, Task, WorkedTask
from moerl.errors import ConfigError
from moerl.tasks.jsonl import JsonlTask
from moerl.tasks.tokenizer import encode_checked


def check_problems(config: RunConfig, task: Task, command: str) -> None:
    """Raises `ConfigError` where the task has fewer problems than `command` asks of it; the remedy lists all keys."""
    lacking = [
        (key, count, split, task.size(split))
        for key, split, count in _wanted_problems(config, command)
        if count > task.size(split)
    ]
    if not lacking:
        return
    key, count, split, size = lacking[0]
    settings = " ".join(f"{key}={size}" for key, _, _, size in lacking)
    raise ConfigError(
        f"{key}: the task has fewer problems",
        seen=count,
        expected=f"at most {size}, the problems of its {split} split",
        remedy="give the task more problems" + (f", or add {settings}" if all(each[3] for each in lacking) else ""),
    )


def check_prompts(
    config: RunConfig, task: Task, tokenizer: PreTrainedTokenizerBase, command: str, *, max_positions: int
) -> None:
    """Encodes every text that `command` may use, so that none of them stops a run that is under way.

    Args:
        max_positions: longest sequence of the model, in tokens.

    Raises:
        ConfigError: The tokenizer cannot represent a prompt or demonstration, a prompt leaves no room for
            `rollout.max_new_tokens`, or a demonstration is missing or too long. Names the prompt.
    """
    lengths: dict[str, int] = {}
    for prompt in _prompts(config, task, command):
        lengths[prompt.prompt_id] = length = len(_encoded(task, prompt, prompt.text, tokenizer))
        _check_length(task, prompt, length, "rollout.max_new_tokens", config.rollout.max_new_tokens, max_positions)
    if command not in ("train", "sft") or config.sft.steps == 0:
        return
    for prompt, response in _demonstrations(config, task):
        length = lengths.get(prompt.prompt_id) or len(_encoded(task, prompt, prompt.text, tokenizer))
        num_learned = len(_encoded(task, prompt, response, tokenizer)) + 1
        _check_length(task, prompt, length, "demonstration and its end", num_learned, max_positions)


def _demonstrations(config: RunConfig, task: Task) -> list[tuple[Prompt, str]]:
    if not isinstance(task, DemonstrationTask):
        raise ConfigError(
            "sft.steps: the task has no demonstrations to learn from",
            seen=config.task.name,
            expected="a task that writes worked solutions, or a JSONL with responses (task.response_key)",
            remedy="set sft.steps=0, or give the task demonstrations",
        )
    prompts = task.prompts("train", config.sft.num_examples)
    return list(zip(prompts, task.demonstrations(prompts, config.seed), strict=True))


def _wanted_problems(config: RunConfig, command: str) -> list[tuple[str, str, int]]:
    """(configuration key, split, number of problems) that a command asks of the task."""
    evaluation, wanted = config.evaluation, []
    if command in ("train", "rollout"):
        wanted.append(("algorithm.prompts_per_step", "train", config.algorithm.prompts_per_step))
    if command in ("train", "sft") and config.sft.steps > 0:
        wanted.append(("sft.num_examples", "train", config.sft.num_examples))
    if command == "train":
        wanted.append(("evaluation.dev_problems", "dev", evaluation.dev_problems))
    if command != "rollout":
        wanted.append(("evaluation.heldout_problems", "heldout", evaluation.heldout_problems))
    return wanted


def _prompts(config: RunConfig, task: Task, command: str) -> Iterable[Prompt]:
    """What a command samples responses to; a training run comes to every training prompt, given enough steps."""
    for key, split, count in _wanted_problems(config, command):
        if key != "sft.num_examples":
            whole_split = command == "train" and split == "train"
            yield from _with_work(task, task.prompts(split, task.size(split) if whole_split else count), split)


def _with_work(task: Task, prompts: Sequence[Prompt], split: str) -> list[Prompt]:
    """The prompts as the model may see them: evaluation of held-out ones can put the start of the work behind them."""
    if split != "heldout" or not isinstance(task, WorkedTask):
        return list(prompts)
    return [Prompt(prompt.prompt_id, prompt.text + task.work_prefix(prompt), prompt.facts) for prompt in prompts]


def _encoded(task: Task, prompt: Prompt, text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        return encode_checked(tokenizer, text)
    except ConfigError as error:
        raise ConfigError(
            f"{_place(task, prompt)}: {error.what}", seen=error.seen, expected=error.expected, remedy=error.remedy
        ) from error


def _check_length(
    task: Task, prompt: Prompt, num_prompt: int, follower: str, num_following: int, max_positions: int
) -> None:
    if num_prompt + num_following > max_positions:
        raise ConfigError(
            f"{_place(task, prompt)}: longer than the model's sequences",
            seen=f"{num_prompt} tokens of prompt + {num_following} ({follower})",
            expected=f"at most {max_positions} tokens",
            remedy="shorten or remove the problem, lower rollout.max_new_tokens, or take a model for longer sequences",
        )


def _place(task: Task, prompt: Prompt) -> str:
    """Where a prompt comes from: the line of a file, or its id."""
    if isinstance(task, JsonlTask):
        return str(task.config.path.with_name(prompt.prompt_id))
    return prompt.prompt_id
