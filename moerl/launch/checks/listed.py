"""The one list of checks of a run, and which command runs which of them. Torch-free; login-node safe.

`moerl train` and `moerl launch slurm` end at the first that fails; `moerl doctor` and `moerl plan memory` show all.
A command leaves out checks of things that it cannot know; a check of things that it cannot see from here is a note.

`python -m moerl.launch.checks.listed` prints the table of docs/doctor.md.
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
    """One check of a run."""

    name: str
    """Name that users see; no other check has it."""
    looks_at: str
    """Objects of the check, for the documentation."""
    doors: tuple[Door, ...]
    """Commands that run the check."""
    cost: str
    """Files and programs that the check needs, for the documentation."""
    look: Callable[[Facts], str | Note]
    """Function that returns a line on what it saw, or a note; raises `MoerlError` if a run could not work."""
    after: str = ""
    """Name of an earlier check; if that one fails, this one is left out, as it would fail for the same reason."""


CHECKS = (
    RunCheck("keys", "types of keys, rules between them", DOORS, "none", inputs.look_at_keys),
    RunCheck("layout", "config.json of the model against layout and lengths", DOORS, "a file", inputs.look_at_layout),
    RunCheck(
        "packages",
        "packages of a run, its trackers and Ray, if the job has the interpreter that submits it",
        ("dry run",),
        "metadata of packages",
        packages.look_at_packages,
    ),
    RunCheck(
        "command",
        "libraries of trackers and Ray, files that keys name, the algorithm",
        _STARTED,
        "some files",
        inputs.look_at_command,
    ),
    RunCheck("devices", "GPUs for ranks and servers; on CPUs cores", _STARTED, "`nvidia-smi`", room.look_at_devices),
    RunCheck(
        "memory of GPUs", "a rank, and in a colocated run its server, on one GPU", DOORS, "none", room.look_at_gpus
    ),
    RunCheck(
        "nodes of servers",
        "a server's GPUs are on one node, in a colocated run those of ranks",
        DOORS,
        "none",
        room.look_at_nodes,
    ),
    RunCheck("memory of servers", "weights and cache of a server in its share", DOORS, "none", room.look_at_server),
    RunCheck(
        "memory of hosts",
        "checkpoints, copies, and on CPUs all the rest, per machine",
        DOORS,
        "none",
        room.look_at_hosts,
    ),
    RunCheck(
        "room on the disk",
        "checkpoints that are kept, and one more, at the run directory",
        ("doctor", "dry run"),
        "none",
        room.look_at_disk,
    ),
    RunCheck(
        "time of a checkpoint",
        "bytes of a checkpoint and rate of the disk against the grace time of a signal; a note",
        ("doctor", "dry run"),
        "64 MiB written",
        room.look_at_checkpoint_time,
    ),
    RunCheck(
        "server files", "server.json of servers that run elsewhere", _STARTED, "a file", inputs.look_at_server_files
    ),
    RunCheck(
        "SGLang environment",
        "path, release, patches and device of the servers' environment",
        _STARTED,
        "some files, one Python",
        inputs.look_at_environment,
    ),
    RunCheck(
        "container",
        "SLURM has the plugin pyxis if the site file asks for it; mounts show the model and the cache of the hub",
        ("dry run",),
        "`srun --help`",
        containers.look_at_container,
    ),
    RunCheck(
        "cache of the hub",
        "the job looks for models and data sets of the hub in the folder that this process fetches them to",
        ("dry run",),
        "none",
        inputs.look_at_cache,
    ),
    RunCheck(
        "model",
        "tensors and tokenizer of the model; weights of the hub are fetched by train, and before a job is submitted",
        _STARTED,
        "headers of files; fetching",
        inputs.look_at_model,
    ),
    RunCheck("scorers", "servers of scorers answer", _STARTED, "one request to each", inputs.look_at_scorers),
    RunCheck(
        "dumps",
        "format, model, groups and steps of the dumps that a run trains on",
        _STARTED,
        "some columns; all of foreign ones",
        inputs.look_at_dumps,
    ),
    RunCheck(
        "data",
        "columns, number of problems, demonstrations; data sets of the hub are fetched",
        _STARTED,
        "all rows; fetching",
        inputs.look_at_data,
        after="command",
    ),
    RunCheck(
        "rewards",
        "reward functions can be imported and score one response",
        _STARTED,
        "one call of each",
        inputs.look_at_rewards,
        after="data",
    ),
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


def table() -> str:
    """Returns check x command, as Markdown."""
    head = ["check", "looks at", *(f"`{name}`" for name in ("train", "doctor", "launch slurm", "plan memory")), "cost"]
    rows = [head, ["---"] * len(head)]
    for check in CHECKS:
        rows.append(
            [check.name, check.looks_at, *("yes" if door in check.doors else "-" for door in DOORS), check.cost]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table())
