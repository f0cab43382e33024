"""The one list of checks of a run, and which command runs which of them. Torch-free; login-node safe.

`moerl train` and `moerl launch slurm` end at the first that fails; `moerl doctor` and `moerl plan memory` show all.
A command leaves out checks of things that it cannot know; a check of things that it cannot see from here is a note.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moerl.errors import MoerlError, closing
from moerl.launch.checks import containers, inputs, packages, room
from moerl.launch.checks.facts import DOORS, Door, Facts
from moerl.launch.checks.inputs import Note
from moerl.launch.checks.outcome import Check, fault, green
from moerl.machine.missing import missing_name, missing_package

AREA = "run"
_STARTED: tuple[Door, ...] = ("train", "doctor", "dry run")


@dataclass(frozen=True, slots=True)
class RunCheck:
    """One check of a run. docs/doctor.md says what each looks at, and what it costs."""

    name: str
    """Name that users see; no other check has it."""
    doors: tuple[Door, ...]
    """Commands that run the check."""
    look: Callable[[Facts], str | Note]
    """Function that returns a line on what it saw, or a note; raises `MoerlError` if a run could not work."""
    after: str = ""
    """Name of an earlier check; if that one fails, this one is left out, as it would fail for the same reason."""


CHECKS = (
    RunCheck("keys", DOORS, inputs.look_at_keys),
    RunCheck("layout", DOORS, inputs.look_at_layout),
    RunCheck("packages", ("dry run",), packages.look_at_packages),
    RunCheck("command", _STARTED, inputs.look_at_command),
    RunCheck("devices", _STARTED, room.look_at_devices),
    RunCheck("memory of GPUs", DOORS, room.look_at_gpus),
    RunCheck("nodes of servers", DOORS, room.look_at_nodes),
    RunCheck("memory of servers", DOORS, room.look_at_server),
    RunCheck("memory of hosts", DOORS, room.look_at_hosts),
    RunCheck("room on the disk", ("doctor", "dry run"), room.look_at_disk),
    RunCheck("time of a checkpoint", ("doctor", "dry run"), room.look_at_checkpoint_time),
    RunCheck("server files", _STARTED, inputs.look_at_server_files),
    RunCheck("SGLang environment", _STARTED, inputs.look_at_environment),
    RunCheck("container", ("dry run",), containers.look_at_container),
    RunCheck("cache of the hub", ("dry run",), inputs.look_at_cache),
    RunCheck("model", _STARTED, inputs.look_at_model),
    RunCheck("scorers", _STARTED, inputs.look_at_scorers),
    RunCheck("dumps", _STARTED, inputs.look_at_dumps),
    RunCheck("data", _STARTED, inputs.look_at_data, after="command"),
    RunCheck("rewards", _STARTED, inputs.look_at_rewards, after="data"),
)
"""All checks, in order: those that cost nothing come first, so that nothing is fetched for a run that does not fit."""


def refuse(facts: Facts) -> list[str]:
    """Runs the checks of a command, up to the first that fails; closes the facts.

    Returns:
        Notes for people, a line each.

    Raises:
        MoerlError: the error of the first check that fails.
    """
    notes: list[str] = []
    with closing(facts):
        for check in taken_by(facts.door):
            seen = check.look(facts)
            if isinstance(seen, Note):
                notes.append(f"{check.name}: {seen.seen}; expected: {seen.expected}; remedy: {seen.remedy}")
    return notes


def look(facts: Facts) -> list[Check]:
    """Runs all checks of a command, and returns what each found; closes the facts."""
    found: list[Check] = []
    failed: set[str] = set()
    with closing(facts):
        for check in taken_by(facts.door):
            if check.after in failed:
                failed.add(check.name)
                continue
            outcome = _outcome(check, facts)
            found.append(outcome)
            if outcome.level == "red":
                failed.add(check.name)
    return found


def taken_by(door: Door) -> list[RunCheck]:
    """Returns the checks of a command, in order."""
    return [check for check in CHECKS if door in check.doors]


def _outcome(check: RunCheck, facts: Facts) -> Check:
    try:
        seen = check.look(facts)
    except MoerlError as error:
        return fault("red", AREA, check.name, error)
    except ModuleNotFoundError as error:
        if not (name := missing_name(error)):
            raise
        return fault("red", AREA, check.name, missing_package(name, "train"))
    if isinstance(seen, Note):
        return Check(AREA, check.name, "yellow", seen.seen, seen.expected, seen.remedy)
    return green(AREA, check.name, seen)
