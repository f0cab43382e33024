"""The recipes for sets of the hub: columns, splits, prompts and rewards, on rows of the shape of the real sets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_models import CHATML_THINKING, chat_tokenizer
from small_hub import client_environment, hub
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moerl.config.load import load_config
from moerl.contract.ports import Chat
from moerl.contract.trajectory import FinishReason
from moerl.errors import closing
from moerl.orchestration.chat import ChatTemplate
from moerl.orchestration.templates import Templates
from moerl.tasks.dataset import DatasetTaskConfig

Row = Mapping[str, Any]


def gsm8k(number: int) -> Row:
    """A row of openai/gsm8k, main."""
    answer = f"Each is {number} dollars.\n<<{number}*1000=4{number:03d}>>so 4,{number:03d}.\n#### 4,{number:03d}"
    return {"question": f"What are {number} and 4000?", "answer": answer}


def problem(number: int) -> Row:
    """A row of open-r1/verifiable-coding-problems-python_decontaminated-tested; every fourth fails its own tests."""
    case = {"fn_name": None, "input": f"{number} 1\n", "output": f"{number + 1}\n", "type": "stdin_stdout"}
    return {
        "source": "apps",
        "task_type": "verifiable_code",
        "problem_id": f"vfc_{number}",
        "problem": f"Print the sum of the two numbers. ({number})",
        "gold_standard_solution": "```python\nprint(sum(map(int, input().split())))\n```",
        "metadata": {"difficulty": "EASY"},
        "verification_info": {"language": "python", "test_cases": [case, case]},
        "test_reward": 0.5 if number % 4 == 0 else 1.0,
    }


def lines(rows: list[Row]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def card(subset: str, *splits: str) -> bytes:
    files = [{"split": split, "path": f"{split}.jsonl"} for split in splits]
    return f"---\n{yaml.safe_dump({'configs': [{'config_name': subset, 'data_files': files}]})}---\n".encode()


SETS = {
    "openai/gsm8k": {
        "main": {
            "README.md": card("main", "train", "test"),
            "train.jsonl": lines([gsm8k(number) for number in range(300)]),
            "test.jsonl": lines([gsm8k(number) for number in range(500, 540)]),
        }
    },
    "open-r1/verifiable-coding-problems-python_decontaminated-tested": {
        "main": {
            "README.md": card("default", "train"),
            "train.jsonl": lines([problem(number) for number in range(400)]),
        }
    },
}
KEYS = ("rollout.environment=/opt/moerl/env", "rl.prompts_per_step=16", "evaluation.dev_problems=1")
CHILD = """
import json, sys
from moerl import cli
from moerl.config.load import load_config
from moerl.launch.slurm import command
command.plan_run = lambda *_, **__: 0
place, *overrides = sys.argv[1:]
words = ["--time", "1:00:00", "--site", f"{place}/site.yaml", "--dry-run"]
status = cli.main(["launch", "slurm", *overrides, f"run_dir='{place}/run'", *words])
task = load_config(overrides, command="train").task.open()
splits = {each: task.size(each) for each in ("train", "dev", "heldout")}
[first] = task.prompts("heldout", 1)
task.close()
assert "torch" not in sys.modules
print(json.dumps([status, splits, first.facts, list(first.chat.messages)]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model with a template as Qwen3's, and a site."""
    folder = tmp_path_factory.mktemp("place")
    tokenizer = chat_tokenizer(CHATML_THINKING)
    tokenizer.save_pretrained(folder / "model")
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=40960,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "model")
    (folder / "site.yaml").write_text("gpus_per_node: 2\nmemory: 1000G\n")
    return folder


def ask(recipe: str, place: Path, heldout: int) -> tuple[int, dict[str, int], Row, list[dict[str, str]]]:
    """Status of the dry run, sizes of the splits, columns and messages of the first held-out problem."""
    keys = (f"recipe={recipe}", f"model.path='{place / 'model'}'", *KEYS, f"evaluation.heldout_problems={heldout}")
    with hub(SETS) as (address, _):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(place), *keys],
            env=client_environment(address, place / recipe),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found[0] == 0, done.stdout + done.stderr
    return tuple(found)


def task_of(recipe: str, place: Path) -> DatasetTaskConfig:
    task = load_config([f"recipe={recipe}", f"model.path='{place / 'model'}'", *KEYS], command="rollout").task
    assert isinstance(task, DatasetTaskConfig)
    return task


def reward(task: DatasetTaskConfig, row: Row, folder: Path, *responses: str) -> list[float]:
    """Rewards of responses to a row, which lies in a file of the same columns."""
    (folder / "row.jsonl").write_bytes(lines([row]))
    place: dict[str, Any] = {"hub": None, "subset": None, "splits": {}, "path": folder / "row.jsonl"}
    opened = task.model_copy(update={**place, "dev_fraction": 0.0, "heldout_fraction": 0.0}).open()
    with closing(opened):
        [prompt] = opened.prompts("train", 1)
        return [opened.reward(prompt, each, FinishReason.STOP).result()["reward"] for each in responses]


def prompt_of(task: DatasetTaskConfig, place: Path, messages: list[dict[str, str]]) -> str:
    templates = Templates()
    try:
        made = ChatTemplate(chat_tokenizer(CHATML_THINKING), task.template_options, templates)
        return made.render(Chat(tuple(messages)))
    finally:
        templates.close()


def test_gsm8k_is_read_with_its_own_test_split_worded_without_thinking_and_rewarded_by_value(
    place: Path, tmp_path: Path
) -> None:
    _, splits, row, messages = ask("gsm8k", place, heldout=40)
    assert splits["heldout"] == 40
    assert splits["train"] + splits["dev"] == 300
    task = task_of("gsm8k", place)
    text = prompt_of(task, place, messages)
    assert text.startswith(f"<|im_start|>user\n{row['question']}\n\nPlease reason step by step")
    assert text.endswith("\\boxed{}.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    number = row["answer"].rpartition("#### ")[2]
    right = [f"So \\boxed{{{each}}}." for each in (number, number.replace(",", ""), f"\\${number}.00")]
    wrong = [f"So \\boxed{{{each}}}." for each in ("4", number.partition(",")[2])]
    assert reward(task, row, tmp_path, *right, *wrong, "I do not know.") == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
def test_problems_are_read_without_those_that_fail_their_own_tests_and_programs_read_their_input(
    place: Path, tmp_path: Path
) -> None:
    _, splits, row, messages = ask("code_problems", place, heldout=2)
    assert sum(splits.values()) == 300
    task = task_of("code_problems", place)
    text = prompt_of(task, place, messages)
    assert text.startswith(f"<|im_start|>user\n{row['problem']}\n\nWrite a Python program")
    assert text.endswith("<|im_start|>assistant\n")
    program = row["gold_standard_solution"]
    thought = f"<think>\nPerhaps {program}\n"
    responses = (f"<think>\nEasy.\n</think>\n\n{program}", f"{thought}</think>\n\nNo idea.", thought)
    assert reward(task, row, tmp_path, *responses, program) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("recipe", ["gsm8k", "code_problems"])
def test_prompt_and_longest_response_fit_a_microbatch_and_the_context_of_qwen3(recipe: str, place: Path) -> None:
    config = load_config([f"recipe={recipe}", f"model.path='{place / 'model'}'", *KEYS], command="rollout")
    assert isinstance(config.task, DatasetTaskConfig)
    [data] = config.task.data_sets
    longest = (config.task.longest_prompt or 0) + config.rollout.max_new_tokens
    assert data.hub
    assert longest <= config.trainer.microbatch_tokens
    assert longest <= 32768
