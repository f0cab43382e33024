"""Trajectories token by token on the page. Torch-free; any process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moerl.diagnostics.report.data import Strip
from moerl.diagnostics.report.sections import PageSection
from moerl.diagnostics.report.words import escaped

MAX_STRIPS = 24
MAX_TOKENS, MAX_ALL_TOKENS, MAX_CHARACTERS = 3000, 24_000, 120
"""On the page: tokens of one strip and of all, characters of one token."""
_LEGEND = (
    ("given", "given"),
    ("s0", "|d| below 0.001"),
    ("s1", "to 0.01"),
    ("s2", "to 0.1"),
    ("s3", "to ln 2"),
    ("s4", "to 3"),
    ("s5", "3 and more nats"),
)


def strip_section(strips: Sequence[Strip]) -> PageSection | None:
    """Returns the view of one trajectory, chosen by hand; its data is that of `strip_data`."""
    if not strips:
        return None
    shown = _shown(strips)
    options = "".join(
        f'<option value="{number}">{escaped(f"{strip.why}: {strip.name}")}</option>'
        for number, strip in enumerate(shown)
    )
    legend = "".join(f'<span class="token {kind}">{text}</span>' for kind, text in _LEGEND)
    cut = [strip for strip in shown if len(strip.tokens) > MAX_TOKENS]
    left = len(strips) - len(shown)
    notes = [f"{left} more trajectories are in report.json alone."] if left else []
    notes += [f"{len(cut)} trajectories are cut after {MAX_TOKENS:,} tokens."] if cut else []
    body = (
        '<p class="lead">Each token is coloured by |d|; a line below it: other experts in some layer.'
        " Arrow keys move, up and down by ten, n and p to the next and the previous token above ln 2.</p>"
        '<div id="strip-view"><div class="choose"><label for="strip-choice">Trajectory</label>'
        f'<select id="strip-choice">{options}</select><span class="printed"></span></div>'
        f'<div class="legend" aria-hidden="true">{legend}<span class="token rerouted">other experts</span></div>'
        '<p class="token-line" aria-live="polite"></p>'
        '<div class="tokens" role="listbox" aria-label="tokens of the trajectory"></div></div>'
    )
    return PageSection("strip", "Token by token", body + "".join(f'<p class="quiet">{note}</p>' for note in notes))


def _shown(strips: Sequence[Strip]) -> list[Strip]:
    """Returns the first strips, as many as the page has room for; one at least."""
    shown: list[Strip] = []
    room = MAX_ALL_TOKENS
    for strip in strips[:MAX_STRIPS]:
        room -= min(MAX_TOKENS, len(strip.tokens))
        if shown and room < 0:
            break
        shown.append(strip)
    return shown


def strip_data(strips: Sequence[Strip]) -> list[dict[str, Any]]:
    """Returns the tokens of the strips that are shown, as columns."""
    return [_columns(strip) for strip in _shown(strips)]


def _columns(strip: Strip) -> dict[str, Any]:
    tokens = strip.tokens[:MAX_TOKENS]
    texts = (token.text for token in tokens)
    return {
        "text": [text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…" for text in texts],
        "sampled": [int(token.sampled) for token in tokens],
        "d": [_short(token.d) for token in tokens],
        "logprob": [_short(token.logprob) for token in tokens],
        "layers": [token.layers for token in tokens],
        "kept": [token.kept for token in tokens],
        "version": [token.version for token in tokens],
        "turns": [{"at": turn.at, "name": turn.name} for turn in strip.turns if turn.at < len(tokens)],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
