"""The command-line parser of all commands, and their help. Torch-free."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from moerl.config.command_texts import TEXTS
from moerl.config.foreign_keys import counterpart
from moerl.errors import ConfigError

PLANS = ("plan memory", "plan weights", "plan run")

TOLERANCE_NATS = 1e-4
"""Several times what float32 rounding leaves between implementations, far below what a wrong expert or id costs."""


class Parser(argparse.ArgumentParser):
    """Parser of a command that raises `ConfigError` if the command line is wrong, and never exits.

    Args:
        command: name of the command.
        takes_keys: True if the command takes KEY=VALUE besides its options.
    """

    def __init__(self, command: str, *, takes_keys: bool = False) -> None:
        super().__init__(prog=f"moerl {command}", add_help=False)
        self._command, self._takes_keys = command, takes_keys
        if takes_keys:
            self.add_argument("overrides", nargs="*", metavar="KEY=VALUE")

    def read(self, arguments: Sequence[str], usage: str) -> argparse.Namespace | None:
        """Reads the command line of a command that reads no configuration. If it asks for help, prints the help and
        returns None."""
        self.add_common_options()
        if asks_for_help(arguments):
            about = TEXTS[self._command]
            text = f"{self.prog}: {about.summary}.\n\n{about.text}\n\n{examples_text(about.examples)}"
            print(f"usage: {usage}\n\n{text}\n\n{options_text(self)}")
            return None
        # Options may stand between arguments of which there may be several.
        is_mixed = any(action.nargs == "*" for action in self._actions)
        return self.parse_intermixed_args(arguments) if is_mixed else self.parse_args(arguments)

    def add_common_options(self) -> None:
        """Adds the options of all commands, which come last in their help."""
        self.add_argument("--traceback", action="store_true", help="show where an error was raised")
        self.add_argument("-h", "--help", action="store_true", help="show this text")

    def error(self, message: str) -> NoReturn:
        remedy = f"see `{self.prog} --help`"
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        if self._takes_keys and unknown != message.split()[0]:
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


def not_negative(text: str) -> float:
    """Reads a number from 0 on; argparse names this function if the text is none."""
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


def page_path(output: Path) -> Path:
    """Returns the absolute path of a page that --output names. Raises `ConfigError` if it does not end in .html."""
    if output.suffix != ".html":
        raise ConfigError(
            "--output: not the name of a page", seen=output, expected="a name that ends in .html", remedy="add .html"
        )
    return output.resolve()


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Returns whether a command line asks for help, whatever else is on it."""
    return not {"-h", "--help"}.isdisjoint(arguments)


def export_parser() -> Parser:
    """Makes the parser of `moerl export`."""
    parser = Parser("export")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--step", type=int, metavar="N", help="of which step; the newest checkpoint by default")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True, help="directory to make")
    return parser


def verify_parser() -> Parser:
    """Makes the parser of `moerl verify`."""
    parser = Parser("verify")
    add = parser.add_argument
    add("dump", type=Path, metavar="DUMP")
    model = "the weights: a Hugging Face directory, or OWNER/NAME of the hub"
    add("--model", metavar="HF_DIR", required=True, help=model)
    add("--version", type=int, metavar="N", help="policy version of these weights; leaves out others")
    tolerance = f"largest difference of two log-probs of one token, {TOLERANCE_NATS:g} if not said"
    add("--tolerance", type=not_negative, default=TOLERANCE_NATS, metavar="NATS", help=tolerance)
    return parser


def run_parser(command: str) -> argparse.ArgumentParser:
    """Returns the parser of a command that takes keys."""
    parser = Parser(command, takes_keys=True)
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="directory with config groups of your own")
    parser.add_argument("--show-config", action="store_true", help="print the resolved configuration and stop")
    if command == "train":
        parser.add_argument("-m", "--multirun", action="store_true", help="a run for each value of keys with several")
    if command in PLANS:
        add_plan_arguments(parser, command.removeprefix("plan "))
    parser.add_common_options()
    parser.add_argument("--all", action="store_true", help="with --help: list every key")
    return parser


def run_help(command: str, config_dir: Path | None, *, all_keys: bool) -> str:
    """Returns the help of a command that takes keys: all of them, or those that matter for it; of `moerl train` those
    of a first run."""
    from moerl.config.help_text import RESUME_TEXT, first_keys_text, groups_text, keys_text

    about = TEXTS[command]
    usage = f"usage: moerl {command} [options] [GROUP=OPTION ...] [KEY=VALUE ...]"
    head = f"moerl {command}: {about.summary}."
    options = options_text(run_parser(command))
    more = f"  `moerl {command} --help --all` lists every key."
    if about.first_keys and not all_keys:
        groups = groups_text(config_dir, ("recipe",))
        keys = first_keys_text(about.first_keys)
        return "\n\n".join([usage, head, examples_text(about.examples, 3), options, groups, f"{keys}\n{more}"])
    keys = () if all_keys else about.keys
    parts = [
        usage,
        f"{head}\n\n{about.text}",
        examples_text(about.examples),
        options,
        groups_text(config_dir, keys),
        keys_text(keys),
        *([RESUME_TEXT] if not keys or command == "sft" else []),
        *([more] if keys else []),
    ]
    return "\n\n".join(parts)


def add_plan_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """Adds the options of `moerl plan KIND`: memory, weights or run."""
    add = parser.add_argument
    if kind != "memory":
        for link, text in (
            ("gather", "of a sender's link to other trainer ranks"),
            ("engine", "of its link to engines"),
        ):
            add(f"--{link}-gb-per-second", type=positive, default=50.0, metavar="GB", help=f"{text}, 50 if not said")
    if kind != "weights":
        add("--gpu-memory-gib", type=positive, default=80.0, metavar="GIB", help="memory of one device, 80 if not said")
    if kind == "memory":
        add("--gpus-per-node", type=whole, default=8, metavar="N", help="devices of one machine, 8 if not said")
        add("--host-memory-gib", type=positive, metavar="GIB", help="memory of one machine; shown alone if not said")
    if kind == "run":
        add("--calibrate", type=Path, metavar="RUN_DIR", help="take costs and lengths from this synchronous run")
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
            number = positive if value else not_negative
            add(f"--{name}", type=number, default=value, metavar=unit, help=f"{text}, {value:g} if not said")


def examples_text(examples: Mapping[str, str], most: int | None = None) -> str:
    """Returns two lines for each example: a command line, and what it is for; of the first `most` if given."""
    shown = [f"  {line}\n      {purpose}" for line, purpose in examples.items()]
    return "examples:\n" + "\n".join(shown[:most])


def options_text(parser: argparse.ArgumentParser) -> str:
    """Returns a title and a line for each option."""
    actions = [action for action in parser._actions if action.option_strings]
    heads = [", ".join(action.option_strings) + (f" {action.metavar}" if action.metavar else "") for action in actions]
    lines = [f"  {head:<21} {action.help}" for head, action in zip(heads, actions, strict=True)]
    return "\n".join(["options:", *lines])
