"""``python -m moerl`` and ``moerl``: the command line; also how a launcher starts a rank. Standard library alone until
the command line is loaded: a package that is not installed is an error of one line."""

from __future__ import annotations

import re
import sys
from importlib import metadata

from moerl.errors import MoerlError
from moerl.printable import printable

_TRAINER = ("train", "sft", "rollout", "eval", "verify", "export")
"""Commands that need all that a run needs, whichever package is missed first."""


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
    extra = "train" if _command() in _TRAINER else _extra_of(name)
    wheel = f"the wheel of moerl with its extra `{extra}`" if extra else "the wheel of moerl with what it needs"
    doctor = "`moerl doctor` lists what is missing; --traceback shows who asked for it"
    return MoerlError(
        f"{_command()}: a package is not installed",
        seen=f"no module {name} for {sys.executable}",
        expected="the packages that moerl needs, in one environment",
        remedy=f"`make setup` in a checkout; else pip install {wheel}. {doctor}",
    )


def _command() -> str:
    return sys.argv[1] if len(sys.argv) > 1 else "moerl"


def _extra_of(name: str) -> str:
    """Returns the extra of users that brings a module, "" if none does or moerl has no metadata."""
    package = name.partition(".")[0].replace("_", "-")
    try:
        requirements = metadata.requires("moerl") or []
    except metadata.PackageNotFoundError:
        return ""
    for text in requirements:
        extra = re.search(r"extra == '(\w+)'", text)
        if extra and extra[1] != "dev" and re.match(rf"{re.escape(package)}(-core|-skinny)?(?![\w.-])", text):
            return extra[1]
    return ""


if __name__ == "__main__":
    sys.exit(main())
