"""The first screen of a run's page as HTML: headlines, samples, and the chart of learning. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from moerl.diagnostics.report import figures
from moerl.diagnostics.report.data import Headline, Report
from moerl.diagnostics.report.sections import LEVELS, PageSection, figure
from moerl.diagnostics.report.words import escaped


def headlines(shown: Sequence[Headline]) -> str:
    """Returns a box for each headline; nothing without headlines."""
    return (
        f'<section class="headlines" aria-label="in short">{"".join(map(_headline, shown))}</section>' if shown else ""
    )


def _headline(one: Headline) -> str:
    badge = f' <span class="badge">{LEVELS[one.level]}</span>' if one.level else ""
    notes = "".join(f"<p>{escaped(note)}</p>" for note in one.notes)
    level = f" level-{one.level}" if one.level else ""
    return (
        f'<div class="headline{level}"><p class="name">{escaped(one.name)}{badge}</p>'
        f'<p class="value">{escaped(one.value)}</p>{notes}</div>'
    )


def samples(report: Report) -> str:
    """Returns prompts with their responses side by side, or why there are none; empty for reports that have neither."""
    pairs = "".join(
        f'<div class="sample"><p class="why">{escaped(each.why)}</p><dl><dt>prompt</dt><dd>{escaped(each.prompt)}</dd>'
        f"<dt>response</dt><dd>{escaped(each.response)}</dd></dl></div>"
        for each in report.samples
    )
    if not report.samples_from:
        return ""
    return (
        f'<section class="samples" aria-label="samples"><div class="pairs">{pairs}</div>'
        f'<p class="quiet">{escaped(report.samples_from)}</p></section>'
    )


def learning(report: Report) -> PageSection | None:
    """Returns the chart of reward and accuracy of a run; None for a dump, which has neither."""
    chart = figures.learning(report) if report.headlines else None
    return chart and PageSection("learning", "Reward and accuracy", figure(chart), (chart,))
