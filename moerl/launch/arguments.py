"""The command-line parser of all commands. Torch-free."""

from __future__ import annotations

import argparse
from typing import NoReturn

from moerl.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` where the command line is wrong; prints nothing and never exits."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}", remedy=f"see `{self.prog} --help`")
