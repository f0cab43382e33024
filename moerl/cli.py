"""The command line, ``moerl COMMAND``: train, sft, rollout, eval, plan, doctor, status, watch, report, samples,
diagnose, export, verify, conformance, sglang, serve, launch.

Reads and checks the configuration and hands over to `moerl.orchestration.commands`, in the same process. That import
comes last, so that help and configuration errors need no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING

from moerl.config.command_texts import COMMANDS
from moerl.errors import CheckpointError, ConfigError, MoerlError, told
from moerl.launch.arguments import PLANS, export_parser, run_help, run_parser, verify_parser
from moerl.launch.going_on import can_go_on, how_to_go_on, is_finished
from moerl.launch.launchers import refuse_other_launchers
from moerl.launch.overview import FAMILIES, LAUNCH, SGLANG, family_overview, members, overview, which_command
from moerl.launch.run_lock import run_lock
from moerl.machine.stop_signals import INTERRUPTED, STOPPED, GraceOverError, StopRequest, stop_signals
from moerl.machine.torch_start import before_cuda, before_torch
from moerl.printable import printable

if TYPE_CHECKING:
    from moerl.config.schema import RunConfig

MODULES_OF_RUNS = (
    *("moerl.orchestration.commands", "moerl.ranks.placement", "moerl.rollout.factory"),
    *("moerl.rollout.tokenizers", "moerl.trainer.new_model"),
)
"""Modules that a run begins with, and that load torch, transformers and Megatron."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 (it failed, or the system refused something), 2 (wrong command
    line or configuration), 75 (stopped by a signal, can go on), 130 (the same by Ctrl-C) or 141 (nobody reads the
    output). Of `moerl diagnose` 1 and 3 are findings, and every failure is 2."""
    sys.excepthook = _print_traceback
    threading.excepthook = lambda end: _print_traceback(end.exc_type, end.exc_value, end.exc_traceback)
    arguments = list(sys.argv[1:] if argv is None else argv)
    before_torch()
    try:
        return _dispatch(arguments)
    except BrokenPipeError:
        # The reader of our output (`| head`) went away; what is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (MoerlError, OSError) as error:
        if "--traceback" in arguments:
            raise
        _print_error(f"error: {told(error)}", error)
        return 2 if isinstance(error, ConfigError) or arguments[0] == "diagnose" else 1
    except KeyboardInterrupt as error:
        _print_error("interrupted", error)
        return INTERRUPTED


def _print_error(text: str, error: BaseException) -> None:
    # A disk that is full may hold the log, too.
    with contextlib.suppress(OSError):
        print(end="", flush=True)  # in a log of both streams, the rest of stdout would come behind the error
    with contextlib.suppress(OSError):
        print(printable("\n".join([text, *getattr(error, "__notes__", ())])), file=sys.stderr)


def _print_traceback(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Prints a traceback as the interpreter does, but for control characters: the text of a cause may be a server's."""
    if not issubclass(kind, SystemExit):  # a thread may end by one
        print(printable("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"moerl {importlib.metadata.version('moerl')}")
        return 0
    on_directories = {"export": _export, "verify": _verify, "status": _status, "report": _report, "doctor": _doctor}
    on_directories |= {"diagnose": _diagnose, "watch": _watch, "conformance": _conformance, "samples": _samples}
    if arguments[0] in on_directories:
        return on_directories[arguments[0]](arguments[1:])
    family = arguments[0] if arguments[0] in FAMILIES else ""
    if family and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        print(family_overview(family))
        return 2 if len(arguments) == 1 else 0
    words = 2 if family else 1
    command, rest = " ".join(arguments[:words]), arguments[words:]
    if command in SGLANG:
        from moerl.launch import sglang

        return sglang.run(command, rest)
    if command in LAUNCH:
        from moerl.launch.slurm.command import run

        return run(rest)
    if command not in COMMANDS:
        known = [*COMMANDS, *on_directories, *SGLANG, *LAUNCH]
        raise ConfigError(
            "command line: unknown command",
            seen=command,
            expected=" or ".join(members(family)) if family else f"one of {', '.join(known)}",
            remedy=which_command(command, members(family) if family else known, family),
        )
    options = run_parser(command).parse_intermixed_args(rest)
    if options.help:
        print(run_help(command, options.config_dir, all_keys=options.all))
        return 0
    return _plan(command, options) if command in PLANS else _run(command, options)


def _run(command: str, options: argparse.Namespace) -> int:
    started = time.monotonic()
    refuse_other_launchers()
    if command == "train" and options.multirun:
        from moerl.launch.sweeps.command import sweep

        return sweep(options.overrides, options.config_dir, only_show=options.show_config)
    # Commands without checkpoints end at once.
    receiving = stop_signals(for_good=True) if command in ("train", "sft") else nullcontext(StopRequest())
    with receiving as stop, ExitStack() as stack:
        ready = stop.unless_stopped(lambda: _get_ready(command, options, stack))
        if isinstance(ready, int):
            return ready
        if ready is None:
            print("stopped before the run began: the same command starts it", file=sys.stderr)
        elif (status := _run_controller(command, *ready, stop, started)) != STOPPED:
            return status
        # A run that a person ended must not be requeued.
        return INTERRUPTED if stop.signal == "SIGINT" else STOPPED


def _get_ready(command: str, options: argparse.Namespace, stack: ExitStack) -> int | tuple[RunConfig, bool, int]:
    """Prepares a run; a stop signal may end this anywhere. Returns its configuration, whether it is resumed, and the
    lock of its directory, which the stack releases; the exit status if there is nothing to run."""
    from moerl.config.checks import config_notes
    from moerl.config.help_text import recipe_text
    from moerl.config.load import load_config, refuse_taken_run_dir, resolve_auto, split_resume

    overrides, notes = resolve_auto(options.overrides, command=command, config_dir=options.config_dir)
    is_auto, options.overrides = overrides != options.overrides, overrides
    config = load_config(options.overrides, command=command, config_dir=options.config_dir)
    resume = split_resume(options.overrides)[0] is not None
    if options.show_config:
        _show_config(config, options)
        return 0
    lock = stack.enter_context(run_lock(config.run_dir))
    if not resume:
        refuse_taken_run_dir(config)
        print(recipe_text(options.overrides, options.config_dir, COMMANDS[command].keys), flush=True)
    elif is_auto and len(options.overrides) == 1 and is_finished(config.run_dir):
        print(f"the run in {config.run_dir} is finished: nothing to do")
        return 0
    from moerl.config.placement import controller_address
    from moerl.launch.checks.facts import facts_of_train
    from moerl.launch.checks.listed import refuse
    from moerl.launch.servers import listen_for_servers

    for note in [*notes, *config_notes(config)]:
        print(f"note: {note}", file=sys.stderr)
    for note in refuse(facts_of_train(config)):
        print(f"note: {note}", file=sys.stderr)
    listen_for_servers(config.rollout, host=controller_address(config.launch))
    before_cuda(config.trainer.tf32, deterministic=config.trainer.deterministic)
    # The imports take seconds; a stop signal may end them, too.
    for name in MODULES_OF_RUNS:
        importlib.import_module(name)
    return config, resume, lock


def _run_controller(command: str, config: RunConfig, resume: bool, lock: int, stop: StopRequest, started: float) -> int:
    from moerl.orchestration import commands

    try:
        if command in ("rollout", "eval"):
            return commands.run_rollout(config) if command == "rollout" else commands.run_eval(config)
        with stop.within(config.checkpoint.grace_seconds):
            status = commands.run_train(config, resume=resume, stop=stop, started=started, lock=lock)
    except GraceOverError:
        status = STOPPED
    except BaseException as error:  # whatever ended the run
        with contextlib.suppress(OSError):  # the first error tells more
            if not isinstance(error, ConfigError | CheckpointError) and can_go_on(config.run_dir):
                error.add_note(how_to_go_on(command, config.run_dir))
        raise
    if status == STOPPED:
        print(how_to_go_on(command, config.run_dir), file=sys.stderr)
    return status


def _plan(command: str, options: argparse.Namespace) -> int:
    """Prints a plan for `moerl train`; starts nothing."""
    from moerl.config.hub_model import show_model
    from moerl.config.load import load_plan
    from moerl.config.run_memory import GIB, Machine
    from moerl.launch.checks.facts import Facts
    from moerl.launch.plan import plan_memory
    from moerl.launch.plan_weights import GB, PlannedUpdate
    from moerl.weights.estimate import Bandwidths

    config = load_plan(options.overrides, config_dir=options.config_dir)
    if options.show_config:
        _show_config(config, options)
        return 0
    show_model(config.model)
    if command == "plan memory":
        host = None if options.host_memory_gib is None else options.host_memory_gib * GIB
        machine = Machine(options.gpu_memory_gib * GIB, options.gpus_per_node, host_bytes=host)
        return plan_memory(Facts("plan", config, machine))
    bandwidths = Bandwidths(options.gather_gb_per_second * GB, options.engine_gb_per_second * GB)
    if command == "plan weights":
        return PlannedUpdate(config.model, config.parallel, config.weights, config.rollout, bandwidths).show()
    from moerl.launch.plan_run import Device, Workload, plan_run

    device = Device(options.tflops, options.memory_gb_per_second, options.mfu, options.gpu_memory_gib)
    workload = Workload(
        options.mean_tokens,
        round(options.prompt_tokens),
        max(1, round(options.turns)),
        options.tool_seconds,
        round(options.tool_tokens),
    )
    return plan_run(config, run_dir=options.calibrate, device=device, workload=workload, bandwidths=bandwidths)


def _show_config(config: RunConfig, options: argparse.Namespace) -> None:
    """Prints what the recipe sets as comments, and the resolved configuration, which is YAML with them."""
    from moerl.config.help_text import recipe_text
    from moerl.config.load import dump_config, split_resume

    if split_resume(options.overrides)[0] is None:
        print(textwrap.indent(recipe_text(options.overrides, options.config_dir), "# "))
    print(dump_config(config), end="")


def _export(arguments: list[str]) -> int:
    options = export_parser().read(arguments, "moerl export RUN_DIR [--step N] --output DIR")
    if options is None:
        return 0
    from moerl.config.load import check_export

    run_dir, output = options.run_dir.resolve(), options.output.resolve()
    check_export(run_dir, output)
    from moerl.offline.export import run_export

    return run_export(run_dir, options.step, output)


def _conformance(arguments: list[str]) -> int:
    from moerl.launch.conformance import USAGE, checks_of, parser, target_of

    options = parser().read(arguments, USAGE)
    if options is None:
        return 0
    target, checks = target_of(options), checks_of(options.check)
    from moerl.offline.conformance import run_conformance

    return run_conformance(target, checks, prints_json=options.json)


def _doctor(arguments: list[str]) -> int:
    from moerl.launch.doctor.command import doctor

    return doctor(arguments)


def _watch(arguments: list[str]) -> int:
    from moerl.launch.watch import watch

    return watch(arguments)


def _status(arguments: list[str]) -> int:
    from moerl.launch.status import status

    return status(arguments)


def _report(arguments: list[str]) -> int:
    from moerl.launch.report import USAGE, report_parser, run_report

    options = report_parser().read(arguments, USAGE)
    return 0 if options is None else run_report(options)


def _diagnose(arguments: list[str]) -> int:
    from moerl.launch.diagnose import USAGE, check_arguments, diagnose_parser, with_run

    options = diagnose_parser().read(arguments, USAGE)
    if options is None:
        return 0
    check_arguments(options)
    options = with_run(options)
    before_cuda("off")
    print(printable(f"diagnosing {', '.join(map(str, options.dumps))}"), flush=True)
    from moerl.orchestration.diagnose import run_diagnose  # takes seconds

    try:
        return run_diagnose(options)
    except Exception as error:  # process boundary: status 1 would be a fault of the dump
        if isinstance(error, MoerlError | OSError | ModuleNotFoundError) and not options.traceback:
            raise
        _print_traceback(type(error), error, error.__traceback__)
        return 2


def _samples(arguments: list[str]) -> int:
    from moerl.launch.samples import USAGE, parser, run_samples

    options = parser().read(arguments, USAGE)
    return 0 if options is None else run_samples(options)


def _verify(arguments: list[str]) -> int:
    options = verify_parser().read(arguments, "moerl verify DUMP --model HF_DIR [--version N] [--tolerance NATS]")
    if options is None:
        return 0
    from moerl.config.paths import check_verify, dump_files
    from moerl.machine.hub import model_directory

    dump_files(dump := options.dump.resolve())
    model = model_directory(options.model, "--model")
    check_verify(model)
    before_cuda("off")
    from moerl.offline.verify import run_verify

    return run_verify(dump, model, tolerance=options.tolerance, version=options.version)
