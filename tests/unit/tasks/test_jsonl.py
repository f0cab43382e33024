"""Prompts from a JSON-lines file and a user's reward function."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moerl.contract.ports import Prompt
from moerl.contract.trajectory import FinishReason
from moerl.errors import ConfigError, RewardError
from moerl.tasks.data.task import RowsTask
from moerl.tasks.jsonl import JsonlTaskConfig

REWARDS = """
def exact(row, response):
    return response == row["answer"]

def tasting_row(row, response):
    if response == "raise":
        raise KeyError("no such dish")
    return {"reward": 0.5, "length": len(response)}
"""

MakeTask = Callable[..., RowsTask]

ALL_TRAIN = {"dev_fraction": 1e-9, "heldout_fraction": 1e-9}


@pytest.fixture
def make_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeTask]:
    """Builds a task over a file with the given content (rows, or raw text), and closes it afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    made: list[RowsTask] = []

    def make(content: list[Any] | str | bytes, **changes: Any) -> RowsTask:
        path = tmp_path / "data.jsonl"
        if isinstance(content, list):
            content = "\n".join(json.dumps(row) for row in content) + "\n"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        values: dict[str, Any] = {
            "name": "jsonl",
            "path": path,
            "reward": "my_rewards:exact",
            "prompt_key": "prompt",
            "response_key": "response",
            "heldout_fraction": 0.2,
            "dev_fraction": 0.1,
            "reward_workers": 1,
            "reward_timeout_seconds": 30.0,
            "reward_memory_bytes": 1 << 32,
        }
        made.append(JsonlTaskConfig(**{**values, **changes}).open())
        return made[-1]

    yield make
    for task in made:
        task.close()


def rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"problem {i}", "answer": str(i), "response": f"it is {i}"} for i in range(count)]


def texts(task: RowsTask, split: str) -> list[str]:
    return [prompt.text for prompt in task.prompts(split, task.size(split))]


def test_every_row_is_in_one_split_and_shares_are_about_as_configured(make_task: MakeTask):
    task = make_task(rows(2000))
    train, dev, heldout = (texts(task, split) for split in ("train", "dev", "heldout"))
    assert sorted(train + dev + heldout) == sorted(row["prompt"] for row in rows(2000))
    assert 150 < len(dev) < 250
    assert 330 < len(heldout) < 470


def test_adding_rows_moves_no_other_row(make_task: MakeTask):
    before = texts(make_task(rows(200)), "heldout")
    assert texts(make_task(rows(400)), "heldout")[: len(before)] == before


def test_the_same_prompt_is_never_in_two_splits(make_task: MakeTask):
    repeated = [{"prompt": f"problem {i % 50}", "answer": str(i)} for i in range(500)]
    task = make_task(repeated)
    found = [set(texts(task, split)) for split in ("train", "dev", "heldout")]
    assert sum(map(len, found)) == len(set.union(*found)) == 50


def test_the_users_function_sees_the_row_and_the_response(make_task: MakeTask):
    task = make_task(rows(20))
    prompt = task.prompts("train", 1)[0]
    right = task.reward(prompt, prompt.facts["answer"], FinishReason.STOP).result()
    assert right == {"reward": 1.0, "accuracy": 1.0}
    assert task.reward(prompt, "other", FinishReason.STOP).result() == {"reward": 0.0, "accuracy": 0.0}


def test_further_named_rewards_are_kept(make_task: MakeTask):
    task = make_task(rows(20), reward="my_rewards:tasting_row")
    rewards = task.reward(task.prompts("train", 1)[0], "four", FinishReason.STOP).result()
    assert rewards == {"reward": 0.5, "accuracy": 0.0, "length": 4.0}


def test_a_function_that_raises_fails_the_sample_and_not_the_next_one(make_task: MakeTask):
    task = make_task(rows(20), reward="my_rewards:tasting_row")
    prompt = task.prompts("train", 1)[0]
    with pytest.raises(RewardError, match="KeyError: 'no such dish'") as caught:
        task.reward(prompt, "raise", FinishReason.STOP).result()
    assert task.place(prompt).endswith(f"/{prompt.prompt_id}")
    assert f"at {task.place(prompt)}; seen: " in str(caught.value)
    assert "in tasting_row (" in str(caught.value)
    assert f"row: {json.dumps(prompt.facts)}; response: 'raise'" in str(caught.value)
    assert task.reward(prompt, "fine", FinishReason.STOP).result()["reward"] == 0.5


def test_responses_in_the_rows_are_the_demonstrations(make_task: MakeTask):
    task = make_task(rows(20))
    prompts = task.prompts("train", 5)
    assert task.demonstrations(prompts, seed=1) == [f"it is {p.facts['answer']}" for p in prompts]
    assert set(task.demonstrations(prompts, seed=1)) <= set(task.tokenizer_texts(5))


@pytest.mark.parametrize("response_key", ["solution", None])
def test_rows_without_responses_cannot_demonstrate(make_task: MakeTask, response_key: str | None):
    task = make_task(rows(20), response_key=response_key)
    with pytest.raises(ConfigError, match=r"2 of 2 rows have no demonstration.*task\.response_key"):
        task.demonstrations(task.prompts("train", 2), seed=1)


def test_blank_lines_are_skipped_but_counted(make_task: MakeTask):
    task = make_task('\n{"prompt": "a"}\n\n{"prompt": "b"}\n', **ALL_TRAIN)
    assert [p.prompt_id for p in task.prompts("train", 2)] == ["data.jsonl:2", "data.jsonl:4"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "a"',
        b'["prompt"]',
        b'"prompt"',
        b'{"text": "a"}',
        b'{"prompt": ""}',
        b'{"prompt": 3}',
        b'{"prompt": "a", "response": 3}',
        b'{"prompt": "a", "score": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
    ],
)
def test_a_bad_line_is_refused_by_its_number(make_task: MakeTask, line: bytes):
    with pytest.raises(ConfigError, match=r"data\.jsonl:2; seen: .*remedy: correct or remove the line"):
        make_task(b'{"prompt": "fine"}\n' + line + b"\n")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' twice in one object"),
        (b'{"prompt": "a", "facts": [{"x": 1, "x": 1}]}', "the key 'x' twice in one object"),
        (b'{"prompt": "a", "score": 1e999}', "1e999 is beyond the numbers of float64"),
        (b'{"prompt": "a", "list": ' + b"[" * 64 + b"]" * 64 + b"}", "more than 64 lists and objects"),
        (b'{"question": "a", "answer": "b"}', "keys 'question', 'answer'; expected: 'prompt' among them, or task.pro"),
        (b"\xef\xbb\xbf" + b'{"prompt": "a"}', "Unexpected UTF-8 BOM"),
        ('{"prompt": "a"}'.encode("utf-16"), "a JSON object in UTF-8"),
        (b'{"prompt": ["\\u001b[2J' + b"x" * 10_000 + b'"]}', r"\x1b[2Jxxxx"),
        (b'{"prompt": "' + b"x" * (1 << 24) + b'"}', "a longer line; expected: at most 16,777,216 bytes"),
    ],
    ids=["repeated", "repeated within", "infinite", "deep", "other keys", "mark", "UTF-16", "control", "long"],
)
def test_what_is_wrong_with_a_line_is_said_in_few_words(make_task: MakeTask, line: bytes, part: str):
    with pytest.raises(ConfigError) as caught:
        make_task(b'{"prompt": "fine"}\n' + line + b"\n")
    assert "data.jsonl:2; seen: " in str(caught.value)
    assert part in str(caught.value)
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()


def test_a_file_that_windows_wrote_is_read(make_task: MakeTask):
    task = make_task(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n', **ALL_TRAIN)
    assert [(p.prompt_id, p.text) for p in task.prompts("train", 2)] == [("data.jsonl:1", "a"), ("data.jsonl:3", "b")]


def test_a_missing_file_is_refused(make_task: MakeTask, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.jsonl; seen: No such file"):
        make_task(rows(1), path=tmp_path / "nowhere.jsonl")


def test_more_prompts_than_a_split_has_are_refused(make_task: MakeTask):
    task = make_task(rows(20))
    with pytest.raises(ConfigError, match=f"the train split .*expected: 0 to {task.size('train')}"):
        task.prompts("train", task.size("train") + 1)


def test_an_unknown_split_is_refused(make_task: MakeTask):
    with pytest.raises(ConfigError, match="unknown split; seen: test"):
        make_task(rows(2)).prompts("test", 1)


def test_a_reward_function_that_is_not_there_is_refused(make_task: MakeTask):
    task = make_task(rows(2), reward="my_rewards:missing", **ALL_TRAIN)
    with pytest.raises(ConfigError, match="cannot import my_rewards:missing"):
        task.reward(task.prompts("train", 1)[0], "", FinishReason.STOP).result()


def test_a_task_starts_no_process_before_the_first_reward(make_task: MakeTask):
    assert make_task(rows(2), reward="my_rewards:missing").size("train") <= 2


def test_prompts_carry_their_row(make_task: MakeTask):
    task = make_task(rows(3), **ALL_TRAIN)
    assert task.prompts("train", 1) == [Prompt("data.jsonl:1", "problem 0", rows(3)[0])]
