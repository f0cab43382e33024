"""`moerl launch slurm`: a run as a job of SLURM, shown with its plan or submitted. Torch-free; a login node."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from moerl.config.checks import config_notes
from moerl.config.compose import compose_values
from moerl.config.help_text import recipe_text
from moerl.config.hub_model import show_model
from moerl.config.load import CONFIG_FILE, dump_config, load_config, stored_run
from moerl.config.rollouts import EmbeddedRolloutConfig, RolloutConfig, SGLangRolloutConfig
from moerl.config.schema import LaunchConfig
from moerl.errors import ConfigError
from moerl.launch.arguments import Parser
from moerl.launch.checks.facts import Facts
from moerl.launch.checks.listed import refuse
from moerl.launch.plan import plan_memory
from moerl.launch.plan_run import Device, Workload, plan_run
from moerl.launch.plan_weights import GB, PlannedUpdate
from moerl.launch.run_lock import run_lock
from moerl.launch.slurm.attempts import MAX_REQUEUES
from moerl.launch.slurm.facts import facts_of_job, machine_of_job
from moerl.launch.slurm.script import JobSettings, render, render_report
from moerl.launch.slurm.site import Site, load_site
from moerl.launch.slurm.submit import latest_job, queued_jobs, refuse_queued, submit, submit_file
from moerl.launch.slurm.sweeps import note_states
from moerl.launch.sweeps.command import check_runs, plan_sweep, read_options
from moerl.launch.sweeps.manifest import Manifest, write_manifest
from moerl.launch.sweeps.sweep import overrides_of
from moerl.weights.estimate import Bandwidths

USAGE = "moerl launch slurm --time LIMIT [options] [GROUP=OPTION ...] [KEY=VALUE ...]"


def run(arguments: list[str]) -> int:
    """Runs the command, or prints its help; returns the exit status."""
    options = parser().read(arguments, USAGE)
    if options is None:
        return 0
    return launch_sweep(options) if options.multirun else launch_slurm(options)


def parser() -> Parser:
    """Makes the parser of the command."""
    made = Parser("launch slurm", takes_keys=True)
    add = made.add_argument
    add("-m", "--multirun", action="store_true", help="a sweep: a job for each value of key=a,b")
    add("--time", metavar="LIMIT", help="time limit of one attempt, as SLURM writes it: 4:00:00")
    add("--nodes", type=int, default=1, metavar="N", help="machines, 1")
    add("--site", type=Path, metavar="FILE", help="YAML file with what this site's SLURM asks for")
    add("--name", metavar="NAME", help="of the job; that of the run directory if not said")
    add("--signal-seconds", type=int, default=300, metavar="S", help="before the limit, when the run must stop, 300")
    requeues = f"in a row without a new checkpoint, {MAX_REQUEUES}"
    add("--max-requeues", type=int, default=MAX_REQUEUES, metavar="N", help=requeues)
    add("--dry-run", action="store_true", help="show script, configuration, nodes and plans; submit nothing")
    add("--config-dir", type=Path, metavar="DIR", help="directory with config groups of your own")
    return made


def launch_slurm(options: argparse.Namespace) -> int:
    """Submits the run, or shows what would be submitted; returns exit status 0.

    Raises:
        ConfigError: configuration, site or job are wrong, or SLURM refuses the job.
        MoerlError: SLURM did not answer.
    """
    site = load_site(options.site)
    given = [text for text in options.overrides if text.startswith("resume=")]
    if given:
        raise ConfigError(
            "resume: a job goes on by itself with the run in its run directory",
            seen=given[0],
            expected="run_dir=DIR",
            remedy="give the run's directory as run_dir=DIR, with the recipe and keys that it was started with",
        )
    facts, job, script, notes = _prepare(options, site, options.overrides)
    for note in notes:
        print(f"note: {note}")
    if options.dry_run:
        _show(options, facts, job, site, script)
        return 0
    refuse_queued(job.run_dir, queued_jobs())
    number = submit(job, script)
    goes_on = "goes on" if (job.run_dir / CONFIG_FILE).exists() else "starts"
    print(f"job            {number}, which {goes_on} with `moerl train` on {job.nodes} node{'s' * (job.nodes > 1)}")
    print(f"run directory  {job.run_dir}")
    print(f"logs           {job.output.replace('%j', number)} and {job.folder}/attempt-NNN.log")
    print(f"watch it       moerl watch {job.run_dir}")
    print(f"end it         scancel {number}; to commit, and go on in the queue: scancel --batch --signal=USR1 {number}")
    return 0


def launch_sweep(options: argparse.Namespace) -> int:
    """Submits the runs of a sweep that are neither finished nor in the queue, and a job for the report after all of
    them; returns exit status 0.

    Raises:
        ConfigError, MoerlError: as `launch_slurm`, of any run, before a job is submitted.
    """
    site, asked = load_site(options.site), read_options(options.overrides)
    manifest, folder = plan_sweep(asked, options.config_dir)
    options.config_dir = None if manifest.config_dir is None else Path(manifest.config_dir)
    check_runs(manifest, looks_at_packages=False)
    if options.name is not None:
        raise ConfigError("--name: jobs of a sweep are named as its runs", seen=options.name, remedy="leave it away")
    prepared: list[tuple[JobSettings, str]] = []
    notes: dict[str, list[str]] = {}
    for run in manifest.runs:
        _, job, script, of_run = _prepare(options, site, overrides_of(run, manifest, folder))
        prepared.append((job, script))
        for note in of_run:
            notes.setdefault(note, []).append(run.name)
    for note, names in notes.items():
        print(f"note: {note}" + ("" if len(names) == len(manifest.runs) else f" ({', '.join(names)})"))
    if options.dry_run:
        for job, script in prepared:
            print(f"# {job.script}\n{script}")
        return 0
    with run_lock(folder):
        _submit_sweep(manifest, folder, prepared, site, asked.jobs or len(manifest.runs))
    return 0


def _submit_sweep(
    manifest: Manifest, folder: Path, prepared: Sequence[tuple[JobSettings, str]], site: Site, jobs: int
) -> None:
    queued = queued_jobs()
    note_states(manifest, folder, queued)
    numbers: list[str] = []
    for run, (job, script) in zip(manifest.runs, prepared, strict=True):
        before, number = latest_job(job.run_dir), None
        if run.state == "finished":
            print(f"{run.name}: was finished before")
        elif before is not None and before in queued:
            print(f"{run.name}: job {before} waits or runs")
            number = before
        else:
            # `jobs` at a time: each begins when the one that is `jobs` places before it has ended.
            number = submit(job, script, after=numbers[-jobs:][:1] if len(numbers) >= jobs else ())
            run.state, run.status = "waiting", None
            print(f"{run.name}: job {number}")
        numbers += [] if number is None else [number]
        write_manifest(manifest, folder)
    script = folder / "report.sbatch"
    script.write_text(render_report(folder, site), encoding="utf-8")
    after = submit_file(script, after=numbers)
    print(f"report: job {after}, after all others; {folder}/report.html and report-{after}.log")
    print(f"again, for runs that did not finish: the same line, or sweep.dir={shlex.quote(str(folder))} alone")


def _prepare(
    options: argparse.Namespace, site: Site, overrides: Sequence[str]
) -> tuple[Facts, JobSettings, str, list[str]]:
    """Returns the facts of one run, its job, the script and notes. Raises as `launch_slurm`."""
    before = stored_run(overrides)
    known = None if before is None else before.model
    # The job may have another interpreter: packages are looked at with the facts of the job.
    config = load_config(
        overrides, command="train", config_dir=options.config_dir, known_model=known, looks_at_packages=False
    )
    show_model(config.model)
    job = _job(options, config.run_dir)
    job.check()
    _check_nodes(job, config.launch)
    written = str(compose_values(overrides, config_dir=options.config_dir)["rollout"].get("environment", ""))
    keys = _overrides(options, overrides, job, config.checkpoint.grace_seconds)
    if isinstance(config.rollout, SGLangRolloutConfig) and not Path(written).is_absolute():
        # A relative path is one of this directory, whichever directory the job starts in.
        keys = [text for text in keys if not text.startswith("rollout.environment=")]
        keys.append(f"rollout.environment='{config.rollout.environment}'")
    # Nothing large is fetched for a look.
    facts = facts_of_job(config, job, site, written, fetches=not options.dry_run)
    return facts, job, render(job, site, keys), [*config_notes(config), *refuse(facts)]


def _job(options: argparse.Namespace, run_dir: Path) -> JobSettings:
    if options.time is None or options.nodes < 1 or options.max_requeues < 0:
        raise ConfigError(
            "launch slurm: --time is missing, or a number is too small",
            seen=f"--time {options.time}, --nodes {options.nodes}, --max-requeues {options.max_requeues}",
            expected="a time limit, 1 node or more, 0 requeues or more",
            remedy="add for example --time 4:00:00",
        )
    name = options.name or run_dir.name
    if not re.fullmatch(r"[\w.+-]{1,128}", name):
        raise ConfigError(
            "--name: not a name of a job", seen=name, expected="letters, digits and any of _ . + -", remedy="add --name"
        )
    return JobSettings(
        name=name,
        nodes=options.nodes,
        time=options.time,
        signal_seconds=options.signal_seconds,
        max_requeues=options.max_requeues,
        run_dir=run_dir,
        working_dir=Path.cwd(),
    )


def _check_nodes(job: JobSettings, launch: LaunchConfig) -> None:
    if launch.address is not None:
        raise ConfigError(
            "launch.address: the job starts a Ray cluster of its own",
            seen=launch.address,
            expected="no address",
            remedy="leave it away, or start `moerl train` on a node of that cluster",
        )
    if job.nodes > 1 and launch.on != "ray":
        raise ConfigError(
            "--nodes: without Ray all ranks and servers of a run are on one machine",
            seen=f"{job.nodes} nodes, launch.on={launch.on}",
            expected="launch.on=ray, or --nodes 1",
            remedy="add launch.on=ray: the trainer's ranks are then spread over the nodes",
        )


def _overrides(
    options: argparse.Namespace, overrides: Sequence[str], job: JobSettings, grace_seconds: float | None
) -> list[str]:
    """Returns the arguments of `moerl train`. They name the run directory, and the grace time if the configuration has
    none, so that each attempt has the same. Raises `ConfigError` if the grace time is too long for the job."""
    given = [text for text in overrides if not text.startswith("run_dir=")]
    if grace_seconds is None:
        given.append(f"checkpoint.grace_seconds={job.grace_seconds}")
    elif grace_seconds > job.grace_seconds:
        raise ConfigError(
            "checkpoint.grace_seconds: the job would reach its time limit first, and SLURM requeues no such job",
            seen=grace_seconds,
            expected=f"at most {job.grace_seconds}, 80 % of --signal-seconds",
            remedy="leave it away, or give more --signal-seconds",
        )
    folder = [] if options.config_dir is None else ["--config-dir", str(options.config_dir.resolve())]
    return [*folder, *given, f"run_dir='{job.run_dir}'"]


def _show(options: argparse.Namespace, facts: Facts, job: JobSettings, site: Site, script: str) -> None:
    config = facts.config
    console = Console(soft_wrap=True, highlight=False)

    def head(text: str) -> None:
        console.rule(text, align="left", style="none")

    head(f"script, {job.script} once submitted")
    print(script)
    head("configuration")
    print(recipe_text(options.overrides, options.config_dir))
    print(dump_config(config))
    head("nodes")
    print(_roles(config.parallel.world_size, config.rollout, job.nodes))
    head("memory")
    plan_memory(Facts("plan", config, machine_of_job(job, site)))
    bandwidths = Bandwidths(50.0 * GB, 50.0 * GB)
    head("bytes of a weight update")
    PlannedUpdate(config.model, config.parallel, config.weights, config.rollout, bandwidths).show()
    head("time of a step, on H100s (other devices and lengths: moerl plan run)")
    plan_run(
        config,
        run_dir=None,
        device=Device(989.0, 3350.0, 0.3, site.gpu_memory_gib),
        workload=Workload(4096.0, 512),
        bandwidths=bandwidths,
    )


def _roles(trainer: int, rollout: RolloutConfig, nodes: int) -> str:
    """Says which processes run on which nodes. trainer: number of its ranks."""
    if isinstance(rollout, EmbeddedRolloutConfig):
        engines = f"the embedded engine, {rollout.placement}"
    elif isinstance(rollout, SGLangRolloutConfig):
        where = ", which the trainer has, too" if rollout.is_colocated else ""
        engines = f"{rollout.servers} SGLang servers of {rollout.tensor} devices{where}"
    else:
        engines = f"no engine: {rollout.num_servers} servers run elsewhere"
    ranks = "rank 0" if trainer == 1 else f"ranks 0 to {trainer - 1}"
    if nodes == 1:
        return f"node 1: the controller, trainer {ranks}, {engines}"
    spread = f"nodes 1 to {nodes}, by Ray: trainer {ranks}, the first node full first"
    if isinstance(rollout, SGLangRolloutConfig):
        return f"node 1: the controller\n{spread}; {engines}"
    return f"node 1: the controller, {engines}\n{spread}"
