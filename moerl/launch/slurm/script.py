"""The sbatch script of a run, rendered from `templates/slurm/`. Pure but for reading the templates. Torch-free."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moerl.errors import ConfigError
from moerl.launch.checks.room import GRACE_SHARE
from moerl.launch.slurm.attempts import FOLDER
from moerl.launch.slurm.containers import container_start
from moerl.launch.slurm.site import Site
from moerl.machine.shipped import shipped_folder

KILL_SHARE = 0.9
"""Share of the seconds between SLURM's signal and the time limit after which a run that has not ended is killed."""
MIN_SIGNAL_SECONDS = 60
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Settings of one job."""

    name: str
    """Name of the job in SLURM's queue."""
    nodes: int
    """Number of machines; of several, Ray starts the ranks."""
    time: str
    """Time limit of one attempt, as SLURM writes it."""
    signal_seconds: int
    """Seconds before the limit at which SLURM signals the run to stop."""
    max_requeues: int
    """Requeues of the job, in a row, without a new checkpoint, at most."""
    run_dir: Path
    """Directory of the run, absolute."""
    working_dir: Path
    """Folder in which the job was submitted; relative paths start there."""

    @property
    def folder(self) -> Path:
        return self.run_dir / FOLDER

    @property
    def script(self) -> Path:
        return self.folder / "job.sbatch"

    @property
    def output(self) -> str:
        """The batch shell's log; SLURM fills in the job's id."""
        return f"{self.folder}/job-%j.log"

    @property
    def grace_seconds(self) -> int:
        return int(GRACE_SHARE * self.signal_seconds)

    def check(self) -> None:
        """Raises `ConfigError` if a job with these settings cannot be submitted."""
        if limit_seconds(self.time) < 2 * self.signal_seconds or self.signal_seconds < MIN_SIGNAL_SECONDS:
            raise ConfigError(
                "--signal-seconds: no time between start and signal, or between signal and limit",
                seen=f"{self.signal_seconds} s before the end of {self.time}",
                expected=f"at least {MIN_SIGNAL_SECONDS}, and at most half of the time",
                remedy="ask for more --time or change --signal-seconds",
            )
        for what, path in (("run_dir", self.run_dir), ("the current directory", self.working_dir)):
            if not re.fullmatch(r"[\w./+=@,:~-]+", str(path)):
                raise ConfigError(
                    f"{what}: a path that #SBATCH lines cannot hold",
                    seen=path,
                    expected="letters, digits and any of _ . / + = @ , : ~ -",
                    remedy="choose another directory",
                )


def limit_seconds(text: str) -> int:
    """Returns the seconds of a time limit: MINUTES, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises:
        ConfigError: the text is no time limit.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError(
            "--time: not a time limit", seen=text, expected="MINUTES, H:M:S or D-H:M:S", remedy="write 4:00:00"
        )
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"]:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = [[0, *parts, 0], [0, *parts], parts][len(parts) - 1]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def render(job: JobSettings, site: Site, overrides: Sequence[str]) -> str:
    """Returns the script.

    Args:
        overrides: arguments of `moerl train`, `run_dir` and the grace time included, `resume` left out.

    Raises:
        ConfigError: the container cannot mount a folder.
    """
    return _render(
        "train.sbatch.j2" if job.nodes == 1 else "train_ray.sbatch.j2",
        site,
        folders_of_job(job),
        options=_options(job, site),
        run_dir=job.run_dir,
        max_requeues=job.max_requeues,
        kill_seconds=int(KILL_SHARE * job.signal_seconds),
        has_gpus=site.node_gpus != 0,
        gpus_per_node=site.gpus_per_node,
        num_nodes=job.nodes,
        overrides=overrides,
    )


def folders_of_job(job: JobSettings) -> list[Path]:
    """Returns folders that a container has to show at their own place. Processes of Ray on a node meet in its /tmp, of
    which each container of enroot has one of its own."""
    return [job.working_dir, job.run_dir, *([Path("/tmp")] if job.nodes > 1 else [])]


def render_report(sweep_dir: Path, site: Site) -> str:
    """Returns the script of the job that runs after those of a sweep: it notes how they ended, and writes the page."""
    options = [
        f"--job-name=report-{sweep_dir.name}",
        "--nodes=1",
        "--ntasks=1",
        "--time=10",
        f"--output={sweep_dir}/report-%j.log",
        *_asked(site),
        *_more_options(site),
    ]
    return _render("sweep_report.sbatch.j2", site, [Path.cwd(), sweep_dir], options=options, sweep_dir=sweep_dir)


def _render(template: str, site: Site, folders: Sequence[Path], **values: object) -> str:
    """Renders a template. folders: folders that a container shows; commands run in the first."""
    environment = Environment(
        loader=FileSystemLoader(shipped_folder("templates") / "slurm"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["quote"] = _quote
    return environment.get_template(template).render(
        modules=site.modules,
        environment=site.environment,
        commands=container_start(site.container, [*site.environment], folders),
        python=site.python or ("python" if site.container else sys.executable),
        **values,
    )


def _quote(value: object) -> str:
    """Quotes a word as a shell needs it; one with a comma, too, which looks like a mistake in a list of words."""
    text = str(value)
    return f"'{text}'" if (quoted := shlex.quote(text)) == text and "," in text else quoted


def _options(job: JobSettings, site: Site) -> list[str]:
    """Returns the options of #SBATCH lines."""
    gres = site.gres or (f"gpu:{site.gpus_per_node}" if site.gpus_per_node else None)
    return [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--time={job.time}",
        # To the batch shell (B), not to steps.
        f"--signal=B:USR1@{job.signal_seconds}",
        "--requeue",
        "--open-mode=append",
        f"--chdir={job.working_dir}",
        f"--output={job.output}",
        *_asked(site, gres=gres, cpus_per_task=site.cpus_per_node, mem=site.memory),
        *(["--exclusive"] if site.cpus_per_node is None else []),
        *_more_options(site),
    ]


def _asked(site: Site, **more: object) -> list[str]:
    """Returns those options of a site, and of `more`, that have a value."""
    asked = {"partition": site.partition, "account": site.account, "qos": site.qos, **more}
    return [f"--{name.replace('_', '-')}={value}" for name, value in asked.items() if value is not None]


def _more_options(site: Site) -> list[str]:
    # sbatch reads the words of these lines as a shell does.
    return [re.sub(r"=(.*\s.*)$", r'="\1"', option) for option in site.sbatch]
