"""The command-line parser of all commands. Torch-free."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from moerl.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` where the command line is wrong; prints nothing and never exits.

    Attributes:
        takes_keys: the command takes KEY=VALUE besides its options.
    """

    takes_keys = False

    def error(self, message: str) -> NoReturn:
        remedy = f"see `{self.prog} --help`"
        if message.startswith("unrecognized arguments: --") and self.takes_keys:
            remedy = f"keys have no dashes, as in recipe=laptop; {remedy}"
        raise ConfigError(f"command line: {message}", remedy=remedy)


def nats(text: str) -> float:
    """A difference of log-probs; argparse names this function where the text is none."""
    value = float(text)
    if not 0.0 <= value < math.inf:
        raise ValueError(text)
    return value


def positive(text: str) -> float:
    """A number above 0; argparse names this function where the text is none."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise ValueError(text)
    return value


def gib_size(text: str) -> float:
    """A size in GiB; argparse names this function where the text is none."""
    return positive(text)


def bandwidth(text: str) -> float:
    """GB per second; argparse names this function where the text is none."""
    return positive(text)
