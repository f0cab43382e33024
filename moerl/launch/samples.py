"""`moerl samples`: responses of a run in the terminal. Reads files alone; torch-free."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.text import Text

from moerl.contract.dump_columns import SPANS
from moerl.diagnostics.conversations import (
    ShownLimits,
    SpokenSession,
    SpokenTurn,
    conversation_of,
    counted,
    episodes_of,
    is_conversation,
    rewards_of,
    versions_of,
)
from moerl.diagnostics.responses import ENVIRONMENT, FOLDERS, REWARD, read_responses, response_files
from moerl.errors import ConfigError
from moerl.launch.arguments import Parser
from moerl.printable import printable
from moerl.telemetry.terminal import excerpt, excerpt_lines

USAGE = "moerl samples RUN_DIR [--of FILE] [--set NAME] [--by COLUMN] [--count N] [--best | --worst]"
SHOWN_CHARACTERS = 2000
"""Characters shown of a prompt, and of a response, at most."""
_LIMITS = ShownLimits(sessions=20, turns=100, characters=SHOWN_CHARACTERS)
_COLORS = ("cyan", "yellow", "green", "magenta", "bright_blue", "bright_red")


def parser() -> Parser:
    """Makes the parser of the command."""
    made = Parser("samples")
    made.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    made.add_argument("--of", metavar="FILE", help="Parquet file in RUN_DIR; the newest by default")
    made.add_argument("--set", metavar="NAME", help="of one of several sets alone")
    made.add_argument("--by", default=REWARD, metavar="COLUMN", help=f"sort by it; {REWARD} by default")
    made.add_argument("--count", type=int, default=2, metavar="N", help="how many of each end, 2 if not said")
    made.add_argument("--best", action="store_true", help="those with the highest reward alone")
    made.add_argument("--worst", action="store_true", help="those with the lowest reward alone")
    return made


def run_samples(options: argparse.Namespace) -> int:
    """Prints the chosen responses; returns exit status 0.

    Raises:
        ConfigError: there is no such file, set or column.
    """
    path = _file(options.run_dir, options.of)
    rows = _rows(path, options.set, options.by)
    if options.by not in rows[0]:
        columns = ", ".join(name for name, value in rows[0].items() if isinstance(value, int | float))
        raise ConfigError("--by: no such column", seen=options.by, expected=columns, remedy="name one of them")
    episodes = episodes_of(rows)
    values = [episode[0][options.by] for episode in episodes]
    ranked = sorted(range(len(episodes)), key=lambda n: -(float("-inf") if values[n] is None else values[n]))
    count = max(1, options.count)
    worst = [] if options.best else ranked[max(0, len(ranked) - count) :]
    best = [] if options.worst else ranked[:count]
    sessions = f" in {len(episodes)} episodes" if len(episodes) < len(rows) else ""
    print(f"{path}: {len(rows)} responses{sessions}, by {options.by}")
    console = Console(highlight=False, soft_wrap=True)
    for title, chosen in (("highest", best), ("lowest", [number for number in worst if number not in best])):
        for number in chosen:
            _show(title, episodes[number], console)
    return 0


def _show(title: str, episode: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not is_conversation(episode):
        for row in episode:
            head = _head(title, row, f"{row.get('num_sampled')} tokens, {row.get('finish_reason')}")
            print(f"\n{printable(head)}")
            print(_indented("prompt", row.get("prompt")))
            print(_indented("response", row.get("text")))
        return
    sampled = sum(row["num_sampled"] for row in episode)
    turns = sum(max((span["turn"] for span in row[SPANS]), default=0) for row in episode)
    about = f"{len(episode)} sessions, " if len(episode) > 1 else ""
    seconds = [row[ENVIRONMENT] for row in episode if row.get(ENVIRONMENT) is not None]
    about += f"{counted(turns, 'turn')}, {counted(sampled, 'token')}, {episode[0]['finish_reason']}"
    about += f", {sum(seconds):.3g} s in the environment" if seconds else ""
    print(f"\n{printable(_head(title, episode[0], about))}")
    is_colored = console.color_system is not None and not console.no_color
    console.print(conversation_text(conversation_of(episode, _LIMITS), is_colored=is_colored), markup=False)


def _file(run_dir: Path, name: str | None) -> Path:
    found = response_files(run_dir)
    if name is not None:
        found = [run_dir / name] if (run_dir / name).is_file() else []
    if not found:
        raise ConfigError(
            f"{run_dir}: no responses",
            seen=name or "no Parquet files in " + " and ".join(FOLDERS),
            expected="dumped rollouts or tables of evaluations",
            remedy="give the directory of a run, with --of a file in it; dump.rollouts_every=N dumps rollouts",
        )
    return found[-1]


def _rows(path: Path, source: str | None, by: str) -> list[dict[str, Any]]:
    try:
        rows = [*read_responses(path, by)]
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(
            f"{path}: cannot be read",
            seen=excerpt(str(error), 200),
            expected="a Parquet file of a run",
            remedy="give another file with --of",
        ) from error
    sets = {_set_of(row) for row in rows}
    chosen = [row for row in rows if source is None or _set_of(row) == source]
    if not chosen:
        raise ConfigError(
            f"{path}: no responses" + (f" of the set {source}" if source else ""),
            seen=", ".join(sorted(sets)) or "an empty table",
            expected="one or more",
            remedy="leave --set away, or name one of these",
        )
    return chosen


def _set_of(row: dict[str, Any]) -> str:
    """Returns the set of a response: a column in tables of evaluations, the start of the prompt's id in dumps."""
    return str(row.get("set") or str(row.get("prompt_id", "")).partition(":")[0])


def _head(title: str, row: Mapping[str, Any], about: str) -> str:
    values = "  ".join(f"{name} {value:g}" for name, value in rewards_of(row).items())
    return f"--- {title}: {row.get('prompt_id')}  {values}  ({about})"


def _indented(title: str, text: object) -> str:
    lines = excerpt_lines(str(text or ""), SHOWN_CHARACTERS)
    return "\n".join([f"{title}:", *(f"  | {line}" for line in lines)])


def conversation_text(sessions: Sequence[SpokenSession], *, is_colored: bool) -> Text:
    """Returns the lines of a conversation, with the weight version of every sampled text.

    With colours, each version has one, and a legend names them. Without, titles have the versions, and a turn that
    several versions sampled has them in front of its lines.
    """
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
