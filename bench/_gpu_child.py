"""The process of one check of `gpu_check.py`: `python bench/_gpu_child.py MODULE:FUNCTION DEVICE ANSWER PARENT`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from _gpu_checks import CannotRunError, answer_at, write_answer

from moerl.processes.parent import die_with


def main(target: str, device: str, answer: str, parent: str) -> None:
    die_with(int(parent))
    answer_at(Path(answer))
    module, _, function = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)(device)
    except CannotRunError as reason:
        found = reason
    write_answer(Path(answer), found)


if __name__ == "__main__":
    main(*sys.argv[1:])
