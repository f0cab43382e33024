"""The commands of examples/, as their pages have them."""

from __future__ import annotations

import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def command_of(example: str) -> str:
    """Returns the command of an example's page, whose only block of bash is one line."""
    [command] = re.findall(r"^```bash\n(.+)\n```$", (EXAMPLES / example / "README.md").read_text(), re.MULTILINE)
    return command


def keys_of(example: str) -> tuple[str, ...]:
    """Returns the keys that the command sets, in order, but for `run_dir`."""
    return tuple(word for word in command_of(example).split() if re.match(r"(?!run_dir)[\w.]+=", word))
