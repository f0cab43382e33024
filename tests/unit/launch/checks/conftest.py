"""The fixtures of `asked_commands`."""

from __future__ import annotations

from asked_commands import ask, files, place

__all__ = ["ask", "files", "place"]
