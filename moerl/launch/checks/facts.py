"""Facts about a run and the machine that it gets, the same for the checks of every command. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moerl.config.run_memory import Machine
from moerl.config.schema import RunConfig
from moerl.contract.ports import Task
from moerl.launch.checks.gpus import Gpu, usable_gpus
from moerl.machine.memory import host_bytes

Door = Literal["train", "doctor", "dry run", "plan"]
"""Commands by which a run comes in. train: also `moerl sft`, `rollout` and `eval`. dry run: `moerl launch slurm`, with
--dry-run and without. plan: `moerl plan memory`."""
DOORS: tuple[Door, ...] = ("train", "doctor", "dry run", "plan")


@dataclass(slots=True)
class Facts:
    """Facts that checks look at; what runs the checks closes them (`moerl.launch.checks.listed`)."""

    door: Door
    """Command that asks."""
    config: RunConfig
    """Resolved configuration of the run."""
    machine: Machine | None = None
    """Memory and GPUs of all nodes; None = not known."""
    num_gpus: int | None = None
    """GPUs of all nodes; None = not known."""
    num_cores: int | None = None
    """CPU cores of all nodes; None = not known."""
    unknown: str = ""
    """Reason, for people, why the machine or its GPUs are not known."""
    fetches: bool = False
    """True if weights of a model of the hub may be fetched now."""
    container: str = ""
    """Container of the nodes' commands, for people; empty = none."""
    runtime: str = ""
    """Kind of the container: enroot, apptainer or pyxis; empty = none."""
    image: Path | None = None
    """Image of the container if it is a file or folder of the nodes; None = it is fetched, or there is none."""
    shown: tuple[Path, ...] = ()
    """Folders that the container shows at their own place."""
    python: str = ""
    """Interpreter of the nodes, for people; empty = that of this process."""
    as_written: str = ""
    """`rollout.environment` as the user wrote it."""
    node_variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables that the site file sets for the job."""
    grace_seconds: float | None = None
    """Seconds between the signal to stop and the end of the run; None = no limit."""
    disk_bytes: int | None = None
    """Bytes of checkpoints that the disk of the run directory has room for, those that are there included; None = not
    known."""
    disk_rate: float | None = None
    """Bytes per second of one writer at the run directory; None = not measured."""
    _task: Task | None = None

    def task(self) -> Task:
        """Returns the task, which is opened once. Raises `ConfigError` if its data is unusable."""
        if self._task is None:
            self._task = self.config.task.open()
        return self._task

    def note_gpus(self, gpus: Sequence[Gpu] | str, nodes: int = 1) -> None:
        """Notes memory and GPUs of `nodes` machines like this one. gpus: a text says why they cannot be counted."""
        if isinstance(gpus, str):
            self.unknown = f"GPUs cannot be counted: {gpus}"
            return
        smallest = min((gpu.total_mib * 2**20 for gpu in gpus), default=None)
        self.machine = Machine(smallest, len(gpus), nodes, host_bytes())
        self.num_gpus = len(gpus) * nodes

    def close(self) -> None:
        """Closes the task, if it was opened."""
        task, self._task = self._task, None
        if task is not None:
            task.close()


def facts_of_train(config: RunConfig) -> Facts:
    """Returns the facts of a run that starts now, in this process. Asks `nvidia-smi`."""
    facts = Facts("train", config, fetches=True, grace_seconds=config.checkpoint.grace_seconds)
    if config.launch.on == "ray":
        facts.unknown = "the nodes of the Ray cluster are not known before it is met"
    else:
        facts.note_gpus(usable_gpus())
    return facts
