"""From a task's configuration to the task. Torch-free; runs in the controller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moerl.config.schema import ChainSumTaskConfig, JsonlTaskConfig
from moerl.tasks.jsonl import JsonlTask

if TYPE_CHECKING:
    from moerl.tasks.chain_sum import ChainSumTask


def make_task(config: ChainSumTaskConfig | JsonlTaskConfig) -> ChainSumTask | JsonlTask:
    """The task that a configuration names; close it. `ConfigError` where its data is unusable."""
    if isinstance(config, JsonlTaskConfig):
        return JsonlTask(config)
    # reasoning-gym takes seconds to import, and other tasks do not need it.
    from moerl.tasks.chain_sum import ChainSumTask

    return ChainSumTask(config)
