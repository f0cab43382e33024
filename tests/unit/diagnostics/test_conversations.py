"""Episodes of a dump as conversations."""

from __future__ import annotations

from typing import Any

import pytest

from moerl.diagnostics.conversations import ShownLimits, calls_in, conversation_of, episodes_of, versions_of

ALL = ShownLimits(sessions=99, turns=99, characters=9999)


def span(kind: str, text: str, turn: int = 0, version: int = -1, num_tokens: int = 2) -> dict[str, Any]:
    return {
        "kind": kind,
        "turn": turn,
        "version": version,
        "num_tokens": num_tokens,
        "has_end": bool(turn),
        "text": text,
    }


def session(number: int = 0, parent: int | None = None, fork_at: int = -1, **changes: Any) -> dict[str, Any]:
    """A prompt and two turns of two tokens each, with a text of the environment between them."""
    spans = [span("prompt", "question"), span("sampled", "one", 1, 3), span("observation", "more")]
    return {
        "rollout_id": f"e~{number}" if number else "e",
        "episode_id": "e",
        "agent_id": "",
        "parent_rollout_id": "" if parent is None else f"e~{parent}" if parent else "e",
        "fork_at": fork_at,
        "num_sampled": 4,
        "finish_reason": "stop",
        "reward_reward": 1.0,
        "spans": [*spans, span("sampled", "two", 2, 4)],
    } | changes


def titles(rows: list[dict[str, Any]]) -> list[str]:
    return [each.title for each in conversation_of(rows, ALL)]


def test_sessions_of_an_episode_are_together_and_in_order() -> None:
    other = {"rollout_id": "x", "episode_id": ""}
    rows = [session(10), other, session(2), session()]
    assert [[row["rollout_id"] for row in each] for each in episodes_of(rows)] == [["e", "e~2", "e~10"], ["x"]]
    assert len(episodes_of([{"text": "a"}, {"text": "a"}])) == 2, "a table of an evaluation has no ids"


def test_a_fork_is_shown_with_its_parent_and_place() -> None:
    forks = [session(), session(1, 0, 4), session(2, 0, 8), session(3, 1, 3), session(4, agent_id="helper")]
    assert titles(forks) == [
        "session 0: the episode's prompt (4 tokens, stop)",
        "session 1: fork of session 0, behind its turn 1 (token 4) (4 tokens, stop)",
        "session 2: fork of session 0, behind its turn 2 (token 8) (4 tokens, stop)",
        "session 3: fork of session 1, behind its turn 0 (token 3) (4 tokens, stop)",
        "session 4, agent helper: a prompt of its own (4 tokens, stop)",
    ]
    assert titles([session(1, 0, 4, agent_id="x")])[0].startswith("session 1, agent x: fork of e, behind token 4")
    assert titles([session()]) == [""]


def test_titles_of_turns_say_author_length_versions_and_end() -> None:
    mixed = [span("sampled", "o", 1, 3), span("sampled", "ne", 1, 4)]
    cut = span("sampled", "two", 2, 4, 1) | {"has_end": False}
    (found,) = conversation_of([session(spans=[span("prompt", "q"), *mixed, cut])], ALL)
    assert [turn.title for turn in found.turns] == [
        "prompt (2 tokens)",
        "policy, turn 1 (4 tokens, versions 3, 4, stop)",
        "policy, turn 2 (1 token, version 4, cut)",
    ]
    assert versions_of([found]) == [3, 4]


def test_calls_are_named_and_what_follows_is_of_tools_in_forks_too() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    spans = [span("prompt", "q"), span("sampled", call, 1, 3), span("observation", "1"), span("sampled", "x", 2, 3)]
    fork = [span("shared", ""), span("shared", ""), span("observation", "2"), span("sampled", "y", 1, 3)]
    first, second = conversation_of([session(spans=spans), session(1, 0, 4, spans=fork)], ALL)
    assert first.turns[1].title == "policy, turn 1 (2 tokens, version 3, stop), calls add(a=1)"
    assert [turn.who for turn in first.turns] == ["prompt", "policy", "tools", "policy"]
    assert [turn.who for turn in second.turns] == ["tools", "policy"]


def test_rewards_of_a_session_are_shown_if_they_are_not_those_of_the_episode() -> None:
    found = conversation_of([session(), session(1, reward_reward=0.5, reward_x=None), session(2)], ALL)
    assert [each.rewards for each in found] == [{}, {"reward": 0.5}, {}]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "a", "arguments": {}} {"name": "b", "parameters": {"x": [1]}}', [("a", {}), ("b", {"x": [1]})]),
        ('{"name": "a", "arguments": "{\\"x\\": 1}"}', [("a", {"x": 1})]),
        (
            '[{"name": "a", "arguments": {"of": {"name": "b", "arguments": {}}}}]',
            [("a", {"of": {"name": "b", "arguments": {}}})],
        ),
        ('{ {"name": "a", "arguments": {}}', [("a", {})]),
        ('{"name": "a"} {"name": 1, "arguments": {}} {"name": "a", "arguments": "x"} {"name"', []),
        ("{" * 5000, []),
    ],
)
def test_calls_are_json_objects_with_a_name_and_arguments(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert calls_in(text) == calls


def test_the_middle_of_what_is_long_is_left_out_and_the_place_says_so() -> None:
    rows = [session(number) for number in range(4)]
    found = conversation_of(rows, ShownLimits(sessions=2, turns=2, characters=4))
    assert [each.title for each in found][2:] == ["[... 2 sessions ...]"]
    assert [turn.title for turn in found[0].turns] == [
        "prompt (2 tokens)",
        "[... 2 turns ...]",
        "policy, turn 2 (2 tokens, version 4, stop)",
    ]
    assert "".join(piece.text for piece in found[0].turns[0].pieces) == "qu\n[... 4 characters ...]\non"
    mixed = [span("sampled", "ab", 1, 3), span("sampled", "cdef", 1, 4)]
    (cut,) = conversation_of([session(spans=mixed)], ShownLimits(sessions=2, turns=2, characters=5))
    assert [(piece.text, piece.version) for piece in cut.turns[0].pieces] == [
        ("ab", 3),
        ("\n[... 2 characters ...]\n", None),
        ("ef", 4),
    ]
