"""Findings of the looks, for people and for scripts: a table on a terminal, lines elsewhere, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moerl.launch.checks.outcome import LEVELS, Check, worst
from moerl.printable import printable


def show(checks: Sequence[Check], console: Console, *, as_json: bool) -> None:
    """Prints all checks, and how many are of each level."""
    if as_json:
        document = {"level": worst(checks), "checks": [asdict(check) for check in checks]}
        print(json.dumps(document, indent=1))
        return
    if console.is_terminal:
        console.print(_table(checks))
    else:
        for line in lines(checks):
            print(line)
    print(summary(checks))


def lines(checks: Sequence[Check]) -> list[str]:
    """Returns a line for each check; expectation and remedy follow if it is not green."""
    found: list[str] = []
    for check in checks:
        found.append(f"{check.level:<7} {check.area} | {check.name}: {check.seen}")
        found += [f"        {text}" for text in _more(check)]
    return [printable(line) for line in found]


def summary(checks: Sequence[Check]) -> str:
    """Returns how many checks are of each level, as text."""
    counts = {level: sum(check.level == level for check in checks) for level in LEVELS}
    return ", ".join(f"{count} {level}" for level, count in counts.items())


def _table(checks: Sequence[Check]) -> Table:
    table = Table(show_lines=False, expand=False)
    for title in ("area", "check", "", "seen"):
        table.add_column(title, overflow="fold")
    before = ""
    for check in checks:
        seen = Text("\n".join([check.seen, *_more(check)]))
        if check.area != before and before:
            table.add_section()
        table.add_row(check.area if check.area != before else "", check.name, Text(check.level, check.level), seen)
        before = check.area
    return table


def _more(check: Check) -> list[str]:
    if check.level == "green":
        return []
    return [f"{label}: {text}" for label, text in (("expected", check.expected), ("remedy", check.remedy)) if text]
