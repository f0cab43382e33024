"""The tutorial's commands, in order and as written, in a directory of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import status_of

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
STAND_INS = {"make demo": "moerl train recipe=tiny run_dir=runs/demo-stand-in"}
"""Stand-ins for commands that take minutes or need the checkout."""

LIMIT_SECONDS = 1500.0
_BLOCK = re.compile(r"(?:^<!-- (?P<note>[^>]*) -->\n)?^```bash\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block of commands. note: of the HTML comment above it, or empty."""

    note: str
    text: str


def blocks() -> list[Block]:
    return [Block(m["note"] or "", m["text"]) for m in _BLOCK.finditer(TUTORIAL.read_text())]


def as_script(block: Block) -> str:
    """Returns shell lines that do what the block tells a reader to do: run it, or see it fail."""
    if block.note.startswith("not run"):
        return ""
    text = STAND_INS.get(block.text.strip(), block.text.strip())
    if block.note == "fails on purpose":
        return f"if ( {text} ); then echo 'this was to fail'; exit 1; fi\n"
    assert not block.note, f"a note that means nothing here: {block.note}"
    return text + "\n"


@pytest.mark.slow
def test_every_command_of_the_tutorial_runs_as_written(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(TUTORIAL.parents[1] / "examples")
    script = "set -euxo pipefail\n" + "".join(as_script(block) for block in blocks())
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    with (tmp_path / "output.log").open("w+") as output:
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = status_of(process, LIMIT_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        assert status == 0, output.read()[-6000:]
    assert (tmp_path / "my_task/runs/sort/summary.json").is_file()


def test_the_tutorial_has_commands() -> None:
    found = blocks()
    assert len(found) >= 12
    assert all(as_script(block) or block.note.startswith("not run") for block in found)
