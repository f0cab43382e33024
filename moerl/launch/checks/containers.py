"""Looks at the container of a job, from the machine that submits the job. Torch-free; starts `srun --help` alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moerl.config.hub_model import hub_model
from moerl.config.rollouts import DumpsRolloutConfig
from moerl.errors import ConfigError
from moerl.launch.checks.facts import Facts
from moerl.launch.checks.gpus import last_line
from moerl.launch.checks.inputs import Note, all_of
from moerl.processes.host import run_command

SRUN_SECONDS = 30.0
PYXIS_OPTION = "--container-image"
"""An option of srun that SLURM's plugin pyxis alone adds."""
_HELP = ("srun", "--help")


def has_pyxis(command: Sequence[str] = _HELP) -> bool | str:
    """Returns whether srun has the options of pyxis; a text if srun is not here or does not say it."""
    try:
        done = run_command(command, SRUN_SECONDS)
    except FileNotFoundError:
        return "no srun on this machine"
    except OSError as error:
        return f"srun: {error}"
    if done.returncode != 0:
        return f"srun ended with {done.returncode}: {last_line(done.stdout + done.stderr)}"
    return PYXIS_OPTION in done.stdout


def look_at_container(facts: Facts) -> str | Note:
    """Checks that SLURM has the plugin that a container of pyxis needs, and that the container shows what is read.

    Raises:
        ConfigError: srun has no option of pyxis.
    """
    if not facts.container:
        return "commands run on the nodes themselves"
    pyxis = has_pyxis() if facts.runtime == "pyxis" else True
    if pyxis is False:
        raise ConfigError(
            "container.runtime of the site file: this SLURM has no pyxis",
            seen=f"`srun --help` does not list {PYXIS_OPTION}",
            expected="the plugin pyxis, on the machine that submits the job and on its nodes",
            remedy="set runtime to enroot or apptainer, or ask whoever runs this cluster for pyxis",
        )
    notes = [*_notes(facts, pyxis)]
    return all_of(notes) if notes else f"{facts.container} shows what is read"


def _notes(facts: Facts, pyxis: bool | str) -> Iterator[Note]:
    """Yields what cannot be known of the container from here. pyxis: as `has_pyxis` answers."""
    if isinstance(pyxis, str):
        said = f"cannot be asked for pyxis: {pyxis}"
        yield Note(said, f"`srun --help` with {PYXIS_OPTION}", "run this on a machine of SLURM")
    hidden = [str(path) for path in _read(facts) if not any(path.is_relative_to(each) for each in facts.shown)]
    if hidden:
        yield Note(
            f"no mount of {facts.container} shows {', '.join(hidden)}",
            "what the run reads, and the hub's cache, inside of the container, at the same place",
            "add them to `mounts` of the site file, or set HF_HOME to a folder that is mounted; nothing, if"
            " settings of the cluster mount them",
        )
    if facts.image is not None and not facts.image.exists():
        yield Note(
            f"{facts.image}: cannot be seen from here",
            "the image, at the same place on the nodes",
            "nothing, if the nodes have it; otherwise correct container.image of the site file",
        )


def _read(facts: Facts, environment: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Yields the files and folders, on the node, from which a run reads models, data and dumps, and the hub's cache."""
    config = facts.config
    of_hub = hub_model(config.model)
    if of_hub is not None:
        yield of_hub.folder
    elif config.model.path is not None:
        yield Path(config.model.path).absolute()
    own = [*config.task.files, *(scorer.tokenizer for scorer in config.scorers.values() if scorer.tokenizer)]
    own += [] if config.model.tokenizer is None else [config.model.tokenizer]
    own += [config.rollout.path] if isinstance(config.rollout, DumpsRolloutConfig) else []
    yield from (path.absolute() for path in own)
    if config.task.hub_sets:
        home = environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
        yield Path(environment.get("HF_DATASETS_CACHE") or Path(home) / "datasets").absolute()
