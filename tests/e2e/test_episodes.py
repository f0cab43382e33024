"""Runs whose prompts are played in several turns: proved, accounted for, stopped and resumed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from example_commands import EXAMPLES
from moerl_runs import Fault, Runs, rows
from waiting import eventually

from moerl.buffer.ledger import LEDGER_FILE, Ledger
from moerl.contract.disk import read_parquet
from moerl.contract.trajectory import Trajectory, TurnKind
from moerl.rollout.tokenizers import build_tokenizer

STEPS, PER_STEP = 3, 16
GUESS = ("recipe=tiny", "task=guess", f"rl.steps={STEPS}")
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOLS_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLOCK = """
from moerl.tasks.tools.functions import FunctionTool
from moerl.tasks.tools.loop import answer_with_tools, conversation_with

def now() -> str:
    return "noon"

TOOLS = [FunctionTool(now)]

async def play(prompt, session):
    chat = await conversation_with(prompt, session, TOOLS)
    answer = await answer_with_tools(chat, TOOLS, max_calls=8, max_turns=3)
    return {"reward": float(answer.num_calls > answer.num_failed), **answer.rewards}
"""
IN_PROCESS = ("rollout.placement=process", "buffer.max_staleness=1")


def trained(run: Path) -> list[Trajectory]:
    return [t for step in range(1, STEPS + 1) for t in read_parquet(run / "rollouts" / f"step-{step:06d}.parquet")]


def assert_whole(run: Path) -> None:
    """Every episode is trained once, with the turns that it had, as the engine sampled it."""
    ledger = Ledger.restored(json.loads((run / LEDGER_FILE).read_text()))
    assert (ledger.issued, ledger.trained, ledger.pending) == (STEPS * PER_STEP, STEPS * PER_STEP, 0)
    episodes = trained(run)
    assert len({t.lineage.rollout_id for t in episodes}) == len(episodes) == STEPS * PER_STEP
    assert any(turn.kind is TurnKind.OBSERVATION for t in episodes for turn in t.turns)
    for trajectory in episodes:
        num_turns = sum(turn.kind is TurnKind.SAMPLED for turn in trajectory.turns)
        assert num_turns == trajectory.rewards["guesses"]
        assert trajectory.routed.all()
    steps = [row for row in rows(run) if row["stage"] == "rl"]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert all(row["mismatch/logprob_abs_mean"] < 1e-5 for row in steps), "float32: both agree in every turn"
    assert all(row["replay/rows_verified"] > 0 for row in steps)


def assert_shown(run: Path) -> None:
    """Dumps and tables of evaluations have the spans of every episode, and steps have its metrics."""
    for path in [*(run / "rollouts").glob("*.parquet"), *(run / "evaluations").glob("*.parquet")]:
        for row in pq.read_table(path).to_pylist():
            assert max(span["turn"] for span in row["spans"]) == row["reward_guesses"], path
            assert sum(span["num_tokens"] for span in row["spans"] if span["turn"]) == row["num_sampled"]
            behind = "".join(span["text"] for span in row["spans"][1:])
            assert row["text"].replace("<eos>", "").startswith(behind), path
    assert all(t.timings["environment_seconds"] > 0.0 for t in trained(run))
    for row in rows(run):
        if row["stage"] == "rl":
            assert row["episode/turns_mean"] == pytest.approx(row["reward/guesses/mean"])


def test_a_run_of_episodes_trains_every_turn_under_its_own_routes(forked: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = forked.run("train", *GUESS, f"run_dir='{run}'")
    assert finished.status == 0, finished.output
    assert_whole(run)
    assert_shown(run)


@pytest.mark.slow
def test_a_run_of_two_agents_learns_both_from_an_expert_and_trains_each_session_once(
    forked: Runs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    keys = ("recipe=tiny", "task=self_play", "task.num_train=200", f"rl.steps={STEPS}", "algorithm.credit=agent")
    finished = forked.run("train", *keys, "sft.steps=60", "rollout.max_new_tokens=64", f"run_dir='{run}'")
    assert finished.status == 0, finished.output
    ledger = Ledger.restored(json.loads((run / LEDGER_FILE).read_text()))
    assert (ledger.issued, ledger.trained, ledger.pending) == (STEPS * PER_STEP, STEPS * PER_STEP, 0)
    sessions = trained(run)
    agents = Counter(t.lineage.agent_id for t in sessions)
    valid = sum(t.rewards["valid"] for t in sessions if t.lineage.agent_id == "proposer")
    assert set(agents) <= {"proposer", "solver"}
    assert (agents["proposer"], agents["solver"]) == (STEPS * PER_STEP, 4 * valid)


@pytest.mark.slow
@pytest.mark.parametrize("text_as", ["raw", "chat"])
def test_a_run_on_a_set_of_reasoning_gym_tries_again(text_as: str, forked: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = ("recipe=tiny", "task=reasoning_gym", "task.dataset=chain_sum", f"task.text_as={text_as}")
    sizes = ("task.num_train=100", "task.num_dev=8", "task.num_heldout=8", f"rl.steps={STEPS}")
    finished = forked.run("train", *keys, *sizes, "rollout.max_new_tokens=96", f"run_dir='{run}'")
    assert finished.status == 0, finished.output
    for trajectory in trained(run):
        num_turns = sum(turn.kind is TurnKind.SAMPLED for turn in trajectory.turns)
        assert num_turns == trajectory.rewards["tries"]


@pytest.mark.slow
def test_a_run_of_conversations_keeps_the_tokens_of_every_turn(forked: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = forked.run("train", *GUESS, "task.text_as=chat", "rollout.max_new_tokens=64", f"run_dir='{run}'")
    assert finished.status == 0, finished.output
    assert_whole(run)


@pytest.mark.slow
def test_a_run_of_conversations_with_tools_trains_what_the_policy_read(forked: Runs, tmp_path: Path) -> None:
    made = build_tokenizer([NOW, "What time is it? system user assistant tool"], 400, any_text=True, chats=True)
    made.chat_template = TOOLS_TEMPLATE
    made.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "clock.py").write_text(CLOCK)
    schema = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    lines = [{"prompt": f"What time is it, {i}?", "response": NOW, "tools": [schema]} for i in range(400)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    keys = (
        *("recipe=tiny", "model=laptop", "model.tokenizer=tokenizer", "sft.steps=50", "sft.num_examples=256"),
        *("task=environment", "task.path=rows.jsonl", "task.response=response", "task.tools=tools"),
        *("task.play=clock:play", "rollout.max_new_tokens=250", "trainer.microbatch_tokens=4096"),
    )
    finished = forked.run("train", *keys, f"rl.steps={STEPS}", f"run_dir='{tmp_path / 'run'}'", cwd=tmp_path)
    assert finished.status == 0, finished.output
    episodes = trained(tmp_path / "run")
    assert len(episodes) == STEPS * PER_STEP
    called = [each for each in episodes if each.rewards["tool_calls"]]
    assert called
    assert all(any(turn.kind is TurnKind.OBSERVATION for turn in each.turns) for each in called)


@pytest.mark.slow
def test_a_run_of_episodes_that_was_killed_goes_on_from_its_journal(forked: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Then the checkpoint of the first step is there: that of the second waited for it.
    kill: Fault = ("kill", {"place": "moerl.orchestration.rl:RLStage._update", "call": 3})
    assert forked.run("train", *GUESS, *IN_PROCESS, f"run_dir='{run}'", fault=kill).status == -signal.SIGKILL
    finished = forked.run("train", f"resume={run}")
    assert finished.status == 0, finished.output
    assert "finished groups that are taken from the journal: " in finished.output
    ledger = Ledger.restored(json.loads((run / LEDGER_FILE).read_text()))
    assert (ledger.trained, ledger.pending) == (STEPS * PER_STEP, 0)
    names = [t.lineage.rollout_id for t in trained(run)]
    assert len(set(names)) == len(names) == STEPS * PER_STEP
    ages = np.concatenate([t.policy_versions[t.sampled] for t in trained(run)])
    assert ages.min() >= 0


@pytest.mark.slow
def test_a_run_of_agents_over_http_that_was_killed_goes_on_and_leaves_no_agent_behind(
    forked: Runs, tmp_path: Path
) -> None:
    folder, run = tmp_path / "agent", tmp_path / "run"
    shutil.copytree(EXAMPLES / "agent", folder)
    subprocess.run([sys.executable, "make_data.py"], cwd=folder, check=True)
    keys = (
        *("recipe=tiny", "task=environment", "task.path=numbers.jsonl", "task.response=response", "task.play=env:play"),
        "task.turn_seconds=600",  # by the clock: a loaded machine is slow to start the agents
        *("rollout.max_new_tokens=160", f"rl.steps={STEPS}", *IN_PROCESS, f"run_dir='{run}'"),
    )
    kill: Fault = ("kill", {"place": "moerl.orchestration.rl:RLStage._update", "call": 2})
    assert forked.run("train", *keys, fault=kill, cwd=folder).status == -signal.SIGKILL
    finished = forked.run("train", f"resume={run}", cwd=folder)
    assert finished.status == 0, finished.output
    ledger = Ledger.restored(json.loads((run / LEDGER_FILE).read_text()))
    assert (ledger.trained, ledger.pending) == (STEPS * PER_STEP, 0)
    names = [t.lineage.rollout_id for t in trained(run)]
    assert len(set(names)) == len(names) == STEPS * PER_STEP
    eventually(lambda: not agents_of(folder))


def agents_of(folder: Path) -> list[int]:
    """Processes of agents that work in a folder. An agent of a killed run ends once its request fails."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder and b"agent.py" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found
