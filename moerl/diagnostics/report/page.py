"""A report as one HTML file that asks for nothing else: style, scripts, charts and numbers are inside. Torch-free.

Nothing of the data can become markup or script: HTML is escaped, JSON is inlined without ``<``, and the page's policy
runs the two scripts of the package alone, by their hashes, and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from moerl.contract.files import atomic_file
from moerl.diagnostics.report import sections
from moerl.diagnostics.report.charts import CONFIG
from moerl.diagnostics.report.data import Report, Strip, encode_report
from moerl.diagnostics.report.run_top import headlines, learning, samples
from moerl.diagnostics.report.sections import PageSection
from moerl.diagnostics.report.strips import strip_data, strip_section
from moerl.diagnostics.report.words import escaped, unbroken
from moerl.printable import printable

PAGE_FILE, JSON_FILE = "report.html", "report.json"
"""In a run directory."""


def write_report(report: Report, page: Path) -> None:
    """Writes the page, and the report as JSON next to it under the page's name. Raises `OSError` if it cannot."""
    with atomic_file(page.with_suffix(".json")) as partial:
        partial.write_bytes(encode_report(report))
    parts = (
        learning(report),
        sections.gap(report),
        sections.findings(report),
        sections.scorers(report),
        sections.over_steps([("", report)]),
        sections.layers(report),
        sections.margins(report),
        sections.swaps(report),
        sections.slices(report),
        strip_section(report.strips),
        sections.unusable(report),
        sections.notes(report),
        sections.definitions(),
    )
    top = sections.verdict_box(report.verdict) + headlines(report.headlines) + samples(report)
    shown = [part for part in parts if part]
    write_html(page, (report.title, report.subtitle), (top, sections.facts_list(report.facts)), shown, report.strips)


def write_html(
    path: Path,
    titles: tuple[str, str],
    tops: tuple[str, str],
    parts: Sequence[PageSection],
    strips: Sequence[Strip] = (),
) -> None:
    """Writes a page.

    Args:
        titles: title and subtitle, text. tops: HTML above the contents, and between them and the sections.
    """
    charts = {chart.name: msgspec.to_builtins(chart.choices) for part in parts for chart in part.charts}
    data = {"config": CONFIG, "charts": charts, "strips": strip_data(strips)}
    with atomic_file(path) as partial:
        partial.write_text(_document(titles, tops, parts, inline_json(data)), encoding="utf-8")


def inline_json(data: Any) -> str:
    """Returns JSON that is the same inside of a script element: no character that could end one, or that HTML treats.
    Control characters in texts are shown as escapes."""
    text = msgspec.json.encode(_shown(data)).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _shown(data: Any) -> Any:
    """Returns the data with every text printable."""
    if isinstance(data, str):
        return unbroken(printable(data))
    if isinstance(data, dict):
        return {key: _shown(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        # Long lists hold numbers alone.
        return [_shown(each) for each in data] if any(isinstance(each, str | dict | list) for each in data) else data
    return data


def _document(titles: tuple[str, str], tops: tuple[str, str], parts: Sequence[PageSection], data: str) -> str:
    assets = importlib.resources.files("moerl.diagnostics.report") / "assets"
    names = ("page.css", "vega.js", "page.js")
    style, vega, script = (assets.joinpath(name).read_text(encoding="utf-8") for name in names)
    title, subtitle = (unbroken(escaped(text)) for text in titles)
    top, facts = map(unbroken, tops)
    contents = "".join(f'<li><a href="#{part.name}">{part.title}</a></li>' for part in parts)
    body = "".join(f'<section id="{part.name}"><h2>{part.title}</h2>{unbroken(part.body)}</section>' for part in parts)
    policy = (
        f"default-src 'none'; script-src {_hash(vega)} {_hash(script)}; style-src 'unsafe-inline'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
<header class="top"><div><h1>{title}</h1><p class="subtitle">{subtitle}</p></div>
<button id="theme" type="button" hidden>Theme: automatic</button></header>
<main id="main">
{top}
<nav aria-label="contents"><ul>{contents}</ul></nav>
{facts}
<noscript><p>Charts and token strips need JavaScript; sentences and tables do not.</p></noscript>
{body}
</main>
<footer>One file, made by moerl; it loads nothing from anywhere. Its numbers are in the JSON file next to it.</footer>
<script id="report-data" type="application/json">{data}</script>
<script>{vega}</script>
<script>{script}</script>
</body>
</html>
"""


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
