"""The command line of `moerl doctor`, and the looks that it makes. Torch-free; the process that a user started."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moerl.config.load import load_plan
from moerl.config.rollouts import ServerRolloutConfig, SGLangRolloutConfig
from moerl.errors import ConfigError
from moerl.launch.arguments import Parser, positive
from moerl.launch.checks import packages
from moerl.launch.checks.facts import Facts
from moerl.launch.checks.gpus import Gpu, query_gpus, visible_gpus
from moerl.launch.checks.listed import look
from moerl.launch.checks.outcome import LEVELS, Check, worst
from moerl.launch.doctor import accelerators, machine, servers, shared
from moerl.launch.sglang import ENVIRONMENT
from moerl.printable import printable

_LARGEST_PORT = 65535


def doctor(arguments: list[str]) -> int:
    """Runs the command. Returns exit status 1 if a look is red, else 0. Raises `ConfigError` if the command line is
    wrong."""
    options = parser().read(arguments, "moerl doctor [options] [GROUP=OPTION ...] [KEY=VALUE ...]")
    if options is None:
        return 0
    _check_options(options)
    run = Facts("doctor", load_plan(options.overrides, config_dir=options.config_dir)) if options.overrides else None
    gpus = query_gpus()
    checks = [*_installation(options, run, gpus), *_machine(options, run, gpus)]
    if options.shared is not None:
        checks += _shared(options)
    show(checks, Console(), as_json=options.json)
    return 1 if worst(checks) == "red" else 0


def parser() -> Parser:
    """Makes the parser of the command."""
    made = Parser("doctor", takes_keys=True)
    add = made.add_argument
    add("--config-dir", type=Path, metavar="DIR", help="directory with config groups of your own")
    add("--runs", type=Path, metavar="DIR", help="folder where runs are written; of the run's run_dir, or runs")
    add("--env", type=Path, metavar="DIR", help=f"an SGLang environment; {ENVIRONMENT} if no run has one")
    add("--port", type=int, action="append", default=[], metavar="N", help="look whether this port is free, too")
    add("--shared", type=Path, metavar="DIR", help="folder that all nodes should see; run this on each of them")
    add("--nodes", type=int, default=1, metavar="N", help="with --shared: wait until N nodes are seen")
    add("--within", type=positive, default=60.0, metavar="S", help="with --shared: longest wait in seconds, 60")
    add("--node", metavar="NAME", help="with --shared: name of this node, its host name by default")
    add("--json", action="store_true", help="print one JSON document")
    return made


def _check_options(options: argparse.Namespace) -> None:
    for port in options.port:
        if not 0 < port <= _LARGEST_PORT:
            raise ConfigError("--port: no port", seen=port, expected=f"1 to {_LARGEST_PORT}", remedy="give its number")
    if options.nodes < 1:
        raise ConfigError("--nodes: no number of nodes", seen=options.nodes, expected=">= 1", remedy="give N >= 1")
    if options.shared is None and (options.nodes > 1 or options.node):
        raise ConfigError("--nodes, --node: of which folder?", expected="--shared DIR", remedy="add --shared DIR")


def _installation(options: argparse.Namespace, run: Facts | None, gpus: list[Gpu] | str) -> list[Check]:
    """Looks at packages, accelerators, servers and keys."""
    home, hub = Path.home(), os.environ.get("HF_HOME")
    files = servers.token_files(home, Path(hub) if hub else None)
    named = options.env or (
        None if run is not None and isinstance(run.config.rollout, SGLangRolloutConfig) else ENVIRONMENT
    )
    return [
        *packages.package_checks(),
        *accelerators.accelerator_checks(gpus, accelerators.ask_torch(), packages.installed_versions()),
        # The environment that a run names is looked at with the run.
        *([] if named is None else [servers.check_environment(named.resolve(), has_gpus=bool(gpus))]),
        servers.check_server_files(servers.server_files(_runs(options, run))),
        servers.check_token_files(files),
        servers.check_binds(servers.own_listeners(), others_are_used=run is None or _uses_others(run)),
    ]


def _machine(options: argparse.Namespace, facts: Facts | None, gpus: list[Gpu] | str) -> list[Check]:
    """Looks at ports and disk, and, if the command line names a run, at what the run needs."""
    found, rate = machine.machine_checks(_runs(options, facts), options.port, has_run=facts is not None)
    if facts is None:
        return found
    config, facts.disk_rate = facts.config, rate
    facts.grace_seconds = config.checkpoint.grace_seconds
    facts.disk_bytes = machine.room_for_checkpoints(_runs(options, facts) / config.run_dir.name)
    # Other nodes are assumed to be like this one.
    nodes = options.nodes if config.launch.on == "ray" else 1
    facts.note_gpus(gpus if isinstance(gpus, str) else visible_gpus(gpus), nodes)
    if facts.machine is not None:
        facts.num_cores = len(os.sched_getaffinity(0)) * nodes
    return found + look(facts)


def _uses_others(run: Facts) -> bool:
    """Returns whether a run uses servers, or a Ray cluster, that it does not start itself."""
    return isinstance(run.config.rollout, ServerRolloutConfig) or run.config.launch.address is not None


def _shared(options: argparse.Namespace) -> list[Check]:
    host = socket.gethostname()
    node = shared.node_name(host, options.node, os.environ.get("SLURM_PROCID"))
    try:
        done = shared.exchange(options.shared, node, host, nodes=options.nodes, seconds=options.within)
    except OSError as error:
        remedy = "make the folder, mount it on this node, or give one that this user may write to"
        seen = f"{options.shared}: {error.strerror or error}"
        return [Check(shared.AREA, "nodes that see it", "red", seen, "a folder to write to", remedy)]
    return [shared.check_presence(done), shared.check_clocks(done)]


def _runs(options: argparse.Namespace, run: Facts | None) -> Path:
    """Returns the folder of runs."""
    return (options.runs or (Path("runs") if run is None else run.config.run_dir.parent)).resolve()


def show(checks: Sequence[Check], console: Console, *, as_json: bool) -> None:
    """Prints all checks, and how many are of each level."""
    if as_json:
        document = {"level": worst(checks), "checks": [asdict(check) for check in checks]}
        print(json.dumps(document, indent=1))
        return
    if console.is_terminal:
        console.print(_table(checks))
    else:
        for line in lines(checks):
            print(line)
    print(summary(checks))


def lines(checks: Sequence[Check]) -> list[str]:
    """Returns a line for each check; expectation and remedy follow if it is not green."""
    found: list[str] = []
    for check in checks:
        found.append(f"{check.level:<7} {check.area} | {check.name}: {check.seen}")
        found += [f"        {text}" for text in _more(check)]
    return [printable(line) for line in found]


def summary(checks: Sequence[Check]) -> str:
    """Returns how many checks are of each level, as text."""
    counts = {level: sum(check.level == level for check in checks) for level in LEVELS}
    return ", ".join(f"{count} {level}" for level, count in counts.items())


def _table(checks: Sequence[Check]) -> Table:
    table = Table(show_lines=False, expand=False)
    for title in ("area", "check", "", "seen"):
        table.add_column(title, overflow="fold")
    before = ""
    for check in checks:
        seen = Text("\n".join([check.seen, *_more(check)]))
        if check.area != before and before:
            table.add_section()
        table.add_row(check.area if check.area != before else "", check.name, Text(check.level, check.level), seen)
        before = check.area
    return table


def _more(check: Check) -> list[str]:
    if check.level == "green":
        return []
    return [f"{label}: {text}" for label, text in (("expected", check.expected), ("remedy", check.remedy)) if text]
