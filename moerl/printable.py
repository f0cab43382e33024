"""Text of others (servers, user code, files) without control characters. Any process; imports nothing of moerl.

The one place where control characters are made visible. Errors pass through it when they are made, progress lines and
tracebacks when they are printed.
"""

from __future__ import annotations

import re

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # directions: the rest of the line is shown in another order
    "\u2028\u2029\ud800-\udfff]"  # other ends of lines; surrogates, which cannot be printed
)


def printable(text: str) -> str:
    """Returns the text with escapes (\\x1b) in place of control characters; tabs and line feeds stay."""
    return _OBEYED.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
