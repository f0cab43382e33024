"""What one run needs of the machine: GPUs or cores, memory, room, servers. Its keys are those of `moerl train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moerl.config.checks import check_command, check_for_gpus, describe_model
from moerl.config.engine_memory import check_shared_device
from moerl.config.hub import hub_model, missing_weights, prepare_model
from moerl.config.memory import FP32, MOMENTS, heaviest_rank, needs_of, total_parameters
from moerl.config.rollouts import ServerRolloutConfig, SGLangRolloutConfig
from moerl.config.schema import RunConfig
from moerl.errors import MoerlError
from moerl.launch.doctor.accelerators import Gpu
from moerl.launch.doctor.check import Check, fault, green
from moerl.launch.doctor.machine import GIB
from moerl.launch.doctor.servers import check_server_files

AREA = "run"


def run_checks(config: RunConfig, gpus: Sequence[Gpu], cores: int, memory_bytes: int) -> list[Check]:
    """All looks at what a run needs, but for the SGLang environment and room, which are looked at without a run, too.

    Args:
        gpus: of all nodes that the run is on; with none it is on CPUs.
        cores: of all of them.
        memory_bytes: of all of them.
    """
    servers = [check_server_files(config.rollout.server)] if isinstance(config.rollout, ServerRolloutConfig) else []
    fits = check_gpu_memory(config, gpus) if gpus else check_memory(config, memory_bytes)
    devices = check_gpu_count(config, len(gpus)) if gpus else check_cores(config, cores)
    return [check_configuration(config, bool(gpus)), devices, fits, *servers]


def check_configuration(config: RunConfig, has_gpus: bool = False) -> Check:
    """Whether `moerl train` takes it: files that it names, the model's tensors, libraries of trackers. Weights of a
    model of the hub are not fetched for it."""
    try:
        check_command(config, "train")
        if has_gpus:
            check_for_gpus(config)
        of_hub = hub_model(config.model)
        missing = [] if of_hub is None else missing_weights(of_hub.folder)
        if missing:
            seen = f"{len(missing)} files of weights of {config.model.hub} are not in the cache of the hub"
            expected, remedy = "weights that a run finds", "none is needed with a network: the run fetches them first"
            return Check(AREA, "configuration", "yellow", seen, expected, remedy)
        prepare_model(config.model)
    except MoerlError as error:
        return fault("red", AREA, "configuration", error)
    return green(AREA, "configuration", f"recipe {config.recipe}, as `moerl train` takes it")


def check_gpu_count(config: RunConfig, gpus: int) -> Check:
    """A GPU for each rank of the trainer, and for each of the servers."""
    trainer, servers = config.parallel.world_size, _server_ranks(config)
    needed = trainer + servers
    text = f"{trainer} ranks of the trainer" + (f", {servers} of servers" if servers else "")
    if gpus < needed:
        remedy = "take smaller parallel sizes (`parallel.*`, rollout.servers, rollout.tensor) or a machine with more"
        return Check(AREA, "GPUs of the run", "red", f"{gpus} GPUs for {text}", f"{needed} GPUs", remedy)
    return green(AREA, "GPUs of the run", f"{gpus} GPUs for {text}")


def check_cores(config: RunConfig, cores: int) -> Check:
    """A core for each rank of the trainer and of the servers; with fewer a run works, and is slow."""
    trainer, servers = config.parallel.world_size, _server_ranks(config)
    needed, text = trainer + servers, f"{cores} cores for {trainer} ranks of the trainer and {servers} of servers"
    if needed > cores:
        return Check(AREA, "cores", "yellow", text, f"{needed} cores", "take fewer ranks, or a machine with more cores")
    return green(AREA, "cores", text)


def check_gpu_memory(config: RunConfig, gpus: Sequence[Gpu]) -> Check:
    """The heaviest rank of the trainer against the smallest GPU, as `moerl plan memory` works it out; and the first
    one together with an embedded engine."""
    sizes = describe_model(config)
    rank = heaviest_rank(sizes, config.parallel.dims, needs_of(config))
    smallest = min(gpu.total_mib for gpu in gpus) * 2**20
    text = f"{rank.total_bytes / GIB:.1f} GiB of {smallest / GIB:.0f} GiB"
    if not rank.fits(smallest):
        remedy = "`moerl plan memory` with these keys shows the parts, and layouts that fit"
        return Check(AREA, "memory of a rank", "red", text, "a rank that fits", remedy)
    try:
        check_shared_device(config, sizes, round(smallest))
    except MoerlError as error:
        return fault("red", AREA, "memory of a rank", error)
    return green(AREA, "memory of a rank", text)


def check_memory(config: RunConfig, memory_bytes: int) -> Check:
    """All ranks of the trainer against the memory of the machine."""
    rank = heaviest_rank(describe_model(config), config.parallel.dims, needs_of(config))
    total = rank.total_bytes * config.parallel.world_size
    text = f"{total / GIB:.1f} GiB for {config.parallel.world_size} ranks, of {memory_bytes / GIB:.1f} GiB"
    if total > memory_bytes:
        return Check(AREA, "memory", "red", text, "ranks that fit", "a smaller model, or a machine with more memory")
    return green(AREA, "memory", text)


def checkpoint_bytes(config: RunConfig) -> float:
    """Room for the checkpoints that a run keeps, and one more that is being written: weights, Adam's moments, and
    master weights where weights are not float32."""
    element = needs_of(config).element_bytes
    state = element + MOMENTS + (FP32 if element < FP32 else 0)
    return float(total_parameters(describe_model(config))) * state * (config.checkpoint.keep + 1)


def environment_of(config: RunConfig) -> Path | None:
    """The environment of the servers that a run starts; None where it starts none."""
    return config.rollout.environment if isinstance(config.rollout, SGLangRolloutConfig) else None


def uses_others(config: RunConfig) -> bool:
    """Whether a run uses servers, or a cluster, that it does not start itself."""
    return isinstance(config.rollout, ServerRolloutConfig) or config.launch.address is not None


def _server_ranks(config: RunConfig) -> int:
    rollout = config.rollout
    return rollout.own_devices if isinstance(rollout, SGLangRolloutConfig) else 0
