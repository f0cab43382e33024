"""Data sets of a hub, by the real client library over HTTP, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_hub import commit_of, hub

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: other
  data_files:
  - {split: train, path: other/train.jsonl}
---
"""
# What a process asks for, a list of overrides per task; it prints the questions by split, or the error.
CHILD = """
import json, sys
from moerl.config.load import load_config
from moerl.errors import ConfigError
reward = ["task.rewards.right.kind=exact", "task.rewards.right.column=answer"]
found = []
for overrides in json.loads(sys.argv[1]):
    try:
        keys = ["recipe=tiny", "sft.steps=0", "task=dataset", "task.prompt=question", *reward, *overrides]
        task = load_config(keys, command="train").task.open()
        splits = ("train", "dev", "heldout")
        found.append({each: [p.facts["question"] for p in task.prompts(each, task.size(each))] for each in splits})
        task.close()
    except ConfigError as error:
        found.append(str(error))
assert "torch" not in sys.modules
print(json.dumps(found))
"""


WITHOUT_WAITING = "import time\ntime.sleep = lambda seconds: None\n"
"""Put before it: the client tries again and again, and waits half a minute for each set."""


def rows(name: str, count: int) -> bytes:
    return b"".join(
        json.dumps({"question": f"{name} {i}", "answer": f"#### {i}"}).encode() + b"\n" for i in range(count)
    )


def files(mark: str) -> dict[str, bytes]:
    return {
        "README.md": CARD.encode(),
        "main/train.jsonl": rows(f"{mark} train", 40),
        "main/test.jsonl": rows(f"{mark} test", 7),
        "other/train.jsonl": rows(f"{mark} other", 30),
    }


ASKED = {
    "both splits": ["task.hub=owner/sums", "task.subset=main", "task.splits={train: train, heldout: test}"],
    "other subset": ["task.hub=owner/sums", "task.subset=other"],
    "revision": ["task.hub=owner/sums", "task.subset=main", "task.revision=v1", "task.dev_fraction=0.0"],
    "streamed": ["task.hub=owner/sums", "task.subset=main", "task.streaming=true", "task.max_rows=25"],
    "no such split": ["task.hub=owner/sums", "task.subset=main", "task.splits={heldout: validation}"],
    "no such set": ["task.hub=owner/nothing"],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], list[str]]]:
    sets = {"owner/sums": {"main": files("new"), "v1": files("old")}}
    with hub(sets) as (address, asked):
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        kept.pop("HF_HUB_OFFLINE", None)
        home = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path_factory.mktemp("home"))}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps([*ASKED.values()])],
            env={**kept, **home},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        yield dict(zip(ASKED, json.loads(done.stdout.splitlines()[-1]), strict=True)), asked


def every(found: dict[str, list[str]]) -> set[str]:
    return {question for questions in found.values() for question in questions}


def test_a_set_of_the_hub_gives_its_own_splits(answers: tuple[dict[str, Any], list[str]]):
    found = answers[0]["both splits"]
    assert set(found["heldout"]) == {f"new test {i}" for i in range(7)}
    assert {*found["train"], *found["dev"]} == {f"new train {i}" for i in range(40)}


def test_another_subset_is_another_set(answers: tuple[dict[str, Any], list[str]]):
    assert every(answers[0]["other subset"]) == {f"new other {i}" for i in range(30)}


def test_a_revision_is_read_at_its_commit(answers: tuple[dict[str, Any], list[str]]):
    found, asked = answers
    assert every(found["revision"]) == {f"old train {i}" for i in range(40)}
    assert any(commit_of("v1") in path for path in asked)


def test_a_stream_reads_so_many_rows_and_no_more(answers: tuple[dict[str, Any], list[str]]):
    found = every(answers[0]["streamed"])
    assert len(found) == 25
    assert found < {f"new train {i}" for i in range(40)}


def test_what_the_hub_does_not_have_is_named(answers: tuple[dict[str, Any], list[str]]):
    no_split, no_set = (answers[0][name] for name in ("no such split", "no such set"))
    assert "task.hub: cannot read owner/sums, subset main, split validation" in no_split
    assert "task.hub: cannot read owner/nothing" in no_set
    assert "check the network and the name" in no_set


def test_scripts_of_a_set_are_never_run(answers: tuple[dict[str, Any], list[str]], tmp_path: Path):
    evil = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    sets = {"owner/evil": {"main": {"README.md": b"", "evil.py": evil.encode()}}}
    with hub(sets) as (address, _):
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        environment = {**kept, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", CHILD, json.dumps([["task.hub=owner/evil"]])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "task.hub: cannot read owner/evil" in done.stdout, done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_what_was_fetched_once_is_found_without_the_hub(tmp_path: Path):
    overrides = [ASKED["both splits"], ASKED["other subset"], ASKED["revision"]]
    sets = {"owner/sums": {"main": files("new"), "v1": files("old")}}
    with hub(sets) as (address, _):
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        kept.pop("HF_HUB_OFFLINE", None)
        environment = {**kept, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", CHILD, json.dumps(overrides)]
        first = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert first.returncode == 0, first.stderr
    # The hub is gone, as it is for a compute node; its cache is there.
    for offline in ({}, {"HF_HUB_OFFLINE": "1"}):
        command[2] = WITHOUT_WAITING + CHILD
        again = subprocess.run(command, env=environment | offline, capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stderr
        assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1], offline
