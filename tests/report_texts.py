"""Texts of a report's page as a reader sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any


def shown_texts(page: str) -> list[str]:
    """Returns texts of blocks, joined as they are drawn, and all texts of the charts; no scripts, no style."""
    found = _Blocks()
    found.feed(page)
    return [*found.blocks, *_texts(json.loads(found.data))]


def _texts(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from _texts(value)
    elif isinstance(data, list):
        for value in data:
            yield from _texts(value)


class _Blocks(HTMLParser):
    _INLINE = ("strong", "span", "em", "code", "a")

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[str] = []
        self.data = ""
        self._script: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "style"):
            self._script = dict(attrs).get("type") or tag
        elif tag not in self._INLINE:
            self.blocks.append("")

    def handle_endtag(self, tag: str) -> None:
        self._script = None if tag in ("script", "style") else self._script
        if tag not in self._INLINE:
            self.blocks.append("")

    def handle_data(self, data: str) -> None:
        if self._script == "application/json":
            self.data += data
        elif self._script is None:
            self.blocks.append((self.blocks.pop() if self.blocks else "") + data)
