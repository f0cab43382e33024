"""From configuration to task and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moerl.config.schema import ChainSumTaskConfig, JsonlTaskConfig
from moerl.tasks.chain_sum import ChainSumTask
from moerl.tasks.jsonl import JsonlTask
from moerl.tasks.registry import make_task
from moerl.tasks.tokenizer import encode_checked, make_tokenizer


def test_a_chain_sum_configuration_makes_that_task():
    config = ChainSumTaskConfig(
        name="chain_sum",
        min_terms=2,
        max_terms=3,
        min_digits=1,
        max_digits=1,
        num_train=100,
        worked_probability={2: 0.5, 3: 0.5},
    )
    assert isinstance(make_task(config), ChainSumTask)


def test_a_jsonl_configuration_makes_that_task_and_a_tokenizer_for_any_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ones.py").write_text("def reward(row, response):\n    return 1\n")
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(20)))
    config = JsonlTaskConfig(
        name="jsonl",
        path=path,
        reward="ones:reward",
        prompt_key="prompt",
        response_key=None,
        heldout_fraction=0.1,
        dev_fraction=0.1,
        reward_timeout_seconds=20.0,
        reward_memory_bytes=1 << 32,
    )
    task = make_task(config)
    assert isinstance(task, JsonlTask)
    task.close()
    tokenizer = make_tokenizer(task, 400)
    assert tokenizer.decode(encode_checked(tokenizer, "\u00fcber 12")) == "\u00fcber 12"
