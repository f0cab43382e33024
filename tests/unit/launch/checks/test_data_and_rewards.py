"""Checks of a task before torch is loaded: problems, demonstrations, and one reward."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moerl import cli
from moerl.config.checks import check_problems, wanted_problems
from moerl.config.load import load_config
from moerl.config.schema import RunConfig
from moerl.errors import ConfigError, closing
from moerl.launch.checks.facts import Facts
from moerl.launch.checks.inputs import look_at_data, look_at_rewards


def check(overrides: Sequence[str], command: str) -> None:
    config = load_config(["recipe=tiny", *overrides], command=command)
    check_problems(config.task.open(), wanted_problems(config))


def test_a_task_with_enough_problems_is_accepted() -> None:
    check([], "train")


@pytest.mark.parametrize(
    ("override", "command"),
    [
        ("rl.prompts_per_step=201", "train"),
        ("sft.num_examples=201", "train"),
        ("sft.num_examples=201", "sft"),
        ("evaluation.dev_problems=5000", "train"),
        ("evaluation.heldout_problems=5000", "train"),
        ("evaluation.heldout_problems=5000", "sft"),
    ],
)
def test_a_command_that_asks_for_more_problems_than_there_are_is_refused_by_key(override: str, command: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{key}: "):
        check([override], command)


def test_demonstrations_are_counted_only_where_a_cold_start_needs_them() -> None:
    check(["sft.steps=0", "sft.num_examples=201"], "train")
    with pytest.raises(ConfigError, match=r"^sft\.num_examples: "):
        check(["sft.steps=1", "sft.num_examples=201"], "train")


REWARDS = """
import os, time

def raises(row, response):
    return row["answre"]

def nan(row, response):
    return float("nan")

def text(row, response):
    return "1.0"

def hang(row, response):
    while True:
        pass

def arity(response):
    return 1.0

def segfault(row, response):
    import ctypes
    ctypes.string_at(0)

def missing(row, response):
    return {"score": 1.0}

def needs_answer(row, response):
    return float(row["answer"] == response)

def echo(row, response):
    raise RuntimeError(f"tried on {row['prompt']!r} and {response!r}")
"""


def look_at_task(config: RunConfig) -> None:
    with closing(Facts("train", config)) as facts:
        look_at_data(facts)
        look_at_rewards(facts)


FEW = (
    *("task.dev_fraction=0.2", "task.heldout_fraction=0.2", "sft.num_examples=8", "sft.batch_size=4"),
    *("evaluation.dev_problems=2", "evaluation.heldout_problems=2"),
)
JSONL = ("recipe=tiny", "task=jsonl", "task.path=my.jsonl", "task.reward=my_rewards:raises", *FEW)
ROWS = [{"prompt": f"say {i}", "response": str(i)} for i in range(60)]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    path = tmp_path_factory.mktemp("example") / "my.jsonl"
    path.touch()
    return load_config([*JSONL, f"task.path={path}"], command="train")


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: RunConfig) -> Callable[..., str]:
    """Makes a function that returns the refusal of a reward function and rows, with N for the numbers of rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)

    def look(function: str, rows: Sequence[dict[str, Any]] = ROWS) -> str:
        path = tmp_path / "my.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        changes = {"path": path, "reward": f"my_rewards:{function}", "reward_timeout_seconds": 1.0}
        config = example.model_copy(update={"task": example.task.model_copy(update=changes)})
        command = "eval" if rows[0].keys() == {"prompt"} else "train"
        with pytest.raises(ConfigError) as caught:
            look_at_task(config.model_copy(update={"command": command}))
        said = str(caught.value).replace(f"{tmp_path}/", "")
        return re.sub(r"(my\.jsonl:|say |'|response\": \")\d+", r"\1N", said)

    return look


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("raises", "raised at my.jsonl:N; seen: KeyError: 'answre', in raises (my_rewards.py:5)"),
        ("nan", "returned no reward at my.jsonl:N; seen: the result is not finite: nan, in nan (my_rewards.py:7)"),
        ("text", "at my.jsonl:N; seen: the result is of type str, not a number: 'N.0', in text (my_rewards.py:10)"),
        ("hang", "at my.jsonl:N; seen: time limit passed; its process was killed, in hang (my_rewards.py:1"),
        ("arity", "seen: TypeError: arity() takes 1 positional argument but 2 were given, in arity (my_rewards.py:17)"),
        ("segfault", "at my.jsonl:N; seen: its process ended by signal SIGSEGV, in segfault (my_rewards.py:22)"),
        ("missing", "seen: a mapping without 'reward': {'score': 1.0}, in missing (my_rewards.py:24)"),
    ],
)
def test_a_mistake_in_a_reward_function_is_named_with_its_line_and_row(
    refusal: Callable[..., str], function: str, what: str
):
    said = refusal(function)
    assert said.startswith(f"task.reward: tried before the run, reward function my_rewards:{function} ")
    assert what in said
    assert """; row: {"prompt": "say N", "response": "N"}; response: 'N'""" in said


def test_a_reward_function_is_tried_on_a_dummy_where_there_is_no_demonstration(refusal: Callable[..., str]):
    said = refusal("echo", [{"prompt": f"say {i}"} for i in range(60)])
    assert "tried on 'say N' and 'This text tries the reward function; no model wrote it.'" in said


def test_a_reward_function_is_tried_on_a_row_of_every_split(refusal: Callable[..., str], tmp_path: Path):
    rows = [{**row, "answer": row["response"]} for row in ROWS]
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [task] = [load_config([*JSONL, f"task.path={path}"], command="train").task.open()]
    with closing(task):
        held_out = {prompt.text for prompt in task.prompts("heldout", 2)}
    for row in rows:
        if row["prompt"] in held_out:
            del row["answer"]
    first = next(row["prompt"] for row in rows if row["prompt"] in held_out)
    said = refusal("needs_answer", rows)
    assert "KeyError: 'answer'" in said, (said, first)


def test_a_command_says_so_before_it_loads_torch_or_leaves_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    # Torch comes with it.
    monkeypatch.setitem(sys.modules, "moerl.orchestration.commands", None)
    assert cli.main(["train", *JSONL, "run_dir=run"]) == 2
    assert "KeyError: 'answre', in raises (my_rewards.py:5)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_missing_demonstrations_are_named_first(refusal: Callable[..., str]):
    assert "8 of 8 rows have no demonstration" in refusal(
        "nan", [{"prompt": f"say {i}", "response_": ""} for i in range(60)]
    )
