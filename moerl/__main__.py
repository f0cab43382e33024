"""``python -m moerl`` and ``moerl``: the command line; also how a launcher starts a rank. Standard library alone until
the command line is loaded: a package that is not installed is an error of one line."""

from __future__ import annotations

import sys

from moerl.machine.missing import extra_of, missing_name, missing_package
from moerl.printable import printable

_TRAINER = ("train", "sft", "rollout", "eval", "verify", "export")
"""Commands that need all that a run needs, whichever package is missed first."""


def main() -> int:
    """Runs a command; returns its exit status, 2 if a package that it needs is not installed."""
    try:
        from moerl.cli import main as run

        return run()
    except ModuleNotFoundError as error:
        name = missing_name(error)
        if "--traceback" in sys.argv or not name:
            raise
        lines = [f"error: {_explain(name)}", *getattr(error, "__notes__", ())]
        print(printable("\n".join(lines)), file=sys.stderr)
        return 2


def _explain(name: str) -> str:
    command = sys.argv[1] if len(sys.argv) > 1 else "moerl"
    doctor = ". `moerl doctor` lists what is missing; --traceback shows who asked for it"
    extra = "train" if command in _TRAINER else extra_of(name)
    return str(missing_package(name, extra, command=command, more=doctor))


if __name__ == "__main__":
    sys.exit(main())
