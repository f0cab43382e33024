"""Excerpts of foreign texts, for a terminal. Any process."""

from __future__ import annotations

from typing import TextIO

from moerl.printable import printable

SHOWN_LINES = 100
"""Lines of one source that are shown; later lines are left out."""

SHOWN_CHARACTERS = 300
"""Characters of one line that are shown."""


def excerpt(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """Returns the start of a text on one line, without control characters."""
    shown = printable(text[:limit]).replace("\n", "\\n").replace("\t", "\\t")
    return shown + ("..." if len(text) > limit else "")


def excerpt_lines(text: str, limit: int) -> list[str]:
    """Returns the lines of a text without control characters; of more than `limit` characters the start and the end."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    return [printable(line) for line in text.split("\n")]


class ShownLines:
    """Shown output of a foreign process: at most `SHOWN_LINES` lines of `SHOWN_CHARACTERS`, without control characters.

    Args:
        prefix: text in front of every line.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._left = SHOWN_LINES
        self._line = b""

    def feed(self, data: bytes, stream: TextIO) -> None:
        """Shows on `stream` the lines that `data` completes."""
        *whole, rest = data.split(b"\n")
        for line in whole:
            self._show(self._line + line, stream)
            self._line = b""
        # Of a line that never ends, no more is kept than is shown.
        self._line = (self._line + rest)[: 4 * SHOWN_CHARACTERS + 4]

    def end(self, stream: TextIO) -> None:
        """Shows a last line without an end."""
        if self._line:
            self._show(self._line, stream)
            self._line = b""

    def _show(self, line: bytes, stream: TextIO) -> None:
        if self._left < 0:
            return
        text = excerpt(line.rstrip(b"\r").decode(errors="backslashreplace").expandtabs(4))
        self._left -= 1
        print(self._prefix + (text if self._left >= 0 else "more lines, which are not shown"), file=stream, flush=True)
