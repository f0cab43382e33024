"""Numbers and text of others as HTML. Torch-free; any process."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from moerl.diagnostics.report.data import Interval
from moerl.printable import printable

UNITS = (
    *("nats?", "tokens?", "steps?", "versions?", "ids?", "rows?", "layers?", "rollouts?", "responses?", "runs?"),
    *("groups?", "points?", "updates?", "bytes?", "rewards?", "scores?", "prompts?", "trajector(?:y|ies)", "times"),
    *("microbatch(?:es)?", "turns?", "sessions?", "episodes?", "alerts?", "problems?", "reports?"),
    *("tokens?/s", "FLOP/s", "s", "ms", "min", "h", "[KMG]i?B"),
)
"""Patterns of words that stand behind a number: units of metrics, and other things that pages count."""
_EXPONENT = re.compile(r"([0-9]e-)(?=[0-9])")
_TAG = re.compile(r"<[^>]*>")
_BETWEEN = re.compile(rf"([0-9\]](?:</\w+>)?) (?=(?:{'|'.join(UNITS)})(?![\w-]))(?![^<>]*>)")


def escaped(text: str) -> str:
    """Returns text of anyone, for an element or an attribute: no markup, no control characters, no change of
    direction."""
    return html.escape(printable(text), quote=True)


def unbroken(text: str) -> str:
    """Returns HTML or text in which no line ends between a number and its unit, nor within 1.2e-02: no-break spaces,
    and word joiners behind the minus signs of exponents."""
    return _EXPONENT.sub("\\1\u2060", _BETWEEN.sub("\\1\u00a0", text))


def number(value: float) -> str:
    """Returns four significant digits: 0.01235, 1.235e-07, 48,211."""
    if value == 0.0:
        return "0"
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{value:,.0f}"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3e}"
    digits = f"{value:.4g}"
    return f"{float(digits):,.0f}" if "e" in digits else digits


def brief(value: float) -> str:
    """Returns two significant digits, for sentences: 0.012, 1.2e-07."""
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.1e}"
    digits = f"{value:.2g}"
    return f"{float(digits):,.0f}" if "e" in digits else digits


def percent(share: float) -> str:
    """Returns a share as a percentage of three digits; ``<0.01%`` if it is smaller and not zero."""
    if share == 0.0:
        return "0%"
    return "<0.01%" if 0.0 < share < 1e-4 else f"{100 * share:.3g}%"


def interval(value: Interval) -> str:
    """Returns the value, with its bounds if they are known."""
    if value.low == value.high:
        return number(value.value)
    return f"{number(value.value)} [{number(value.low)}, {number(value.high)}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", *, texts: int = 1) -> str:
    """Returns a table that scrolls in its own box; its cells are HTML.

    Args:
        rows: the first cell of each is its heading.
        texts: the number of columns on the left that hold text; the others hold numbers.
    """
    kinds = ["" if column < texts else ' class="number"' for column in range(len(head))]
    names = [f' data-name="{_TAG.sub("", cell.replace("<br>", ": ")).removesuffix(": ")}"' for cell in head]
    top = "".join(f'<th scope="col"{kind}>{cell}</th>' for kind, cell in zip(kinds, head, strict=True))
    lines = [
        f'<tr><th scope="row"{names[0]}>{first}</th>'
        + "".join(f"<td{k}{n}>{cell}</td>" for k, n, cell in zip(kinds[1:], names[1:], rest, strict=True))
        + "</tr>"
        for first, *rest in rows
    ]
    caption = f"<caption>{caption}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="table"><table>{caption}'
        f"<thead><tr>{top}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def folded(summary: str, body: str) -> str:
    """Returns a part that opens on a click."""
    return f"<details><summary>{summary}</summary>{body}</details>"
