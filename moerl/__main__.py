"""``python -m moerl`` and ``moerl``: the command line; also how a launcher starts a rank. Standard library alone until
the command line is loaded: a package that is not installed is an error of one line."""

from __future__ import annotations

import sys

from moerl.errors import MoerlError
from moerl.printable import printable


def main() -> int:
    """Runs a command; returns its exit status, 2 if a package that it needs is not installed."""
    try:
        from moerl.cli import main as run

        return run()
    except ModuleNotFoundError as error:
        if "--traceback" in sys.argv or not error.name or error.name.partition(".")[0] == "moerl":
            raise
        lines = [f"error: {_explain(error.name)}", *getattr(error, "__notes__", ())]
        print(printable("\n".join(lines)), file=sys.stderr)
        return 2


def _explain(name: str) -> MoerlError:
    """Returns the error for a module that no installed package has."""
    return MoerlError(
        f"{sys.argv[1] if len(sys.argv) > 1 else 'moerl'}: a package is not installed",
        seen=f"no module {name} for {sys.executable}",
        expected="the packages that moerl needs, in one environment",
        remedy="`make setup` in a checkout; else pip install the wheel of moerl with what it needs. `moerl doctor`"
        " lists what is missing; --traceback shows who asked for it",
    )


if __name__ == "__main__":
    sys.exit(main())
