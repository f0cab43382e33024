"""Ranks in processes of their own: what they are told, and what becomes of a run where one fails, ends or is silent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually, is_alive, status_of

from moerl.config.load import load_config
from moerl.config.ranks import RankConfig
from moerl.contract.commands import Load, PollSave, Publish, Step
from moerl.contract.weight_update import UpdateKind
from moerl.errors import CheckpointError, TrainerError, UnprovedError
from moerl.machine.interfaces import LOOPBACK
from moerl.ranks import processes
from moerl.ranks.processes import Processes

FAKE = (sys.executable, str(Path(__file__).with_name("fake_rank.py")))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes the folder in which fake ranks run and leave their traces; checks at the end that no rank is alive."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "PROGRAM", FAKE)
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    yield tmp_path
    eventually(lambda: not any(is_alive(int(file.read_text())) for file in tmp_path.glob("pid-*")))


def config_of(folder: Path, *keys: str) -> RankConfig:
    keys = ("recipe=tiny", "parallel.expert=2", f"run_dir='{folder / 'run'}'", *keys)
    return RankConfig.of(load_config(keys, command="train"))


def start(folder: Path, parts: dict[str, Any], *keys: str, watch: Any = lambda done, total: None) -> Processes:
    """Ranks that do at some commands what `parts` says, by rank and command."""
    (folder / "fake.json").write_text(json.dumps(parts))
    return Processes(config_of(folder, *keys), watch)


def test_every_rank_gets_its_own_frame_and_sends_its_own_reply(folder: Path):
    seen: list[tuple[int, int]] = []
    ranks = start(folder, {"0": {"step": "progress"}, "1": {"step": "progress"}}, watch=lambda *told: seen.append(told))
    replies = ranks.ask(Load(0), [b"", b"x" * (5 << 20)])
    assert [reply.metrics for reply in replies] == [{"rank": 0, "frame_bytes": 0}, {"rank": 1, "frame_bytes": 5 << 20}]
    assert len(ranks.ask(Step(0, prove=True))) == 2
    # Of rank 0 alone.
    assert seen == [(1, 2)]
    assert ranks.peak_rss_bytes == [7, 7]
    ranks.close()


def test_ranks_work_while_the_controller_does_something_else(folder: Path):
    seen: list[tuple[int, int]] = []
    ranks = start(folder, {"0": {"publish": "progress"}}, watch=lambda *told: seen.append(told))
    ranks.tell(Publish(3, UpdateKind.FULL, None))
    assert seen == []
    assert [reply.metrics["rank"] for reply in ranks.replies()] == [0, 1]
    assert seen == [(1, 2)]
    # Replies that were not asked for are read before the next command, which gets its own.
    ranks.tell(Publish(4, UpdateKind.FULL, None))
    assert [reply.metrics["frame_bytes"] for reply in ranks.ask(Load(0), [b"", b"four"])] == [0, 4]
    assert seen == [(1, 2), (1, 2)]
    ranks.close()


def test_the_error_of_ranks_that_were_told_is_raised_by_whatever_comes_next(folder: Path):
    ranks = start(folder, {"0": {"publish": "refuse"}, "1": {"publish": "refuse"}})
    ranks.tell(Publish(3, UpdateKind.FULL, None))
    with pytest.raises(CheckpointError, match="it is corrupt"):
        ranks.ask(Step(0, prove=True))
    assert len(ranks.ask(Step(0, prove=True))) == 2
    ranks.tell(Publish(4, UpdateKind.FULL, None))
    with pytest.raises(CheckpointError, match="it is corrupt"):
        ranks.replies()
    ranks.close()


def test_a_rank_that_is_gone_before_it_is_told_is_named(folder: Path):
    ranks = start(folder, {})
    os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
    eventually(lambda: not is_alive(int((folder / "pid-1").read_text())))
    ranks.tell(Publish(3, UpdateKind.FULL, None))
    with pytest.raises(TrainerError, match="rank 1 of the trainer was lost in 'publish'"):
        ranks.replies()


def test_ranks_know_their_place_and_share_the_threads(folder: Path):
    start(folder, {}, "num_threads=3").close()
    first, second = (json.loads((folder / f"env-{rank}").read_text()) for rank in (0, 1))
    assert [(each["RANK"], each["LOCAL_RANK"], each["WORLD_SIZE"]) for each in (first, second)] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert first["OMP_NUM_THREADS"] == second["OMP_NUM_THREADS"] == "1"
    assert first["GLOO_SOCKET_IFNAME"] == LOOPBACK


def test_nothing_is_left_of_ranks_that_wrote_nothing(folder: Path):
    start(folder, {}).close()
    assert list((folder / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("act", "seen"),
    [("die", "killed by SIGKILL; it wrote nothing"), ("exit", "it ended with status 3; its output is in")],
)
def test_a_rank_that_ends_is_named_with_command_and_log_and_the_other_is_ended(folder: Path, act: str, seen: str):
    # The other waits for it, as in a collective.
    ranks = start(folder, {"0": {"step": "hang"}, "1": {"step": act}})
    with pytest.raises(TrainerError, match="rank 1 of the trainer was lost in 'step'") as caught:
        ranks.ask(Step(0, prove=True))
    assert seen in str(caught.value)
    assert not any(is_alive(int((folder / f"pid-{rank}").read_text())) for rank in (0, 1))
    with pytest.raises(TrainerError, match="have ended"):
        ranks.ask(Step(0, prove=True))
    ranks.close()


def test_a_rank_that_hangs_past_the_deadline_is_named(folder: Path):
    ranks = start(folder, {"1": {"publish": "hang"}})
    ranks._seconds = 2.0
    with pytest.raises(TrainerError, match="rank 1 of the trainer was lost in 'publish'; seen: no reply within 2 s"):
        ranks.ask(Publish(3, UpdateKind.FULL, None))
    assert not any(is_alive(int((folder / f"pid-{rank}").read_text())) for rank in (0, 1))


def test_a_rank_that_refuses_while_others_wait_for_it_ends_them_with_its_reason(folder: Path):
    ranks = start(folder, {"0": {"pollsave": "hang"}, "1": {"pollsave": "refuse"}})
    with pytest.raises(CheckpointError, match="it is corrupt; seen: rank 1: a hole; remedy: mend it"):
        ranks.ask(PollSave(wait=True))
    assert not is_alive(int((folder / "pid-0").read_text()))


def test_an_error_that_is_not_ours_names_rank_and_command(folder: Path):
    ranks = start(folder, {"1": {"step": "crash"}})
    with pytest.raises(TrainerError, match="rank 1 failed in 'step'; seen: ZeroDivisionError: division by zero"):
        ranks.ask(Step(0, prove=True))
    ranks.close()


def test_after_a_proof_that_failed_on_all_ranks_they_can_be_asked_for_the_reason(folder: Path):
    ranks = start(folder, {"0": {"step": "unproved"}, "1": {"step": "unproved4"}})
    with pytest.raises(UnprovedError, match="not proved; seen: a checksum") as caught:
        ranks.ask(Step(0, prove=True))
    assert caught.value.microbatch == 4
    assert len(ranks.ask(PollSave(wait=False))) == 2
    ranks.close()


def test_ranks_die_with_a_controller_that_is_killed(folder: Path):
    program = f"""
        import sys, time
        from pathlib import Path
        from moerl.config.load import load_config
        from moerl.config.ranks import RankConfig
        from moerl.contract.commands import Step
        from moerl.ranks import processes
        processes.PROGRAM = {FAKE!r}
        keys = ["recipe=tiny", "parallel.expert=2", "run_dir='{folder / "run"}'"]
        ranks = processes.Processes(RankConfig.of(load_config(keys, command="train")), lambda *told: None)
        Path("ready").touch()
        ranks.ask(Step(0, prove=True))
    """
    (folder / "fake.json").write_text(json.dumps({rank: {"step": "hang"} for rank in ("0", "1")}))
    path = os.pathsep.join(sys.path)
    controller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, "PYTHONPATH": path}, cwd=folder
    )
    eventually((folder / "ready").exists, seconds=120)
    controller.send_signal(signal.SIGKILL)
    status_of(controller, 30.0)
    # The fixture waits until they are gone.
