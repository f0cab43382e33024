"""Responses of a run in the terminal."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from episode_dumps import write_dump

from moerl import cli
from moerl.diagnostics.conversations import SpokenPiece, SpokenSession, SpokenTurn
from moerl.launch.samples import conversation_text


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    rows = [
        {
            "set": name,
            "prompt_id": f"{name}:{i}",
            "prompt": f"What is {i}?",
            "text": f"response {name} {i}\x1b[2J",
            "num_sampled": i,
            "finish_reason": "stop",
            "reward_reward": float(i),
            "reward_form": float(-i),
        }
        for name in ("a", "b")
        for i in range(4)
    ]
    (tmp_path / "evaluations").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "evaluations" / "dev-000001.parquet")
    return tmp_path


def test_the_best_and_the_worst_are_shown_with_their_rewards(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["samples", str(run_dir), "--count", "1", "--set", "b"]) == 0
    shown = capsys.readouterr().out
    assert "4 responses, by reward_reward" in shown
    assert "--- highest: b:3  reward 3  form -3  (3 tokens, stop)\nprompt:\n  | What is 3?\nresponse:\n" in shown
    assert "--- lowest: b:0" in shown
    assert "b:1" not in shown
    assert "\x1b" not in shown


def test_any_reward_may_sort(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["samples", str(run_dir), "--by", "reward_form", "--count", "1", "--best"]) == 0
    assert "highest: a:0" in capsys.readouterr().out


def test_an_episode_is_a_conversation_with_the_versions_of_its_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_dump(tmp_path / "rollouts" / "step-000003.parquet")
    assert cli.main(["samples", str(tmp_path), "--count", "1"]) == 0
    shown = capsys.readouterr().out
    assert "4 responses in 2 episodes, by reward_reward\n\n--- highest: p  reward 1  (3 sessions, 5 turns," in shown
    assert " s in the environment)\n== session 0: the episode's prompt (" in shown
    assert ", calls add(a=2, b=2):\n  | I add.\n  | <tool_call>\n" in shown
    assert "tools (43 tokens):\n  | \n  | <|im_start|>tool\n  | 4<|im_end|>\n" in shown
    assert "(16 tokens, versions 3, 4, stop):\n  v3 | It is \n  v4 + 4.\n  v4 | Is it?\n" in shown
    assert "== session 1: fork of session 0, behind its turn 1 (token 235) (8 tokens, stop)\ntools (" in shown
    assert "== session 2, agent checker: a prompt of its own (13 tokens, stop)  reward 0.25\n" in shown
    assert "--- lowest: prompt-of-r1  reward 0  (1 turn, 4 tokens, stop)\nprompt (3 tokens):" in shown
    assert "\x1b" not in shown


def test_a_terminal_shows_versions_by_colour_with_a_legend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    write_dump(tmp_path / "rollouts" / "step-000003.parquet")
    assert cli.main(["samples", str(tmp_path), "--best", "--count", "1"]) == 0
    shown = capsys.readouterr().out
    assert "sampled by \x1b[36mversion 3\x1b[0m  \x1b[33mversion 4\x1b[0m\n" in shown
    assert "  | \x1b[36mIt is \x1b[0m\x1b[33m4.\x1b[0m\n  | \x1b[33mIs it?\x1b[0m\n" in shown


@pytest.mark.parametrize("is_colored", [False, True])
def test_texts_and_titles_of_a_conversation_have_no_control_characters(is_colored: bool):
    turn = SpokenTurn("policy", "policy \x1b[2J", (SpokenPiece("a\x1b[2J\u202e", 3), SpokenPiece("b\x07", 4)))
    session = SpokenSession("agent \x1b]0;", (turn,))
    shown = conversation_text([session], is_colored=is_colored).plain
    assert not {"\x1b", "\x07", "\u202e"} & {*shown}
    assert shown.count("\\x1b") == 3


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--set", "c"], "no responses of the set c; seen: a, b"),
        (["--by", "reward_x"], "--by: no such column; seen: reward_x"),
        (["--of", "rollouts/none.parquet"], "no responses; seen: rollouts/none.parquet"),
    ],
)
def test_what_is_not_there_is_named(arguments: list[str], part: str, run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["samples", str(run_dir), *arguments]) == 2
    assert part in capsys.readouterr().err


def test_a_broken_file_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    (run_dir / "evaluations" / "dev-000001.parquet").write_bytes(b"PAR1")
    assert cli.main(["samples", str(run_dir)]) == 2
    assert "dev-000001.parquet: cannot be read" in capsys.readouterr().err
