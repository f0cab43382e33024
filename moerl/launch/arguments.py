"""The command-line parser of all commands, and the help of those that read no configuration. Torch-free."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NoReturn

from moerl.config.command_texts import CommandText
from moerl.config.foreign_keys import counterpart
from moerl.errors import ConfigError

TOLERANCE_NATS = 1e-4
"""Several times what float32 rounding leaves between implementations, far below what a wrong expert or id costs."""


class Parser(argparse.ArgumentParser):
    """Parser that raises `ConfigError` if the command line is wrong; it prints nothing and never exits."""

    takes_keys = False
    """True if the command takes KEY=VALUE besides its options."""

    def error(self, message: str) -> NoReturn:
        remedy = f"see `{self.prog} --help`"
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        if self.takes_keys and unknown != message.split()[0]:
            remedy = _meant_by(unknown, remedy)
        raise ConfigError(f"command line: {message}", remedy=remedy)


def _meant_by(option: str, otherwise: str) -> str:
    """Returns the remedy for an option that a command with keys does not have."""
    if option in ("--cfg", "-c"):
        return "`--show-config` prints the resolved configuration"
    foreign = counterpart(option)
    if foreign is not None:
        trainer, ours = foreign
        return f"an option of {trainer}; here it is {ours}=VALUE; {otherwise}"
    return f"keys have no dashes, as in recipe=laptop; {otherwise}" if option.startswith("--") else otherwise


def nats(text: str) -> float:
    """Reads a difference of log-probs; argparse names this function if the text is none."""
    value = float(text)
    if not 0.0 <= value < math.inf:
        raise ValueError(text)
    return value


def positive(text: str) -> float:
    """Reads a number above 0; argparse names this function if the text is none."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise ValueError(text)
    return value


def whole(text: str) -> int:
    """Reads a whole number above 0; argparse names this function if the text is none."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def gib_size(text: str) -> float:
    """Reads a size in GiB, above 0; argparse names this function if the text is none."""
    return positive(text)


def bandwidth(text: str) -> float:
    """Reads GB per second, above 0; argparse names this function if the text is none."""
    return positive(text)


def export_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="moerl export", add_help=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--step", type=int, metavar="N", help="of which step; the newest checkpoint by default")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True, help="directory to make")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    return parser


def verify_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="moerl verify", add_help=False)
    parser.add_argument("dump", type=Path, metavar="DUMP")
    parser.add_argument(
        "--model",
        metavar="HF_DIR",
        required=True,
        help="the weights: a Hugging Face directory, or OWNER/NAME of the hub",
    )
    parser.add_argument("--version", type=int, metavar="N", help="policy version of these weights; leaves out others")
    parser.add_argument(
        "--tolerance",
        type=nats,
        default=TOLERANCE_NATS,
        metavar="NATS",
        help=f"largest difference of two log-probs of one token, {TOLERANCE_NATS:g} if not said",
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    return parser


def add_plan_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """Adds the options of `moerl plan KIND`: memory, weights or run."""
    add = parser.add_argument
    if kind != "memory":
        for link, text in (
            ("gather", "of a sender's link to other trainer ranks"),
            ("engine", "of its link to engines"),
        ):
            add(f"--{link}-gb-per-second", type=bandwidth, default=50.0, metavar="GB", help=f"{text}, 50 if not said")
    if kind != "weights":
        add("--gpu-memory-gib", type=gib_size, default=80.0, metavar="GIB", help="memory of one device, 80 if not said")
    if kind == "run":
        _add_plan_run_arguments(parser)
    elif kind == "memory":
        add("--gpus-per-node", type=whole, default=8, metavar="N", help="devices of one machine, 8 if not said")
        add("--host-memory-gib", type=gib_size, metavar="GIB", help="memory of one machine; shown alone if not said")


def _add_plan_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `moerl plan run`."""
    parser.add_argument(
        "--calibrate", type=Path, metavar="RUN_DIR", help="take costs and lengths from this synchronous run"
    )
    for name, value, unit, text in (
        ("tflops", 989.0, "N", "of a device, dense, in the precision of the weights"),
        ("mfu", 0.3, "SHARE", "share of them that training reaches"),
        ("memory-gb-per-second", 3350.0, "GB", "of a device's memory"),
        ("mean-tokens", 4096.0, "N", "mean length of a response"),
        ("prompt-tokens", 512.0, "N", "length of a prompt"),
        ("turns", 1.0, "N", "turns of an episode, which share the tokens of a response"),
        ("tool-seconds", 0.0, "N", "mean time of the environment between two turns"),
        ("tool-tokens", 0.0, "N", "tokens that the environment writes between two turns"),
    ):
        parser.add_argument(
            f"--{name}", type=positive, default=value, metavar=unit, help=f"{text}, {value:g} if not said"
        )


def short_help(usage: str, command: CommandText, parser: argparse.ArgumentParser) -> str:
    """Returns the help of a command that reads no configuration."""
    examples = "\n".join(f"  {line}\n      {purpose}" for line, purpose in command.examples.items())
    about = f"{parser.prog}: {command.summary}.\n\n{command.text}"
    return f"usage: {usage}\n\n{about}\n\nexamples:\n{examples}\n\noptions:\n{options_text(parser)}"


def options_text(parser: argparse.ArgumentParser) -> str:
    """Returns a line for each option."""
    actions = [action for action in parser._actions if action.option_strings]
    heads = [", ".join(action.option_strings) + (f" {action.metavar}" if action.metavar else "") for action in actions]
    return "\n".join(f"  {head:<21} {action.help}" for head, action in zip(heads, actions, strict=True))
