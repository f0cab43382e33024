"""Looks at what a run has room and time for: devices, memory of GPUs, servers and hosts, time of a checkpoint."""

from __future__ import annotations

import math

from moerl.config.architecture import describe_model
from moerl.config.checks import LARGE_MODEL_PARAMETERS
from moerl.config.ranks import RankConfig, cluster_cpus
from moerl.config.rollout_checks import check_nodes_of_servers
from moerl.config.rollouts import SGLangRolloutConfig
from moerl.config.run_memory import HOST, check_host, check_server, checkpoint_bytes, gib, gpu_problem, places
from moerl.errors import ConfigError
from moerl.launch.checks.facts import Facts
from moerl.launch.checks.inputs import Note, all_of
from moerl.machine.memory import total_parameters

LEAST_HOST_BYTES = 8 * 2**30
"""Memory that every node has."""
SPARE_SHARE = 1.5
"""Room on the disk, as a multiple of the checkpoints, under which there is a note."""
GRACE_SHARE = 0.8
"""Share of the seconds between SLURM's signal and the time limit that a run gets to commit."""


def look_at_devices(facts: Facts) -> str | Note:
    """Counts GPUs of ranks and servers. On CPUs a run with too few cores works, and is slow."""
    config, gpus = facts.config, facts.num_gpus
    trainer = _ranks(facts)
    servers = config.rollout.own_devices if isinstance(config.rollout, SGLangRolloutConfig) else 0
    needed, text = trainer + servers, f"{trainer} ranks of the trainer, {servers} devices of servers"
    if gpus is None:
        return _unknown(facts, f"{text}; GPUs are not known here" + (f": {facts.unknown}" if facts.unknown else ""))
    if gpus:
        if needed > gpus:
            raise ConfigError(
                "the run needs more GPUs than it gets",
                seen=f"{gpus} GPUs for {text}",
                expected=f"{needed} GPUs",
                remedy="change parallel, rollout.servers or rollout.tensor, or take more GPUs",
            )
        config.trainer.check_for_gpus()
        return f"{gpus} GPUs for {text}"
    if config.launch.on == "ray" and facts.door == "dry run" and facts.num_cores is not None:
        asked = cluster_cpus(RankConfig.of(config))
        # Actors would wait for ever: a cluster of Ray gives each core to one of them.
        if asked > facts.num_cores:
            raise ConfigError(
                "launch.on=ray: ranks and engines ask for more cores than the job's nodes give Ray",
                seen=f"{facts.num_cores} cores (cpus_per_node of the site file, times nodes)",
                expected=f"at least {asked} cores",
                remedy="raise cpus_per_node, take more nodes, or lower num_threads, parallel or rollout.servers",
            )
    notes: list[Note] = []
    if facts.num_cores is not None and needed > facts.num_cores:
        few = f"{facts.num_cores} cores for {text}"
        notes.append(Note(few, f"{needed} cores", "take fewer ranks, or a machine with more cores"))
    if facts.door == "dry run" and total_parameters(describe_model(config.model)) >= LARGE_MODEL_PARAMETERS:
        large = f"{text}, on CPUs, with a model of billions of parameters"
        remedy = "set gpus_per_node in the site file (--site), as examples/slurm_one_node shows"
        notes.append(Note(large, "GPUs", remedy))
    return all_of(notes) if notes else f"{text}, on CPUs"


def look_at_nodes(facts: Facts) -> str | Note:
    """Checks that each server finds its GPUs on one node."""
    rollout, machine = facts.config.rollout, facts.machine
    if not isinstance(rollout, SGLangRolloutConfig):
        return "the run starts no SGLang servers"
    if machine is None:
        return _unknown(facts, f"not known here: {facts.unknown}")
    if machine.gpu_bytes is None or not machine.gpus_per_node:
        return "the run is on CPUs" if machine.gpu_bytes is None else "GPUs of a node are not known here"
    # `moerl plan memory` does not know how many nodes there are.
    nodes = None if facts.door == "plan" else machine.nodes
    ranks = facts.config.parallel.world_size if rollout.is_colocated else _ranks(facts)
    check_nodes_of_servers(rollout, ranks=ranks, gpus_per_node=machine.gpus_per_node, nodes=nodes)
    return f"{rollout.servers} servers of {rollout.tensor} GPUs, each on one node of {machine.gpus_per_node}"


def look_at_gpus(facts: Facts) -> str | Note:
    """Compares the fullest GPU of a rank with its memory."""
    if facts.machine is None:
        return _unknown(facts, f"not known here: {facts.unknown}")
    if facts.machine.gpu_bytes is None:
        return "the run is on CPUs"
    if problem := gpu_problem(facts.config, facts.machine):
        raise problem
    return "; ".join(describe_places(facts, hosts=False)) or "the run has no GPU"


def look_at_server(facts: Facts) -> str | Note:
    """Compares a server's share of a GPU with its weights and cache."""
    if not isinstance(facts.config.rollout, SGLangRolloutConfig):
        return "the run starts no SGLang servers"
    if facts.machine is None:
        return _unknown(facts, f"not known here: {facts.unknown}")
    limit, expected = check_server(facts.config, facts.machine), "room for all that run side by side"
    return expected if limit is None else Note(limit[0], expected, limit[1])


def look_at_hosts(facts: Facts) -> str | Note:
    """Compares the memory that the run needs on the fullest host with that host's memory."""
    if facts.machine is None:
        return _unknown(facts, f"not known here: {facts.unknown}")
    check_host(facts.config, facts.machine)
    lines = "; ".join(describe_places(facts, hosts=True))
    is_large = places(facts.config, facts.machine)[-1].peak_bytes > LEAST_HOST_BYTES
    if facts.door == "dry run" and facts.machine.host_bytes is None and is_large:
        return Note(
            lines,
            "the memory of a node, to compare with",
            "set memory in the site file (--site); nothing, if nodes have it: the job's `moerl doctor` looks",
        )
    return lines


def look_at_disk(facts: Facts) -> str | Note:
    """Compares the checkpoints that are kept, and one that is being written, with the room on the disk."""
    if facts.disk_bytes is None:
        return _unknown(facts, "the disk cannot be seen from here")
    count = facts.config.checkpoint.keep + 1
    needed = checkpoint_bytes(facts.config) * count
    seen = f"{gib(facts.disk_bytes)} free or in checkpoints that are replaced, at {facts.config.run_dir}"
    expected = f"{gib(needed)} for {count} checkpoints: those that are kept and one more"
    remedy = "make room, choose run_dir on another disk, or keep fewer (checkpoint.keep)"
    if facts.disk_bytes < needed and facts.door == "dry run" and not facts.fetches:
        # This machine may be none of the cluster's.
        return Note(seen, expected, f"{remedy}; a job is not submitted otherwise")
    if facts.disk_bytes < needed:
        raise ConfigError("run_dir: checkpoints do not fit the disk", seen=seen, expected=expected, remedy=remedy)
    if facts.disk_bytes < SPARE_SHARE * needed:
        return Note(seen, f"{SPARE_SHARE:g} times {expected}, for dumps, the journal and logs", remedy)
    return seen


def look_at_checkpoint_time(facts: Facts) -> str | Note:
    """Compares the time that a checkpoint takes on this disk with the grace time of a signal to stop."""
    rate, grace, num_bytes = facts.disk_rate, facts.grace_seconds, checkpoint_bytes(facts.config)
    if rate is None:
        return "the disk was not measured"
    seconds = num_bytes / rate
    seen = f"{num_bytes / 1e9:.1f} GB at {rate / 1e6:,.0f} MB/s of one writer: {seconds:,.0f} s"
    if grace is None:
        return f"{seen}; checkpoint.grace_seconds is null: a signal to stop waits for it"
    if seconds <= grace:
        return f"{seen} of {grace:g}"
    wanted = math.ceil(seconds)
    return Note(
        seen,
        f"less than the {grace:g} s between a signal to stop and the end, in which a step ends, too",
        f"set --signal-seconds {math.ceil(wanted / GRACE_SHARE)} or more, with a --time of twice that"
        if facts.door == "dry run"
        else f"set checkpoint.grace_seconds={wanted} or more, and give as much time before the kill (SLURM:"
        f" --signal-seconds {math.ceil(wanted / GRACE_SHARE)}); ranks that write side by side may be faster",
    )


def describe_places(facts: Facts, *, hosts: bool) -> list[str]:
    """Returns a line for each kind of GPU, or for the fullest host."""
    assert facts.machine is not None
    lines: list[str] = []
    for place in places(facts.config, facts.machine):
        if (place.name == HOST) == hosts:
            room = "its memory is not known" if place.room_bytes is None else f"of {gib(place.room_bytes)}"
            lines.append(f"{place.name}: {gib(place.peak_bytes)} while {place.peak_moment}, {room}")
    return lines


def _ranks(facts: Facts) -> int:
    """Returns the ranks of the trainer."""
    config = facts.config
    return config.parallel.world_size if config.command in ("train", "sft") else 0


def _unknown(facts: Facts, seen: str) -> str | Note:
    """Returns what cannot be seen from here: a note, but to a run that starts, which will see it."""
    if facts.door == "train":
        return seen
    return Note(seen, "something that can be looked at", "nothing: the run looks at it when it starts")
