"""A run whose policy plays against itself: each player is trained with its own rewards, and a game counts once."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from moerl_runs import Runs

from moerl.buffer.ledger import LEDGER_FILE, Ledger
from moerl.contract.disk import read_parquet
from moerl.contract.trajectory import Trajectory

pytest.importorskip("textarena")
pytestmark = pytest.mark.environments
GAME = (
    *("recipe=tiny", "sft.steps=0", "rl.steps=1", "model.architecture.max_positions=4096", "evaluation.every=9"),
    *("trainer.microbatch_tokens=4096", "rollout.max_new_tokens=1024", "task=textarena", "task.text_as=raw"),
    *("task.game=TruthAndDeception-v0", "task.num_players=2", "task.max_turn_tokens=8"),
    *("task.num_train=8", "task.num_dev=8", "task.num_heldout=8"),
)


def test_players_are_trained_with_their_own_rewards_and_a_game_counts_once(forked: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = forked.run("train", *GAME, f"run_dir='{run}'")
    assert finished.status == 0, finished.output
    ledger = Ledger.restored(json.loads((run / LEDGER_FILE).read_text()))
    assert (ledger.issued, ledger.trained, ledger.pending) == (16, 16, 0)
    games: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in read_parquet(run / "rollouts" / "step-000001.parquet"):
        games[trajectory.lineage.episode].append(trajectory)
    assert len(games) == 16
    for players in games.values():
        assert [each.lineage.agent_id for each in players] == ["", "player-1"]
        assert sorted(each.rewards["reward"] for each in players) == [-1.0, 1.0]
