"""Runs of episodes with several sessions, and of episodes that go on with their turns after a kill."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from moerl_runs import Runs, rows

from moerl.buffer.ledger import LEDGER_FILE, Ledger
from moerl.contract.disk import read_parquet

STEPS, PER_STEP = 5, 16
EVALUATED = 16
ENVIRONMENT = f"""
import asyncio, os, signal
from pathlib import Path

begun = waiting = 0

async def play(prompt, session):
    global begun, waiting
    begun += 1
    is_late = begun > {EVALUATED + 3 * PER_STEP}
    first = await session.sample(4)
    if is_late and not Path("killed").exists():
        waiting += 1
        while waiting < {2 * PER_STEP}:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)  # the checkpoint before the latest weights is whole by then
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    session.observe(" and ")
    second = await session.sample(4)
    return {{"reward": float(len(first.text) > len(second.text))}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("repeatable", [True, False])
def test_unfinished_episodes_go_on_with_their_turns_if_their_environment_can_be_repeated(
    repeatable: bool, forked: Runs, tmp_path: Path
) -> None:
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    lines = [{"prompt": f"What comes behind {i}?"} for i in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    keys = (
        *("recipe=tiny", "sft.steps=0", "task=environment", "task.path=rows.jsonl", "task.play=env:play"),
        *(f"task.repeatable={str(repeatable).lower()}", "rollout.placement=process", "buffer.max_staleness=1"),
        *("evaluation.every=0", f"rl.steps={STEPS}", "rollout.max_new_tokens=24", f"run_dir='{tmp_path / 'run'}'"),
    )
    killed = forked.run("train", *keys, cwd=tmp_path)
    assert killed.status == -signal.SIGKILL, killed.output
    finished = forked.run("train", f"resume={tmp_path / 'run'}", cwd=tmp_path)
    assert finished.status == 0, finished.output
    ledger = Ledger.restored(json.loads((tmp_path / "run" / LEDGER_FILE).read_text()))
    assert (ledger.trained, ledger.pending) == (STEPS * PER_STEP, 0)
    # Of the two steps' episodes that waited, one step's were sampled by the weights of a checkpoint.
    assert (ledger.again["resumed"] >= PER_STEP) == repeatable
    assert repeatable or ledger.again["anew"] > 0
    found = [
        t
        for step in range(1, STEPS + 1)
        for t in read_parquet(tmp_path / "run" / "rollouts" / f"step-{step:06d}.parquet")
    ]
    assert len({t.lineage.rollout_id for t in found}) == len(found) == STEPS * PER_STEP
    assert all(len(t.sampled_turns) == 2 and t.routed.all() for t in found)


FORKING = """
import asyncio

async def play(prompt, session):
    await session.sample(8)
    session.observe(" and then ")
    forks = [session.fork("helper", 1) for _ in range(3)]
    for fork in forks:
        fork.observe(" helper: ")
    turns = await asyncio.gather(*(each.sample(6) for each in (session, *forks)))
    for each, turn in zip((session, *forks), turns):
        each.rewards["reward"] = float(len(turn.text))
    return {}
"""


@pytest.mark.slow
def test_forks_with_rewards_of_their_own_go_on_from_the_rows_of_their_session(forked: Runs, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(FORKING)
    lines = [{"prompt": f"What comes behind the number {i}?"} for i in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    keys = (
        *("recipe=tiny", "sft.steps=0", "task=environment", "task.path=rows.jsonl", "task.play=env:play"),
        *("algorithm.credit=agent", "trainer.share_prompts=true", "trainer.microbatch_tokens=2048"),
        *("rollout.max_new_tokens=40", "rl.skip_above=0.9", f"run_dir='{tmp_path / 'run'}'"),
    )
    finished = forked.run("train", *keys, cwd=tmp_path)
    assert finished.status == 0, finished.output
    steps = [row for row in rows(tmp_path / "run") if row["stage"] == "rl"]
    assert steps
    for row in steps:
        assert row["packing/shared_rows"] > 1.0, "three forks of each session: their experts are those of the session"
        assert row["mismatch/logprob_abs_max"] < 1e-5
        assert row["episode/sessions_mean"] == 4.0
