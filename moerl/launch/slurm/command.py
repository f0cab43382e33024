"""`moerl launch slurm`: a run as a job of SLURM, shown with its plan or submitted. Torch-free; a login node."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path

from rich.console import Console

from moerl.config.checks import config_notes
from moerl.config.command_texts import LAUNCH_SLURM
from moerl.config.load import CONFIG_FILE, dump_config, load_config
from moerl.config.model_tensors import check_model
from moerl.config.recipes import recipe_text
from moerl.config.rollouts import EmbeddedRolloutConfig, SGLangRolloutConfig
from moerl.config.schema import RunConfig
from moerl.errors import ConfigError, MoerlError
from moerl.launch.arguments import Parser, short_help
from moerl.launch.calibration import Device
from moerl.launch.plan import plan_memory
from moerl.launch.plan_run import Workload, plan_run
from moerl.launch.plan_weights import GB, plan_weights
from moerl.launch.slurm.attempts import MAX_REQUEUES
from moerl.launch.slurm.script import JobSettings, render
from moerl.launch.slurm.site import Site, load_site
from moerl.weights.estimate import Bandwidths

SUBMIT_SECONDS = 120.0


USAGE = "moerl launch slurm --time LIMIT [options] [GROUP=OPTION ...] [KEY=VALUE ...]"


def run(arguments: list[str]) -> int:
    """Exit status of the command, or of its help."""
    made = parser()
    if {"-h", "--help"} & set(arguments):
        print(short_help(USAGE, LAUNCH_SLURM, made))
        return 0
    return launch_slurm(made.parse_intermixed_args(arguments))


def parser() -> Parser:
    made = Parser(prog="moerl launch slurm", add_help=False)
    made.takes_keys = True
    add = made.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE")
    add("--time", metavar="LIMIT", help="time limit of one attempt, as SLURM writes it: 4:00:00")
    add("--nodes", type=int, default=1, metavar="N", help="machines, 1")
    add("--site", type=Path, metavar="FILE", help="YAML file with what this site's SLURM asks for")
    add("--name", metavar="NAME", help="of the job; that of the run directory if not said")
    add("--signal-seconds", type=int, default=300, metavar="S", help="before the limit, when the run must stop, 300")
    add(
        "--max-requeues",
        type=int,
        default=MAX_REQUEUES,
        metavar="N",
        help=f"in a row without a new checkpoint, {MAX_REQUEUES}",
    )
    add("--dry-run", action="store_true", help="show script, configuration, nodes and plans; submit nothing")
    add("--config-dir", type=Path, metavar="DIR", help="directory with config groups of your own")
    add("--traceback", action="store_true", help="show where an error was raised")
    add("-h", "--help", action="store_true", help="show this text")
    return made


def launch_slurm(options: argparse.Namespace) -> int:
    """Submits the run, or shows what would be submitted; exit status 0.

    Raises:
        ConfigError: configuration, site or job are wrong, or SLURM refuses the job.
        MoerlError: SLURM did not answer.
    """
    site, overrides = load_site(options.site), list(options.overrides)
    _refuse_resume(overrides)
    config = load_config(overrides, command="train", config_dir=options.config_dir)
    if config.model.path is not None:
        check_model(config.model.path)
    job = _job(options, config)
    job.check()
    _refuse_many_nodes(job)
    _check_devices(config, site, job)
    script = render(job, site, _overrides(options, config, job))
    for note in config_notes(config):
        print(f"note: {note}")
    if options.dry_run:
        _show(options, config, job, site, script)
        return 0
    _submit(job, script)
    return 0


def _refuse_resume(overrides: list[str]) -> None:
    given = [text for text in overrides if text.startswith("resume=")]
    if given:
        raise ConfigError(
            "resume: a job goes on by itself with the run in its run directory",
            seen=given[0],
            expected="run_dir=DIR",
            remedy="give the run's directory as run_dir=DIR, with the recipe and keys that it was started with",
        )


def _job(options: argparse.Namespace, config: RunConfig) -> JobSettings:
    if options.time is None or options.nodes < 1 or options.max_requeues < 0:
        raise ConfigError(
            "launch slurm: --time is missing, or a number is too small",
            seen=f"--time {options.time}, --nodes {options.nodes}, --max-requeues {options.max_requeues}",
            expected="a time limit, 1 node or more, 0 requeues or more",
            remedy="add for example --time 4:00:00",
        )
    name = options.name or config.run_dir.name
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
        run_dir=config.run_dir,
        working_dir=Path.cwd(),
    )


def _refuse_many_nodes(job: JobSettings) -> None:
    if job.nodes > 1:
        raise ConfigError(
            "--nodes: a run of this version has all its ranks and servers on one machine",
            seen=job.nodes,
            expected="--nodes 1",
            remedy="take --nodes 1; servers on other machines can be jobs of their own (scripts/slurm/servers.sbatch,"
            " rollout=sglang_server)",
        )


def _devices(config: RunConfig) -> tuple[int, int]:
    """Devices of the trainer, and of servers that the run starts."""
    rollout = config.rollout
    servers = rollout.servers * rollout.tensor if isinstance(rollout, SGLangRolloutConfig) else 0
    return config.parallel.world_size, servers


def _check_devices(config: RunConfig, site: Site, job: JobSettings) -> None:
    trainer, servers = _devices(config)
    there = site.gpus_per_node * job.nodes
    if site.gpus_per_node and trainer + servers > there:
        raise ConfigError(
            "the run needs more GPUs than the job has",
            seen=f"{trainer} of the trainer and {servers} of servers",
            expected=f"at most {there}: {job.nodes} nodes with gpus_per_node {site.gpus_per_node}",
            remedy="change parallel, rollout.servers or rollout.tensor, or the site",
        )


def _overrides(options: argparse.Namespace, config: RunConfig, job: JobSettings) -> list[str]:
    """What `moerl train` is given: run directory and grace time are named, so that each attempt has the same."""
    given = [text for text in options.overrides if not text.startswith("run_dir=")]
    if config.checkpoint.grace_seconds is None:
        given.append(f"checkpoint.grace_seconds={job.grace_seconds}")
    elif config.checkpoint.grace_seconds > job.grace_seconds:
        raise ConfigError(
            "checkpoint.grace_seconds: the job would reach its time limit first, and SLURM requeues no such job",
            seen=config.checkpoint.grace_seconds,
            expected=f"at most {job.grace_seconds}, 80 % of --signal-seconds",
            remedy="leave it away, or give more --signal-seconds",
        )
    folder = [] if options.config_dir is None else ["--config-dir", str(options.config_dir.resolve())]
    return [*folder, *given, f"run_dir='{config.run_dir}'"]


def _show(options: argparse.Namespace, config: RunConfig, job: JobSettings, site: Site, script: str) -> None:
    console = Console(soft_wrap=True, highlight=False)

    def head(text: str) -> None:
        console.rule(text, align="left", style="none")

    head(f"script, {job.script} once submitted")
    print(script)
    head("configuration")
    print(recipe_text(options.overrides, options.config_dir))
    print(dump_config(config))
    head("nodes")
    print(_roles(config))
    head("memory")
    plan_memory(config, gpu_memory_gib=site.gpu_memory_gib)
    bandwidths = Bandwidths(50.0 * GB, 50.0 * GB)
    head("bytes of a weight update")
    plan_weights(config, bandwidths)
    head("time of a step, on H100s (other devices and lengths: moerl plan run)")
    plan_run(
        config, run_dir=None, device=Device(989.0, 3350.0, 0.3), workload=Workload(4096.0, 512), bandwidths=bandwidths
    )


def _roles(config: RunConfig) -> str:
    """What runs where."""
    trainer, _ = _devices(config)
    rollout = config.rollout
    if isinstance(rollout, EmbeddedRolloutConfig):
        engines = f"the embedded engine, {rollout.placement}"
    elif isinstance(rollout, SGLangRolloutConfig):
        engines = f"{rollout.servers} SGLang servers of {rollout.tensor} devices"
    else:
        engines = f"no engine: {rollout.num_servers} servers run elsewhere"
    ranks = "rank 0" if trainer == 1 else f"ranks 0 to {trainer - 1}"
    return f"node 1: the controller, trainer {ranks}, {engines}"


def _submit(job: JobSettings, script: str) -> None:
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "launch slurm: SLURM is not on this machine",
            seen="no sbatch",
            expected="a login node of the cluster",
            remedy="run it there; --dry-run shows the script anywhere",
        )
    job.folder.mkdir(parents=True, exist_ok=True)
    job.script.write_text(script, encoding="utf-8")
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(job.script)],
            capture_output=True,
            text=True,
            timeout=SUBMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MoerlError(
            "sbatch did not answer",
            seen=f"nothing within {SUBMIT_SECONDS:g} s",
            expected="the id of a job",
            remedy="look with `squeue --me` whether it was submitted, before you try again",
        ) from error
    if done.returncode != 0:
        raise ConfigError(
            "SLURM refused the job",
            seen=done.stderr.strip() or f"sbatch ended with status {done.returncode}",
            expected="a job that this site takes",
            remedy=f"correct --site, --time or --nodes; the script is {job.script}",
        )
    job_id = done.stdout.strip().partition(";")[0]
    goes_on = "goes on" if (job.run_dir / CONFIG_FILE).exists() else "starts"
    print(f"job            {job_id}, which {goes_on} with `moerl train` on {job.nodes} node{'s' * (job.nodes > 1)}")
    print(f"run directory  {job.run_dir}")
    print(f"logs           {job.output.replace('%j', job_id)} and {job.folder}/attempt-NNN.log")
    print(f"watch it       moerl watch {job.run_dir}")
    print(f"end it         scancel {job_id}; to commit, and go on in the queue: scancel --batch --signal=USR1 {job_id}")
