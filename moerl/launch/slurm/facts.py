"""Facts about a job that a login node knows before it is submitted: from the site file and the disk. Torch-free."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from moerl.config.run_memory import GIB, Machine
from moerl.config.schema import RunConfig
from moerl.errors import ConfigError
from moerl.launch.checks.facts import Facts
from moerl.launch.doctor.machine import disk_rate, existing, room_for_checkpoints
from moerl.launch.slurm.containers import shown_folders
from moerl.launch.slurm.script import JobSettings, folders_of_job
from moerl.launch.slurm.site import Site

_MEMORY = re.compile(r"(?P<number>\d+)(?P<unit>[KMGT]?)B?", re.IGNORECASE)
_UNITS = {"K": 2**10, "": 2**20, "M": 2**20, "G": 2**30, "T": 2**40}


def facts_of_job(config: RunConfig, job: JobSettings, site: Site, written: str, *, fetches: bool) -> Facts:
    """Returns the facts of a job. Writes a file near the run directory to measure the disk, and removes it.

    Args:
        written: `rollout.environment` as the user wrote it.
        fetches: weights of a model of the hub may be fetched now.

    Raises:
        ConfigError: the file cannot be written, `memory` of the site file is no size, or the container cannot mount a
            folder.
    """
    try:
        rate = disk_rate(existing(job.run_dir))
    except OSError as error:
        raise ConfigError(
            "run_dir: cannot be written",
            seen=f"{job.run_dir}: {error.strerror or error}",
            expected="a directory that this user may write to, on a disk with room",
            remedy="give run_dir=DIR on another disk, or make room",
        ) from error
    grace = config.checkpoint.grace_seconds
    return Facts(
        "dry run",
        config,
        machine_of_job(job, site),
        num_gpus=None if site.node_gpus is None else site.node_gpus * job.nodes,
        num_cores=None if site.cpus_per_node is None else site.cpus_per_node * job.nodes,
        unknown="gpus_per_node of the site file does not say how many",
        fetches=fetches,
        container="" if site.container is None else f"the container {site.container.image}",
        runtime="" if site.container is None else site.container.runtime,
        # An image of a registry has no place.
        image=Path(site.container.image) if site.container and site.container.image.startswith("/") else None,
        shown=() if site.container is None else shown_folders(site.container, folders_of_job(job)),
        python="" if site.python in (None, sys.executable) else f"{site.python} on the node",
        as_written=written,
        node_variables=site.environment,
        grace_seconds=job.grace_seconds if grace is None else grace,
        disk_bytes=room_for_checkpoints(job.run_dir),
        disk_rate=rate,
    )


def machine_of_job(job: JobSettings, site: Site) -> Machine:
    """Returns the memory that a job gets: of GPUs if the site asks for any, of nodes if the site says it."""
    host = None if site.memory is None else memory_bytes(site.memory)
    gpu_bytes = None if site.node_gpus == 0 else site.gpu_memory_gib * GIB
    return Machine(gpu_bytes, site.node_gpus or 0, job.nodes, host)


def memory_bytes(text: str) -> int | None:
    """Returns the bytes of a size as SLURM writes it, in MiB without a unit; None for 0, which means all of a node.

    Raises:
        ConfigError: the text is no size.
    """
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise ConfigError(
            "memory of the site file: no size", seen=text, expected="a number with K, M, G or T", remedy="write 200G"
        )
    return int(match["number"]) * _UNITS[match["unit"].upper()] or None
