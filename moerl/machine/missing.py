"""The error for a package that is not installed, with the extra that brings it. Standard library alone; any process."""

from __future__ import annotations

import re
import sys
from importlib import metadata

from moerl.errors import MoerlError

NOT_INSTALLED = "a package is not installed"


def missing_name(error: ModuleNotFoundError) -> str:
    """Returns the name of a module of another package; "" for one of moerl, whose absence is a fault of moerl."""
    name = error.name or ""
    return "" if name.partition(".")[0] == "moerl" else name


def missing_package(name: str, extra: str, *, command: str = "", more: str = "") -> MoerlError:
    """Returns the error for a module that no installed package has.

    Args:
        name: of the module.
        extra: extra of moerl that brings all that is needed; empty = none does.
        command: command that needs it, for people.
        more: end of the remedy.
    """
    wheel = f"the wheel of moerl with its extra `{extra}`" if extra else "the wheel of moerl with what it needs"
    return MoerlError(
        f"{command}: {NOT_INSTALLED}" if command else NOT_INSTALLED,
        seen=f"no module {name} for {sys.executable}",
        expected="the packages that moerl needs, in one environment",
        remedy=f"`make setup` in a checkout; else pip install {wheel}" + more,
    )


def extra_of(name: str) -> str:
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
