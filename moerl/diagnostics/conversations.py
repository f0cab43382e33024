"""Episodes that a run stored, as conversations: sessions, their turns, and who wrote what. Torch-free; any process.

Pure: from the rows of a dump or a table of evaluations to data that a terminal and a page show in the same form.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from moerl.contract.dump_columns import REWARD, SPANS
from moerl.contract.spans import SHARED
from moerl.telemetry.terminal import excerpt

Row = Mapping[str, Any]

_SHOWN_CALL, _MAX_CALLS = 60, 4
"""Characters of a call, and calls of a turn, that a title shows."""


@dataclass(frozen=True, slots=True)
class SpokenPiece:
    """Text that one version sampled, or that the policy did not write."""

    text: str
    """Text."""
    version: int | None = None
    """Weight version that sampled it; None if it was not sampled."""


@dataclass(frozen=True, slots=True)
class SpokenTurn:
    """A turn of the policy, or a text between its turns."""

    who: str
    """Author: `prompt`, `policy`, `environment`, or `tools` (the environment behind a turn with calls); empty for
    turns that are left out."""
    title: str
    """Author, with number, length, versions, end and calls."""
    pieces: tuple[SpokenPiece, ...]
    """Texts, in order."""


@dataclass(frozen=True, slots=True)
class SpokenSession:
    """A session of an episode."""

    title: str
    """Number, agent and origin; empty for the only session of an episode."""
    turns: tuple[SpokenTurn, ...]
    """Turns and texts between them, in order."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named rewards that differ from those of the episode's first session."""


@dataclass(frozen=True, slots=True)
class ShownLimits:
    """Most that is shown of an episode; what is in the middle is left out, and the place says so."""

    sessions: int
    """Sessions."""
    turns: int
    """Turns of a session, and texts between them."""
    characters: int
    """Characters of a turn."""


def episodes_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Returns rows by episode, each with its first session first; a row without an episode is one alone."""
    episodes: dict[str, list[Row]] = {}
    for number, row in enumerate(rows):
        episodes.setdefault(str(row.get("episode_id") or row.get("rollout_id") or f"#{number}"), []).append(row)
    return [sorted(episode, key=_number) for episode in episodes.values()]


def is_conversation(episode: Sequence[Row]) -> bool:
    """Returns whether the spans of an episode are known."""
    return all(row.get(SPANS) for row in episode)


def rewards_of(row: Row) -> dict[str, float]:
    """Returns the named rewards of a row, without those that it lacks."""
    found = {name.removeprefix(REWARD): value for name, value in row.items() if name.startswith(REWARD)}
    return {name: float(value) for name, value in found.items() if value is not None}


def conversation_of(episode: Sequence[Row], limits: ShownLimits) -> tuple[SpokenSession, ...]:
    """Returns the sessions of an episode whose spans are known."""
    by_id = {str(row.get("rollout_id")): row for row in episode}
    of_episode = rewards_of(episode[0])
    sessions = [_session(row, by_id, of_episode, limits, is_alone=len(episode) == 1) for row in episode]
    left = len(sessions) - limits.sessions
    note = [SpokenSession(f"[... {left} sessions ...]", ())] if left > 0 else []
    return (*sessions[: limits.sessions], *note)


def versions_of(sessions: Sequence[SpokenSession]) -> list[int]:
    """Returns the weight versions that sampled a conversation, ascending."""
    pieces = (piece for session in sessions for turn in session.turns for piece in turn.pieces)
    return sorted({piece.version for piece in pieces if piece.version is not None})


def _number(row: Row) -> int:
    """Returns the number of a session in its episode; that of the prompt is 0."""
    number = str(row.get("rollout_id") or "").removeprefix(str(row.get("episode_id") or "")).removeprefix("~")
    return int(number) if number.isdigit() else 0


def _session(
    row: Row, by_id: Mapping[str, Row], of_episode: Mapping[str, float], limits: ShownLimits, *, is_alone: bool
) -> SpokenSession:
    parent = by_id.get(str(row.get("parent_rollout_id") or ""))
    behind = 0 if parent is None else _turn_before(parent, row["fork_at"])
    told = (
        "".join(span["text"] for span in parent[SPANS] if span["turn"] == behind)
        if parent is not None and behind
        else ""
    )
    turns = [*_turns(row, calls_in(told))]
    kept, left = limits.turns // 2, len(turns) - limits.turns
    if left > 0:
        turns = [*turns[: limits.turns - kept], SpokenTurn("", f"[... {left} turns ...]", ()), *turns[-kept:]]
    shown = tuple(replace(turn, pieces=_shortened(turn.pieces, limits.characters)) for turn in turns)
    rewards = {name: value for name, value in rewards_of(row).items() if of_episode.get(name) != value}
    agent = str(row.get("agent_id") or "")
    if is_alone and not agent:
        return SpokenSession("", shown)
    named = f"session {_number(row)}" + (f", agent {agent}" if agent else "")
    about = f"{row.get('num_sampled')} tokens, {row.get('finish_reason')}"
    if parent is not None:
        origin = f"fork of session {_number(parent)}, behind its turn {behind} (token {row['fork_at']})"
    elif row.get("parent_rollout_id"):
        origin = f"fork of {row['parent_rollout_id']}, behind token {row['fork_at']}"
    else:
        is_first = not row.get("episode_id") or row.get("rollout_id") == row.get("episode_id")
        origin = "the episode's prompt" if is_first else "a prompt of its own"
    return SpokenSession(f"{named}: {origin} ({about})", shown, rewards)


def _turn_before(row: Row, place: int) -> int:
    """Returns the number of the last turn that ends at a token or before it; 0 if none does."""
    end, found = 0, 0
    for span in row[SPANS]:
        end += span["num_tokens"]
        found = span["turn"] if span["turn"] and end <= place else found
    return found


def _turns(row: Row, called: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[SpokenTurn]:
    """Yields the turns of a session. called: calls of the turn that it goes on from."""
    # Spans of a turn come together, those between turns one by one.
    numbered = itertools.groupby(enumerate(row[SPANS]), key=lambda each: each[1]["turn"] or -1 - each[0])
    for turn in ([span for _, span in spans] for _, spans in numbered):
        kind, number = turn[0]["kind"], turn[0]["turn"]
        about = counted(sum(span["num_tokens"] for span in turn), "token")
        if kind == SHARED:
            continue
        if not number:
            who = "prompt" if kind == "prompt" else "tools" if called else "environment"
            yield SpokenTurn(who, f"{who} ({about})", (SpokenPiece(turn[0]["text"]),))
            continue
        versions = list(dict.fromkeys(span["version"] for span in turn))
        called = calls = calls_in("".join(span["text"] for span in turn))
        about += f", {'version' if len(versions) == 1 else 'versions'} {', '.join(map(str, versions))}"
        about += ", stop" if turn[-1]["has_end"] else ", cut"
        title = f"policy, turn {number} ({about})" + (f", calls {_named(calls)}" if calls else "")
        yield SpokenTurn("policy", title, tuple(SpokenPiece(span["text"], span["version"]) for span in turn))


def counted(count: int, what: str) -> str:
    """Returns a number with its unit: 1 token, 2 tokens."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _named(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    said: list[str] = []
    for name, values in calls[:_MAX_CALLS]:
        arguments = ", ".join(f"{key}={value!r}" for key, value in values.items())
        said.append(f"{excerpt(name, _SHOWN_CALL)}({excerpt(arguments, _SHOWN_CALL)})")
    return ", ".join(said) + (f", and {len(calls) - _MAX_CALLS} more" if len(calls) > _MAX_CALLS else "")


def calls_in(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns names and arguments of the tool calls in a text: JSON objects with a `name`, and with `arguments` or
    `parameters`. A file does not have the form of the template, so any such object counts."""
    calls: list[tuple[str, dict[str, Any]]] = []
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            value, end = None, at + 1
        call = _call(value)
        if call is not None:
            calls.append(call)
        at = text.find("{", end if call is not None else at + 1)
    return calls


def _call(value: object) -> tuple[str, dict[str, Any]] | None:
    if not isinstance(value, dict):
        return None
    written = cast("dict[str, Any]", value)
    name, arguments = written.get("name"), written.get("arguments", written.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return (name, cast("dict[str, Any]", arguments)) if isinstance(name, str) and isinstance(arguments, dict) else None


def _shortened(pieces: Sequence[SpokenPiece], limit: int) -> tuple[SpokenPiece, ...]:
    """Returns pieces with the middle of their text left out if it is longer than the limit."""
    length, half = sum(len(piece.text) for piece in pieces), limit // 2
    if length <= limit:
        return tuple(pieces)
    shown: list[SpokenPiece] = []
    start, is_cut = 0, False
    for piece in pieces:
        end = start + len(piece.text)
        head, tail = piece.text[: max(half - start, 0)], piece.text[max(length - half - start, 0) :]
        shown += [replace(piece, text=head)] if head else []
        if end > half and not is_cut:
            shown.append(SpokenPiece(f"\n[... {length - 2 * half} characters ...]\n"))
            is_cut = True
        shown += [replace(piece, text=tail)] if tail else []
        start = end
    return tuple(shown)
