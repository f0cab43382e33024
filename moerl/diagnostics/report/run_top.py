"""The first screen of a run's page as HTML: headlines, samples, and the chart of learning. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moerl.diagnostics.conversations import SpokenSession, SpokenTurn, versions_of
from moerl.diagnostics.report import figures
from moerl.diagnostics.report.data import Headline, Report, Sample
from moerl.diagnostics.report.sections import LEVELS, PageSection, figure
from moerl.diagnostics.report.words import escaped, number

_REGION = 'tabindex="0" role="region" aria-label="conversation"'
NUM_COLORS = 6
"""Colours of versions that the page's style has, `by0` and so on."""


def headlines(shown: Sequence[Headline]) -> str:
    """Returns a box for each headline; nothing without headlines."""
    boxes = "".join(map(_headline, shown))
    return f'<section class="headlines" aria-label="in short">{boxes}</section>' if boxes else ""


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
        f'<div class="sample"><p class="why">{escaped(each.why)}</p>{_said(each)}</div>' for each in report.samples
    )
    if not report.samples_from:
        return ""
    return (
        f'<section class="samples" aria-label="samples"><div class="pairs">{pairs}</div>'
        f'<p class="quiet">{escaped(report.samples_from)}</p></section>'
    )


def _said(sample: Sample) -> str:
    """Returns prompt and response, or the conversation of an episode."""
    if not sample.sessions:
        return (
            f"<dl><dt>prompt</dt><dd>{escaped(sample.prompt)}</dd>"
            f"<dt>response</dt><dd>{escaped(sample.response)}</dd></dl>"
        )
    colors = {version: place % NUM_COLORS for place, version in enumerate(versions_of(sample.sessions))}
    legend = "".join(f'<span class="by{color}">version {version}</span>' for version, color in colors.items())
    shown = "".join(_session(each, colors) for each in sample.sessions)
    return f'<div class="legend">{legend}</div><div class="talk" {_REGION}>{shown}</div>'


def _session(session: SpokenSession, colors: Mapping[int, int]) -> str:
    rewards = "".join(f" · {name} {number(value)}" for name, value in session.rewards.items())
    title = f'<p class="session">{escaped(session.title + rewards)}</p>' if session.title else ""
    return title + "".join(_turn(each, colors) for each in session.turns)


def _turn(turn: SpokenTurn, colors: Mapping[int, int]) -> str:
    said = "".join(
        f"<span{'' if piece.version is None else f' class="by{colors[piece.version]}"'}>{escaped(piece.text)}</span>"
        for piece in turn.pieces
    )
    return f'<dl class="{turn.who or "left-out"}"><dt>{escaped(turn.title)}</dt><dd>{said}</dd></dl>'


def learning(report: Report) -> PageSection | None:
    """Returns the chart of reward and accuracy of a run; None for a dump, which has neither."""
    chart = figures.learning(report) if report.headlines else None
    return chart and PageSection("learning", "Reward and accuracy", figure(chart), (chart,))
