"""Checks of a command on its task: problems are refused before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from moerl.cli import COMMANDS
from moerl.config.checks import check_problems, wanted_problems
from moerl.config.load import load_config
from moerl.config.schema import RunConfig
from moerl.contract.ports import Task
from moerl.errors import ConfigError
from moerl.orchestration.commands import text_use
from moerl.orchestration.task_texts import check_prompts
from moerl.rollout.tokenizers import build_tokenizer, make_tokenizer
from moerl.tasks.chain_sum import ChainSumTask
from moerl.tasks.data.task import RowsTask

Opened = tuple[RunConfig, Task]
Open = Callable[..., Opened]
FEW = (
    *("task.dev_fraction=0.2", "task.heldout_fraction=0.2", "sft.num_examples=20", "sft.batch_size=4"),
    *("evaluation.dev_problems=2", "evaluation.heldout_problems=2"),
)


def row(number: int, **changes: str) -> dict[str, str]:
    return {"prompt": f"say {number}", "response": str(number), **changes}


def check_numbers(config: RunConfig, task: Task) -> None:
    check_problems(task, wanted_problems(config))


@pytest.fixture
def open_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """The configuration and task of `moerl <command> recipe=tiny` over rows of a JSONL file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text("def score(row, response):\n    return 0.0\n")
    made: list[RowsTask] = []

    def make(rows: Sequence[dict[str, str]], *overrides: str, command: str = "train") -> Opened:
        (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = ("task=jsonl", "task.path=my.jsonl", "task.reward=my_rewards:score")
        config = load_config(["recipe=tiny", *task, *FEW, *overrides], command=command)
        opened = config.task.open()
        assert isinstance(opened, RowsTask)
        made.append(opened)
        return config, opened

    yield make
    for task in made:
        task.close()


def tokenizer(any_text: bool = True) -> PreTrainedTokenizerFast:
    return build_tokenizer(["say 0123456789"], 300, any_text=any_text)


def check(opened: Opened, made: PreTrainedTokenizerFast, command: str = "train", max_positions: int = 64) -> None:
    config, task = opened
    check_prompts(task, made, text_use(config.model_copy(update={"command": command}), max_positions))


def refusal(opened: Opened, *, any_text: bool = True, max_positions: int = 64, command: str = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        check(opened, tokenizer(any_text), command, max_positions)
    return str(caught.value)


def with_row(
    open_jsonl: Open, split: str, stem: str, *overrides: str, command: str = "train", **changes: str
) -> Opened:
    """Sixty fine problems; line 61 holds one of the given split whose prompt begins with `stem`."""
    fine = [row(i) for i in range(60)]
    candidates = [row(i, prompt=f"{stem}{i}", **changes) for i in range(60)]
    task = open_jsonl([*fine, *candidates])[1]
    lines = [int(prompt.prompt_id.split(":")[1]) for prompt in task.prompts(split, task.size(split))]
    chosen = candidates[max(lines) - len(fine) - 1]
    # Every problem is read, the last one included.
    size = open_jsonl([*fine, chosen])[1].size(split)
    key = {"train": "sft.num_examples", "heldout": "evaluation.heldout_problems"}[split]
    return open_jsonl([*fine, chosen], f"{key}={size}", *overrides, command=command)


def test_problems_that_fit_are_accepted(open_jsonl: Open):
    opened = open_jsonl([row(i) for i in range(60)])
    check_numbers(*opened)
    check(opened, tokenizer(any_text=False))


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_prompt_that_cannot_be_encoded_is_named_by_file_and_line(command: str, open_jsonl: Open, tmp_path: Path):
    opened = with_row(open_jsonl, "heldout", "say é", command=command)
    message = refusal(opened, any_text=False, command=command)
    assert message.startswith(f"{tmp_path}/my.jsonl:61: the tokenizer cannot represent a text")


def test_every_training_prompt_is_checked_without_a_cold_start_too(open_jsonl: Open, tmp_path: Path):
    message = refusal(with_row(open_jsonl, "train", "say " + "7" * 60, "sft.steps=0"))
    assert message.startswith(f"{tmp_path}/my.jsonl:61: longer than the model's sequences")
    assert "16 (rollout.max_new_tokens); expected: at most 64 tokens" in message


def test_prompts_that_a_command_never_reads_do_not_matter(open_jsonl: Open):
    opened = with_row(open_jsonl, "heldout", "say é")
    check(opened, tokenizer(any_text=False), "rollout")
    assert "the tokenizer cannot represent a text" in refusal(opened, any_text=False)


def test_a_prompt_that_just_fits_is_accepted(open_jsonl: Open):
    opened = open_jsonl([row(i, prompt=f"say {i:02}") for i in range(60)], "sft.steps=0")
    length = len(tokenizer().encode("say 12")) + 16
    check(opened, tokenizer(), max_positions=length)
    assert "longer than the model's sequences" in refusal(opened, max_positions=length - 1)


@pytest.mark.parametrize(
    ("response", "any_text", "part"),
    [("7" * 70, True, "71 (demonstration and its end)"), ("é", False, "the tokenizer cannot represent a text")],
)
def test_a_demonstration_must_fit_and_be_encodable(
    response: str, any_text: bool, part: str, open_jsonl: Open, tmp_path: Path
):
    message = refusal(with_row(open_jsonl, "train", "say 1", response=response), any_text=any_text)
    assert message.startswith(f"{tmp_path}/my.jsonl:61: ")
    assert part in message
    without = with_row(open_jsonl, "train", "say 1", "sft.steps=0", response=response)
    check(without, tokenizer(any_text))


def test_demonstrations_must_be_there(open_jsonl: Open):
    assert "20 of 20 rows have no demonstration" in refusal(open_jsonl([{"prompt": f"say {i}"} for i in range(60)]))


def test_the_start_of_the_work_is_part_of_a_held_out_prompt():
    config = load_config(["recipe=tiny", "sft.steps=0"], command="train")
    task = config.task.open()
    assert isinstance(task, ChainSumTask)
    made = make_tokenizer(task, 512)
    longest = max(len(made.encode(prompt.text)) for prompt in task.prompts("heldout", 8))
    check((config, task), made, max_positions=longest + 16 + 2)
    with pytest.raises(ConfigError, match=r"^chain_sum-heldout-"):
        check((config, task), made, max_positions=longest + 16)


def test_the_remedy_for_too_few_problems_can_be_copied(open_jsonl: Open):
    rows = [row(i) for i in range(60)]
    with pytest.raises(ConfigError) as caught:
        check_numbers(*open_jsonl(rows, "evaluation.dev_problems=256", "evaluation.heldout_problems=1000"))
    assert caught.value.what == "evaluation.dev_problems: the task has fewer problems"
    remedy = caught.value.remedy.partition("or add ")[2].split()
    assert [word.split("=")[0] for word in remedy] == ["evaluation.dev_problems", "evaluation.heldout_problems"]
    check_numbers(*open_jsonl(rows, *remedy))


def test_the_example_of_the_help_runs_on_two_hundred_problems(open_jsonl: Open):
    open_jsonl([row(i) for i in range(200)])
    [line] = [line for line in COMMANDS["train"].examples if "task=jsonl" in line]
    config = load_config(line.split()[2:], command="train")
    task = config.task.open()
    assert isinstance(task, RowsTask)
    try:
        check_numbers(config, task)
        assert config.model.architecture is not None
        made = make_tokenizer(task, config.model.architecture.vocab_size)
        check((config, task), made, max_positions=config.model.architecture.max_positions)
    finally:
        task.close()
