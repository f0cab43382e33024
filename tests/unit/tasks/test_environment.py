"""`task=environment`: rows, played by a function of the user's, whose results are rewards or are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from moerl.config.load import load_config
from moerl.contract.episodes import EpisodeTask, Session
from moerl.errors import ConfigError, EpisodeError
from moerl.tasks.environment import EnvironmentTask
from moerl.user_function import load_function

ENVIRONMENT = """
import numpy as np

RESULTS = {{"number": 1, "numpy": np.float32(0.5), "named": {{"reward": 2.0, "turns": 3.0}},
           "own": {{"reward": 0.5, "accuracy": 1.0}}, "none": None, "text": "1", "unnamed": {{"score": 1.0}},
           "sessions": {{}}}}

async def play(prompt, session, result="number"):
    assert session is not None
    return RESULTS[prompt.facts.get("result", result)]

def blocks(prompt, session):
    return 1.0
"""


@pytest.fixture
def open_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EnvironmentTask]]:
    name = f"environment_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(ENVIRONMENT.format())
    rows = [{"prompt": f"number {i}", "answer": str(i)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(*overrides: str, function: str = "play") -> EnvironmentTask:
        keys = ("recipe=tiny", "sft.steps=0", "task=environment", "task.path=rows.jsonl")
        task = load_config([*keys, f"task.play={name}:{function}", *overrides], command="train").task.open()
        assert isinstance(task, EnvironmentTask)
        return task

    yield make
    load_function.cache_clear()


def played(task: EnvironmentTask, split: str = "train") -> Any:
    (prompt,) = task.prompts(split, 1)
    return dict(asyncio.run(task.play(prompt, cast("Session", object()))))


def test_rows_are_prompts_with_messages_in_three_splits(open_task: Callable[..., EnvironmentTask]) -> None:
    task = open_task("task.turn_seconds=5.0")
    assert isinstance(task, EpisodeTask)
    sizes = [task.size(split) for split in ("train", "dev", "heldout")]
    assert sum(sizes) == 40
    assert all(sizes)
    (prompt,) = task.prompts("train", 1)
    assert prompt.chat is not None
    assert prompt.chat.messages[-1]["content"] == prompt.facts["prompt"]
    assert task.turn_seconds == 5.0


@pytest.mark.parametrize(
    ("result", "rewards"),
    [
        ("number", {"reward": 1, "accuracy": 1.0}),
        ("numpy", {"reward": 0.5, "accuracy": 0.0}),
        ("named", {"reward": 2.0, "accuracy": 1.0, "turns": 3.0}),
        ("own", {"reward": 0.5, "accuracy": 1.0}),
        ("sessions", {}),
    ],
)
def test_a_result_is_a_number_or_named_rewards(
    result: str, rewards: dict[str, float], open_task: Callable[..., EnvironmentTask]
) -> None:
    assert played(open_task(f"task.options={{result: {result}}}")) == rewards


@pytest.mark.parametrize("result", ["none", "text", "unnamed"])
def test_another_result_is_refused(result: str, open_task: Callable[..., EnvironmentTask]) -> None:
    with pytest.raises(EpisodeError, match="rewards of an episode"):
        played(open_task(f"task.options={{result: {result}}}"))


def test_a_function_that_is_not_there_or_no_coroutine_is_refused_before_a_run(
    open_task: Callable[..., EnvironmentTask],
) -> None:
    with pytest.raises(ConfigError, match="cannot import"):
        open_task(function="missing")
    with pytest.raises(ConfigError, match="is no coroutine function"):
        open_task(function="blocks")
