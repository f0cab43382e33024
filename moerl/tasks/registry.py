"""From a task's configuration to the task, and from a task to a tokenizer for it. Runs in the controller."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from moerl.config.schema import ChainSumTaskConfig, JsonlTaskConfig
from moerl.tasks.chain_sum import ChainSumTask
from moerl.tasks.jsonl import JsonlTask
from moerl.tasks.tokenizer import build_tokenizer

TOKENIZER_PROMPTS = 2000
"""Training prompts that a tokenizer is trained on."""


def make_task(config: ChainSumTaskConfig | JsonlTaskConfig) -> ChainSumTask | JsonlTask:
    """The task that a configuration names. `ConfigError` where its data or its reward function is unusable."""
    if isinstance(config, JsonlTaskConfig):
        return JsonlTask(config)
    return ChainSumTask(config)


def make_tokenizer(task: ChainSumTask | JsonlTask, vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer for a model that starts from nothing, trained on the task's own texts.

    Args:
        task: Its first training prompts, and their solutions where it has them, are the training texts.
        vocab_size: Most entries the tokenizer may have.

    Raises:
        ConfigError: `vocab_size` does not hold the task's characters.
    """
    texts = task.tokenizer_texts(TOKENIZER_PROMPTS)
    return build_tokenizer(texts, vocab_size, any_text=task.open_vocabulary)
