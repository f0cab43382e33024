"""The command line of commands that take keys, and their help. Torch-free."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from moerl.config.command_texts import COMMANDS
from moerl.launch.arguments import Parser, add_plan_arguments, options_text

PLAN_MEMORY, PLAN_WEIGHTS, PLAN_RUN = "plan memory", "plan weights", "plan run"
PLANS = (PLAN_MEMORY, PLAN_WEIGHTS, PLAN_RUN)


def run_parser(command: str) -> argparse.ArgumentParser:
    """Returns the parser of a command that takes keys."""
    parser = Parser(prog=f"moerl {command}", add_help=False)
    parser.takes_keys = True
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="directory with config groups of your own")
    parser.add_argument("--show-config", action="store_true", help="print the resolved configuration and stop")
    if command == "train":
        parser.add_argument("-m", "--multirun", action="store_true", help="a run for each value of keys with several")
    if command in PLANS:
        add_plan_arguments(parser, command.removeprefix("plan "))
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    parser.add_argument("--all", action="store_true", help="with --help: list every key")
    return parser


def run_help(command: str, config_dir: Path | None, *, all_keys: bool) -> str:
    """Returns the help of a command that takes keys: all of them, or those that matter for it; of `moerl train` those
    of a first run."""
    from moerl.config.help_text import RESUME_TEXT, first_keys_text, groups_text, keys_text

    about = COMMANDS[command]
    usage = f"usage: moerl {command} [options] [GROUP=OPTION ...] [KEY=VALUE ...]"
    head = f"moerl {command}: {about.summary}."
    options = "options:\n" + options_text(run_parser(command))
    more = f"  `moerl {command} --help --all` lists every key."
    if about.first_keys and not all_keys:
        groups = groups_text(config_dir, ("recipe",))
        keys = first_keys_text(about.first_keys)
        return "\n\n".join([usage, head, _examples_text(about.examples, 3), options, groups, f"{keys}\n{more}"])
    keys = () if all_keys else about.keys
    parts = [
        usage,
        f"{head}\n\n{about.text}",
        _examples_text(about.examples),
        options,
        groups_text(config_dir, keys),
        keys_text(keys),
        *([RESUME_TEXT] if not keys or command == "sft" else []),
        *([more] if keys else []),
    ]
    return "\n\n".join(parts)


def _examples_text(examples: Mapping[str, str], most: int | None = None) -> str:
    shown = [f"  {line}\n      {purpose}" for line, purpose in examples.items()]
    return "examples:\n" + "\n".join(shown[:most])
