"""An episode in the terminal: a conversation, with the weight version of every sampled text. Torch-free.

With colours, each version has one, and a legend names them. Without, titles have the versions, and a turn that several
versions sampled has them in front of its lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from moerl.diagnostics.conversations import SpokenSession, SpokenTurn, versions_of
from moerl.printable import printable

_COLORS = ("cyan", "yellow", "green", "magenta", "bright_blue", "bright_red")


def conversation_text(sessions: Sequence[SpokenSession], *, is_colored: bool) -> Text:
    """Returns the lines of a conversation."""
    styles = {version: _COLORS[place % len(_COLORS)] for place, version in enumerate(versions_of(sessions))}
    lines: list[Text] = []
    if is_colored and styles:
        versions = Text("  ").join(Text(f"version {version}", style=style) for version, style in styles.items())
        lines.append(Text("sampled by ").append_text(versions))
    for session in sessions:
        if session.title:
            rewards = "".join(f"  {name} {value:g}" for name, value in session.rewards.items())
            lines.append(Text(printable(f"== {session.title}{rewards}"), style="bold" if is_colored else ""))
        for turn in session.turns:
            lines.append(Text(printable(f"{turn.title}:" if turn.who else turn.title)))
            lines += _colored(turn, styles) if is_colored else _plain(turn)
    return Text("\n").join(lines)


def _colored(turn: SpokenTurn, styles: Mapping[int, str]) -> list[Text]:
    if not turn.pieces:
        return []
    said = Text()
    for piece in turn.pieces:
        said.append(printable(piece.text), style="" if piece.version is None else styles[piece.version])
    return [Text("  | ").append_text(line) for line in said.split("\n", allow_blank=True)]


def _plain(turn: SpokenTurn) -> list[Text]:
    is_mixed = len({piece.version for piece in turn.pieces if piece.version is not None}) > 1
    lines: list[str] = []
    goes_on = False
    for piece in turn.pieces:
        mark = "" if piece.version is None else f"v{piece.version}"
        for number, line in enumerate(printable(piece.text).split("\n")):
            if is_mixed:
                lines.append(f"  {mark} {'+' if goes_on and number == 0 else '|'} {line}")
            elif goes_on and number == 0:
                lines[-1] += line
            else:
                lines.append(f"  | {line}")
        goes_on = True
    return [Text(line) for line in lines]
