"""Alerts from the rows of a run, for problems that a person should look at. Pure functions on rows of `metrics.jsonl`;
torch-free.

Runs in the controller, after each step, and in `moerl watch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

WINDOW = 5
"""Rows on each side of a comparison."""

HISTORY = 2 * WINDOW
"""Rows that `active_alerts` looks at."""

GAP_FACTOR = 2.0
GAP_FLOOR = 2e-3
"""Nats: a gap below it is arithmetic in 16 bits, whatever it was before."""

FAR_SHARE = 0.1
"""Largest F(2) without an alert. F(2): share of tokens whose two probabilities differ by more than a factor of two."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A problem that a person should look at."""

    kind: str
    """Key of the problem; at most one alert of a kind is active."""
    text: str
    """The problem in one line, with its step and numbers."""
    remedy: str
    """Advice on what to look at, or how to cure it."""

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


def active_alerts(rows: Sequence[Mapping[str, Any]]) -> list[Alert]:
    """Returns the alerts that are active at the last of these rows.

    Args:
        rows: in order; the last `HISTORY` rows of reinforcement learning count, others are ignored.
    """
    recent = [row for row in rows if row["stage"] == "rl"][-HISTORY:]
    if not recent:
        return []
    found = (_coverage(recent), _quarantine(recent), _gap(recent), _far(recent))
    return [alert for alert in found if alert is not None]


class Announcer:
    """Filter that passes each kind of alert once until it has cleared."""

    def __init__(self) -> None:
        self._said: frozenset[str] = frozenset()

    def new(self, active: Sequence[Alert]) -> list[Alert]:
        """Returns the active alerts whose kind was not active in the last call."""
        fresh = [alert for alert in active if alert.kind not in self._said]
        self._said = frozenset(alert.kind for alert in active)
        return fresh


def _coverage(rows: Sequence[Mapping[str, Any]]) -> Alert | None:
    """Returns an alert if there are rows without captured routing; if all metrics of a window had some, only if one of
    the last two has more than twice their median."""
    values = _values(rows, "routing/live_rows")
    if not values or values[-1] == 0.0:
        return None
    window = values[:-1][-WINDOW:]
    before = median(window) if window else 0.0
    # A share of rows that an engine never captures is no news.
    if len(window) == WINDOW and min(window) > 0.0 and max(values[-2:]) <= 2.0 * before:
        return None
    return Alert(
        "coverage",
        f"step {rows[-1]['step']}: {values[-1]:,.0f} rows x layers without captured routing, {before:,.0f} before",
        "the trainer's router chose there; ask the engine with `moerl conformance`",
    )


def _quarantine(rows: Sequence[Mapping[str, Any]]) -> Alert | None:
    """Returns an alert if trajectories were refused within the window."""
    values = _values(rows, "quarantine/count")[-WINDOW - 1 :]
    if not values:
        return None
    # A run begins with none.
    first = 0.0 if rows[0]["step"] == 1 and len(rows) <= WINDOW else values[0]
    if values[-1] <= first:
        return None
    return Alert(
        "quarantine",
        f"step {rows[-1]['step']}: {values[-1] - first:,.0f} trajectories were quarantined within {WINDOW} steps,"
        f" {values[-1]:,.0f} in all",
        "RUN_DIR/quarantine says of each which rule it breaks; `moerl conformance` asks the engine",
    )


def _gap(rows: Sequence[Mapping[str, Any]]) -> Alert | None:
    """Returns an alert if the median mismatch as trained of a window is far above that of the window before it."""
    values = _values(rows, "mismatch/logprob_abs_mean")[-HISTORY:]
    if len(values) < HISTORY:
        return None
    before, now = median(values[:WINDOW]), median(values[WINDOW:])
    if now < GAP_FLOOR or now < GAP_FACTOR * before:
        return None
    return Alert(
        "gap",
        f"step {rows[-1]['step']}: the mismatch of sampler and trainer rose from {before:.1e} to {now:.1e} nats"
        f" (medians of {WINDOW} steps)",
        "compare weight versions, staleness and the mismatch table; `moerl verify` replays dumped rollouts",
    )


def _far(rows: Sequence[Mapping[str, Any]]) -> Alert | None:
    share = rows[-1].get("mismatch/share_above_ln2")
    if share is None or share <= FAR_SHARE:
        return None
    return Alert(
        "far tokens",
        f"step {rows[-1]['step']}: sampler and trainer are apart by more than a factor of two on {share:.0%} of tokens",
        "importance weights are noise there: keep routing and sampling masks, and lower the staleness",
    )


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if name in row]
