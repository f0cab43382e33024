"""The rows of a metrics file that somebody else writes. Torch-free; any process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from moerl.telemetry.sinks import read_rows


class RowTail:
    """Reader of a metrics file that another process writes. A run that goes on drops rows and writes the file anew.

    Attributes:
        rows: all rows at the last `poll`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self.rows: list[dict[str, Any]] = []

    def poll(self) -> bool:
        """Reads the file again if it has changed; returns True if rows came or went.

        Raises:
            ValueError: a whole line is no row.
        """
        try:
            status = os.stat(self._path)
            found = (status.st_ino, status.st_size, status.st_mtime_ns)
            if found == self._seen:
                return False
            rows = read_rows(self._path)
        except FileNotFoundError:
            return False
        self._seen, changed = found, rows != self.rows
        self.rows = rows
        return changed
