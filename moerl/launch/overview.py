"""List of the commands, for `moerl --help` and for messages about unknown ones. Torch-free."""

from __future__ import annotations

import difflib

from moerl.config import command_texts as texts

FAMILIES = ("plan", "sglang", "launch")
"""First words of commands that have two."""

SGLANG = {
    "sglang install": "make the environment of SGLang servers: the pinned release, patched and proved",
    "sglang check": "prove an installation, or a running server, to be the release with our patches",
    "serve": "run an SGLang server for rollouts until it is told to stop",
}

LAUNCH = {"launch slurm": texts.LAUNCH_SLURM.summary}

SUMMARIES = {name: command.summary for name, command in (texts.COMMANDS | texts.ON_FILES).items()} | SGLANG | LAUNCH
"""Text on what each command does, in a line, by the command's name."""


def which_command(command: str, known: list[str], family: str) -> str:
    """Returns the remedy for an unknown command. family: the first word of commands that have two, else empty."""
    near = difflib.get_close_matches(command.lower(), known, n=1)
    meant = f"did you mean `moerl {near[0]}`? " if near else ""
    return f"{meant}see `{' '.join(['moerl', *family.split()])} --help`"


def members(family: str) -> list[str]:
    """Returns the commands that begin with this word of `FAMILIES`."""
    return [name for name in SUMMARIES if name.startswith(f"{family} ")]


def family_overview(family: str) -> str:
    """Returns the text that `moerl plan`, `moerl sglang` and `moerl launch` print."""
    lines = [f"  moerl {name:<16}{SUMMARIES[name]}" for name in members(family)]
    about = f"`moerl {family} COMMAND --help` explains a command."
    return "\n".join([f"usage: moerl {family} COMMAND [options]", "", "commands:", *lines, "", about])


def overview() -> str:
    """Returns the text that `moerl --help` prints."""
    lines = [f"  {name:<16}{summary}" for name, summary in SUMMARIES.items()]
    return "\n".join(
        [
            "usage: moerl COMMAND [options] [GROUP=OPTION ...] [KEY=VALUE ...]",
            "",
            "RL post-training of mixture-of-experts language models, with routing and sampling masks kept.",
            "",
            "commands:",
            *lines,
            "",
            "start here: moerl train recipe=laptop",
            "`moerl COMMAND --help` explains a command and its keys; `moerl --version` prints the version.",
        ]
    )
