"""The command of each folder of examples/, taken from its page and run in a copy of the folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from example_commands import EXAMPLES, command_of
from moerl_runs import Runs, rows
from waiting import run_within

ALIKE = ("agent", "chat_dataset", "distillation", "foreign_dump", "programs")
"""Their parts have tests of their own; CI runs the other examples."""
FOLDERS = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
FEW = (
    *("sft.steps=2", "sft.batch_size=8", "sft.num_examples=64", "rl.steps=1", "rl.prompts_per_step=4"),
    *("rl.group_size=2", "rollout.max_new_tokens=12", "evaluation.dev_problems=4", "evaluation.heldout_problems=4"),
)
LIMIT_SECONDS = 1500


@dataclass(frozen=True)
class Outcome:
    """Expected outcome of the command of an example.

    less: added to the last `moerl`, so that CI waits for seconds. first: the same for those before it. status: of its
    end. leaves: a file that it writes. said: a part of its output, with `less` too.
    """

    less: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    status: int = 0
    leaves: str = ""
    said: str = ""


OUTCOMES = {
    "own_task": Outcome(FEW, leaves="runs/sort/final_model/config.json"),
    "chat_dataset": Outcome((*FEW, "evaluation.samples=2"), leaves="runs/chat_sums/final_model/config.json"),
    "programs": Outcome((*FEW, "evaluation.samples=2"), leaves="runs/programs/final_model/config.json"),
    "custom_loss": Outcome(leaves="runs/custom_loss/report.html"),
    "distillation": Outcome(("rl.steps=2",), ("sft.steps=2",), leaves="runs/distilled/report.html"),
    "agent": Outcome((*FEW, "rollout.max_new_tokens=160"), leaves="runs/agent/report.html"),
    "sweep": Outcome(("--show-config",), said="keep_routing.mode=rollout"),
    "slurm_one_node": Outcome(said="#SBATCH --nodes=1"),
    "slurm_two_nodes": Outcome(said="#SBATCH --nodes=2"),
    "foreign_dump": Outcome(status=1, said="Log-probs are those before the temperature of 0.6 was applied (certain"),
}


def words_of(command: str) -> list[list[str]]:
    """Returns the words of each program of a command, which has nothing that a shell would expand."""
    assert not re.search(r"[$*~`;|<>]", command), "a command that only a shell can read"
    lexer = shlex.shlex(command, posix=True, punctuation_chars="&")
    lexer.whitespace_split = True
    words = list(lexer)
    ands = [index for index, word in enumerate(words) if word == "&&"]
    return [words[i + 1 : j] for i, j in zip([-1, *ands], [*ands, len(words)], strict=True)]


@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in FOLDERS]
)
def test_the_command_of_an_example_runs_in_a_copy_of_its_folder(example: str, forked: Runs, tmp_path: Path) -> None:
    wanted = OUTCOMES[example]
    folder, no_ray = tmp_path / example, tmp_path / "path"
    shutil.copytree(EXAMPLES / example, folder)
    # A dry run asks whether there is a package of this name, and no more.
    (no_ray / "ray").mkdir(parents=True)
    (no_ray / "ray" / "__init__.py").touch()
    *first, last = words_of(command_of(example))
    for program, *arguments in first:
        if program == "moerl":
            before = forked.run(*arguments, *wanted.first, cwd=folder)
            assert before.status == 0, before.output
            continue
        assert program == "python"
        subprocess.run([sys.executable, *arguments], cwd=folder, check=True)
    assert last[0] == "moerl"
    finished = forked.run(*last[1:], *wanted.less, cwd=folder, path=[no_ray])
    assert finished.status == wanted.status, finished.output
    assert wanted.said in finished.output
    assert not wanted.leaves or (folder / wanted.leaves).is_file()
    if example in ("chat_dataset", "programs"):
        run = folder / wanted.leaves.partition("/final_model")[0]
        first_reward = "right" if example == "chat_dataset" else "passed"
        [step] = [row for row in rows(run) if row["stage"] == "rl"]
        assert step[f"reward/{first_reward}/mean"] == step["accuracy/mean"]
        assert "reward/form/mean" in step
        table = pq.read_table(run / "evaluations" / "heldout-000001.parquet").to_pylist()
        assert len(table) == 4 * 3
        opening = "<|im_start|>system\nAdd.<|im_end|>\n" if example == "chat_dataset" else "<|im_start|>user\n"
        assert all(row["prompt"].startswith(opening) for row in table)


def test_every_example_has_a_page_of_at_most_a_page_and_a_row_in_the_table() -> None:
    assert sorted(OUTCOMES) == FOLDERS
    table = (EXAMPLES / "README.md").read_text()
    assert re.findall(r"^\| \[(\w+)\]\(\1/README\.md\)", table, re.MULTILINE) == list(OUTCOMES)
    for example in FOLDERS:
        assert len((EXAMPLES / example / "README.md").read_text().splitlines()) <= 50
        assert words_of(command_of(example))


@pytest.mark.slow
@pytest.mark.parametrize("example", [name for name in FOLDERS if not name.startswith("slurm")])
def test_an_example_does_as_written_what_its_page_says(example: str, tmp_path: Path) -> None:
    folder = tmp_path / example
    shutil.copytree(EXAMPLES / example, folder)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    words = ["bash", "-euo", "pipefail", "-c", command_of(example)]
    done = run_within(words, LIMIT_SECONDS, cwd=folder, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == OUTCOMES[example].status, done.stdout[-4000:] + done.stderr[-4000:]
    for name in ("sort", "chat_sums", "programs"):
        for summary in folder.glob(f"runs/{name}/summary.json"):
            found = json.loads(summary.read_text())
            assert found["heldout_accuracy_final"] > found["heldout_accuracy_cold_start"] + 0.1
    if example == "sweep":
        states = [run["state"] for run in json.loads((folder / "runs/modes/sweep.json").read_text())["runs"]]
        assert states == ["finished"] * 4
