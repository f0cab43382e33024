"""The whole commands of docs/recipes.md, by machines."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (
    (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").partition("## Whole commands\n")[2].partition("\n## ")[0]
)
COMMANDS = [shlex.split(block.replace("\\\n", " ")) for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)]
ROWS = [
    [cell.strip() for cell in row]
    for row in re.findall(
        r"^\| (one|two) nodes? of 8 x (\d+) GB \|[^|]+\|[^|]+\| ([\d., ]+) \| ([\d.]*) ?\| ([\d.,]+) \|$",
        PAGE,
        re.MULTILINE,
    )
]


def keys_of(words: list[str]) -> tuple[str, ...]:
    """Returns the keys of a command, with data that are here."""
    keys = [word for word in words if re.match(r"[a-z_.]+=", word) and not word.startswith("run_dir=")]
    return tuple("task.path=rows.jsonl" if key.startswith("task.path=") else key for key in keys)
