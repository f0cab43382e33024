"""Memory of a whole run: what the fullest GPU of each kind and the fullest host hold, and whether it fits. Pure.

`moerl plan memory`, `moerl launch slurm`, `moerl doctor` and `moerl train` read this one table. Three moments count:
engines sample; new weights are sent to them; the trainer works. `moerl.machine.residence` says what of a colocated run
is on the device in each. Trainer and engines with GPUs of their own hold theirs all the time, but for activations.

**Hosts** hold what does not lie on GPUs (`trainer.optimizer_offload`, `trainer.sleep`), a checkpoint that is being
written, the copies of the weights that ranks keep for servers that come late (two while an update is sent), the buckets
of an update that colocated servers take through host memory, and on CPUs all the rest. Not worked out: the processes
themselves, the page cache, rollouts that wait.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from moerl.config.architecture import describe_model
from moerl.config.engine_memory import (
    EngineMemory,
    engine_bytes,
    engine_needs,
    pool_tokens,
    server_share,
    shared_device_error,
)
from moerl.config.rollouts import EmbeddedRolloutConfig, SGLangRolloutConfig
from moerl.config.schema import RunConfig
from moerl.contract.parallel import ParallelDims
from moerl.errors import ConfigError
from moerl.machine.memory import FP32, MOMENTS, USABLE_SHARE, RankMemory, heaviest_rank, rank_memory, total_parameters
from moerl.machine.residence import MOMENTS_OF_A_RUN, Moment, moments_on_device
from moerl.models.description import ModelDescription

GIB = 2**30
GPU_OF_BOTH, GPU_OF_TRAINER, GPU_OF_SERVER = "GPU of a rank and a server", "GPU of a rank", "GPU of a server"
GPU_OF_ENGINE = "GPU of the embedded engine"
HOST = "host"
SERVER_WEIGHTS, SERVER_CACHE, BUCKETS = "server: weights", "server: cache", "buckets of a weight update"


@dataclass(frozen=True, slots=True)
class Machine:
    """Machines that a run gets, all of one kind."""

    gpu_bytes: float | None
    """Memory of one GPU; None for a run on CPUs."""
    gpus_per_node: int = 0
    """0 = not known."""
    nodes: int = 1
    """Number of machines."""
    host_bytes: float | None = None
    """Host memory of one machine; None = not known."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One thing in memory."""

    what: str
    """Name of the thing; in a colocated run a row of `moerl.machine.residence`."""
    num_bytes: int
    """Bytes while the thing is there."""
    moments: tuple[Moment, ...] = MOMENTS_OF_A_RUN
    """Moments of a step in which the thing is there."""


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """The fullest GPU of a kind, or the fullest host."""

    name: str
    """`HOST`, or the kind of GPU, for example `GPU_OF_BOTH`."""
    holdings: tuple[Holding, ...]
    """Things in the memory, in no order."""
    room_bytes: float | None
    """Memory of the GPU or host; None = not known."""

    def at(self, moment: Moment) -> int:
        """Returns the bytes in use at a moment."""
        return sum(each.num_bytes for each in self.holdings if moment in each.moments)

    @property
    def peak_bytes(self) -> int:
        return max(map(self.at, MOMENTS_OF_A_RUN))

    @property
    def peak_moment(self) -> Moment:
        return max(MOMENTS_OF_A_RUN, key=self.at)

    @property
    def fits(self) -> bool:
        """Returns whether the peak fills no more than `USABLE_SHARE` of the memory; True if that is not known."""
        return self.room_bytes is None or self.peak_bytes <= USABLE_SHARE * self.room_bytes


def places(config: RunConfig, machine: Machine) -> list[MemoryPlace]:
    """Returns the fullest GPU of each kind, and the fullest host as the last one."""
    sizes = describe_model(config.model)
    rank = heaviest_rank(sizes, config.parallel.dims, config.rank_needs()) if _trains(config) else None
    gpus: list[MemoryPlace] = []
    if machine.gpu_bytes is not None:
        if rank is not None:
            gpus.append(trainer_gpu(config, sizes, rank, machine.gpu_bytes))
        if isinstance(config.rollout, SGLangRolloutConfig) and (rank is None or not config.rollout.is_colocated):
            gpus.append(
                MemoryPlace(GPU_OF_SERVER, _server_holdings(config, sizes, machine.gpu_bytes), machine.gpu_bytes)
            )
        gpus += _engine_gpu(config, sizes, machine.gpu_bytes)
    return [*gpus, _host(config, sizes, rank, machine)]


def _engine_gpu(config: RunConfig, sizes: ModelDescription, gpu_bytes: float) -> list[MemoryPlace]:
    """Returns the GPU of the embedded engine, which the first rank shares if one trains; none if it is on no GPU."""
    holdings = [Holding(f"engine: {name}", size) for name, size in _engine_bytes(config, sizes).items()]
    if not holdings:
        return []
    if _trains(config):
        rank = rank_memory(sizes, config.parallel.dims, config.rank_needs(), 0)
        holdings = [*(Holding(each.what, each.num_bytes) for each in rank_holdings(rank)), *holdings]
    return [MemoryPlace(GPU_OF_ENGINE, tuple(holdings), gpu_bytes)]


def trainer_gpu(config: RunConfig, sizes: ModelDescription, rank: RankMemory, gpu_bytes: float) -> MemoryPlace:
    """Returns the GPU of a rank, with the server that shares it in a colocated run."""
    rollout = config.rollout
    holdings = [*rank_holdings(rank), Holding(BUCKETS, _buckets(config, sizes), ("sending",))]
    if not isinstance(rollout, SGLangRolloutConfig) or not rollout.is_colocated:
        return MemoryPlace(GPU_OF_TRAINER, tuple(holdings), gpu_bytes)
    weights, share = _engine(config, sizes).weights_bytes, int(server_share(rollout) * gpu_bytes)
    holdings += [Holding(SERVER_WEIGHTS, weights), Holding(SERVER_CACHE, max(0, share - weights))]
    shared = [
        Holding(each.what, each.num_bytes, moments_on_device(each.what, sleeps=config.trainer.sleep))
        for each in holdings
    ]
    return MemoryPlace(GPU_OF_BOTH, tuple(shared), gpu_bytes)


def rank_holdings(rank: RankMemory) -> list[Holding]:
    """Returns what a rank holds: its state always, activations and what scoring needs while it trains."""
    passing = ("activations", "scoring", "embedding's gradient", "pieces of optimizer state")
    return [
        Holding(f"rank: {name}", size, ("training",) if name in passing else MOMENTS_OF_A_RUN)
        for name, size in rank.bytes.items()
        if size
    ]


def checkpoint_bytes(config: RunConfig) -> int:
    """Returns the bytes of one checkpoint: weights, Adam's moments, and master weights unless weights are float32."""
    element = config.rank_needs().element_bytes
    state = element + MOMENTS + (FP32 if element < FP32 else 0)
    return total_parameters(describe_model(config.model)) * state


def gpu_problem(config: RunConfig, machine: Machine) -> ConfigError | None:
    """Returns the error if the GPU of a rank or of the embedded engine is too small for the run; None if it is not."""
    # A server with a GPU of its own takes its share and no more.
    gpus = [place for place in places(config, machine) if place.name not in (GPU_OF_SERVER, HOST)]
    return next((_unfit(config, place) for place in gpus if not place.fits), None)


def check_shared_device(config: RunConfig, gpu_bytes: int) -> None:
    """Raises `ConfigError` if the first rank of the trainer and the embedded engine do not fit on one GPU."""
    for place in _engine_gpu(config, describe_model(config.model), gpu_bytes):
        if not place.fits:
            raise _unfit(config, place)


def check_host(config: RunConfig, machine: Machine) -> None:
    """Raises `ConfigError` if the fullest host is too small for the run, as far as that is known."""
    host = places(config, machine)[-1]
    if not host.fits:
        raise _unfit(config, host)


def gib(num_bytes: float) -> str:
    """Returns bytes for people."""
    return f"{num_bytes / GIB:.1f} GiB"


def _trains(config: RunConfig) -> bool:
    return config.command in ("train", "sft")


def _engine(config: RunConfig, sizes: ModelDescription) -> EngineMemory:
    return engine_needs(config.rollout, config.trainer, config.task, sizes)


def _engine_bytes(config: RunConfig, sizes: ModelDescription) -> dict[str, int]:
    return engine_bytes(config.rollout, sizes, on_ray=config.launch.on == "ray")


def _buckets(config: RunConfig, sizes: ModelDescription) -> int:
    """Returns the bytes of two buckets; 0 without an engine. A larger tensor is a bucket by itself; the embedding is
    the largest."""
    if not config.rollout.has_engine:
        return 0
    embedding = sizes.vocab_size * sizes.hidden_size * config.rank_needs().element_bytes
    return 2 * max(config.weights.bucket_bytes, embedding)


def _server_holdings(config: RunConfig, sizes: ModelDescription, gpu_bytes: float | None) -> tuple[Holding, ...]:
    """Returns what one device of a server holds."""
    assert isinstance(config.rollout, SGLangRolloutConfig)
    engine = _engine(config, sizes)
    tokens = pool_tokens(config.rollout, engine, gpu_bytes)
    cache = Holding(f"server: cache of {tokens:,} tokens", tokens * engine.token_bytes)
    return Holding("server: weights", engine.weights_bytes), cache


def _host(config: RunConfig, sizes: ModelDescription, rank: RankMemory | None, machine: Machine) -> MemoryPlace:
    rollout, holdings = config.rollout, list[Holding]()
    ranks = ranks_on_node(config, machine) if rank is not None else 0
    if rank is not None:
        if machine.gpu_bytes is None:
            holdings += [Holding(h.what, h.num_bytes * ranks, h.moments) for h in rank_holdings(rank)]
        if rank.offloaded_bytes:
            holdings.append(Holding("optimizer state of ranks", rank.offloaded_bytes * ranks))
        if config.trainer.sleep and machine.gpu_bytes is not None:
            asleep = rank.bytes["weights"] + rank.bytes["reference weights"]
            holdings.append(Holding("weights of ranks that sleep", asleep * ranks))
        if machine.gpu_bytes is not None and config.trainer.distributed_optimizer != "off":
            # Every rank gets its whole part of the model, in float32: weights and both moments.
            gathered = sum(rank.parameters.values()) * (FP32 + MOMENTS) * ranks
            holdings.append(Holding("state gathered for a checkpoint", gathered, ("training",)))
        # One of several replicas stages the weights; which nodes these ranks are on is not worked out.
        staged = ranks * (rank.bytes["weights"] + rank.bytes["optimizer state"] + rank.offloaded_bytes)
        holdings.append(Holding("checkpoint being written", min(checkpoint_bytes(config), staged)))
        holdings += _weight_copies(config, sizes, machine)
    if config.command in ("train", "rollout"):
        scored = ((name, scorer.host_bytes(f"scorers.{name}")) for name, scorer in config.scorers.items())
        holdings += [Holding(f"scorer {name}", num_bytes) for name, num_bytes in scored if num_bytes]
    if isinstance(rollout, EmbeddedRolloutConfig):
        if machine.gpu_bytes is not None and _engine_bytes(config, sizes):
            return MemoryPlace(HOST, tuple(holdings), machine.host_bytes)
        engine = _engine(config, sizes)
        holdings.append(Holding("engine: weights", engine.weights_bytes))
        holdings.append(Holding("engine: cache", engine.asked_bytes, ("sampling",)))
    elif isinstance(rollout, SGLangRolloutConfig) and machine.gpu_bytes is None:
        devices = _server_devices_on_node(config, machine)
        holdings += [Holding(h.what, h.num_bytes * devices) for h in _server_holdings(config, sizes, None)]
    return MemoryPlace(HOST, tuple(holdings), machine.host_bytes)


def _weight_copies(config: RunConfig, sizes: ModelDescription, machine: Machine) -> list[Holding]:
    """Returns the copies for servers that come late, and the buckets that pass through host memory in an update."""
    rollout, found = config.rollout, list[Holding]()
    if rollout.keeps_weight_copy:
        weights = total_parameters(sizes) * config.rank_needs().element_bytes
        found.append(Holding("copy of the weights for late servers", weights))
        found.append(Holding("copy of the next weights", weights, ("sending",)))
    if isinstance(rollout, SGLangRolloutConfig) and rollout.is_colocated and machine.gpu_bytes is not None:
        takers = config.weights.senders + _server_devices_on_node(config, machine)
        found.append(Holding("buckets through host memory", takers * _buckets(config, sizes), ("sending",)))
    return found


def _server_devices_on_node(config: RunConfig, machine: Machine) -> int:
    """Returns the devices of servers on the node with most of them: all, unless they share those of ranks."""
    rollout = config.rollout
    assert isinstance(rollout, SGLangRolloutConfig)
    servers = rollout.servers
    if rollout.is_colocated:
        servers = min(servers, ranks_on_node(config, machine) // rollout.tensor)
    return servers * rollout.tensor


def ranks_on_node(config: RunConfig, machine: Machine) -> int:
    """Returns the ranks of the trainer on the node with most of them."""
    world = config.parallel.world_size
    return min(world, machine.gpus_per_node) if machine.gpus_per_node else math.ceil(world / machine.nodes)


# --- what does not fit -----------------------------------------------------------------------------------------------


def _unfit(config: RunConfig, place: MemoryPlace) -> ConfigError:
    assert place.room_bytes is not None
    if place.name == GPU_OF_ENGINE:
        engine = _engine_bytes(config, describe_model(config.model))
        return shared_device_error(engine, place.peak_bytes - sum(engine.values()), place.room_bytes)
    held = sorted((h for h in place.holdings if place.peak_moment in h.moments), key=lambda h: -h.num_bytes)
    parts = ", ".join(f"{each.what} {each.num_bytes / GIB:.1f}" for each in held[:6])
    seen = f"{gib(place.peak_bytes)} while {place.peak_moment}: {parts}"
    usable = USABLE_SHARE * place.room_bytes
    expected = f"at most {gib(usable)}, {USABLE_SHARE:.0%} of {gib(place.room_bytes)}"
    what = "parallel: a rank of the trainer does not fit a GPU"
    remedy = "`moerl plan memory` with these keys shows the parts, and layouts that fit"
    if place.name == HOST:
        what = "memory of a host: a run does not fit one of its machines"
        remedy = "take machines with more memory, fewer ranks on each of them, or fewer servers; `moerl plan memory`"
        remedy += " shows the parts"
    elif place.name == GPU_OF_BOTH and place.at("sending") > max(usable, place.at("sampling")):
        what = "rollout.tensor: the weights of a server and of the trainer do not fit one GPU together"
        remedy = "raise rollout.tensor, or split the trainer's weights over more ranks"
        remedy += " (parallel.expert, parallel.tensor)"
    elif place.name == GPU_OF_BOTH and place.at("sampling") > usable:
        what = "rollout.memory_share: a server's share and the trainer's state do not fit one GPU together"
        remedy = _share_remedy(config, place, usable)
    return ConfigError(what, seen=seen, expected=expected, remedy=remedy)


def _share_remedy(config: RunConfig, place: MemoryPlace, usable: float) -> str:
    """Returns the remedy: the largest share that fits, if a server can work with it; else other GPUs."""
    assert place.room_bytes is not None
    engine = _engine(config, describe_model(config.model))
    server = sum(each.num_bytes for each in place.holdings if each.what in (SERVER_WEIGHTS, SERVER_CACHE))
    most = math.floor(100 * (usable - (place.at("sampling") - server)) / place.room_bytes) / 100
    least = (engine.weights_bytes + (config.rollout.max_new_tokens + 1) * engine.token_bytes) / place.room_bytes
    if most >= least and most > 0:
        rest = "" if config.trainer.sleep else ", trainer.sleep=true"
        return f"set rollout.memory_share={most:g}{rest}, or spread the trainer's state over more ranks (parallel.data)"
    return (
        "set rollout.placement=disaggregated and give servers GPUs of their own, or spread the trainer's state over"
        f" more ranks (parallel.data): a server needs {least:.2f} of each GPU that it is on"
    )


def check_server(config: RunConfig, machine: Machine) -> tuple[str, str] | None:
    """Checks that a server that the run starts can finish one response of the greatest length.

    Returns:
        If a server works on fewer of the longest sequences than `rollout.max_running`: why, and what would change that.

    Raises:
        ConfigError: the server could not.
    """
    rollout = config.rollout
    assert isinstance(rollout, SGLangRolloutConfig)
    engine = _engine(config, describe_model(config.model))
    tokens, least = pool_tokens(rollout, engine, machine.gpu_bytes), rollout.max_new_tokens + 1
    if tokens < least:
        if machine.gpu_bytes is None or (rollout.max_pool_tokens is not None and rollout.max_pool_tokens < least):
            raise ConfigError(
                "rollout.max_pool_tokens: the pool of a server does not hold one response and its prompt",
                seen=tokens,
                expected=f"> rollout.max_new_tokens = {rollout.max_new_tokens}, and room for the prompt",
                remedy=f"set rollout.max_pool_tokens={engine.longest} or more, or lower rollout.max_new_tokens",
            )
        share = server_share(rollout)
        raise ConfigError(
            "rollout.tensor: the weights of a server and the cache of one response do not fit its share of a GPU",
            seen=f"weights {gib(engine.weights_bytes)}, cache of {least} tokens {gib(least * engine.token_bytes)}",
            expected=f"at most {gib(share * machine.gpu_bytes)}, {share:.0%} of {gib(machine.gpu_bytes)}",
            remedy=f"raise rollout.tensor, now {rollout.tensor}"
            + ("" if rollout.memory_share is None else f", or rollout.memory_share, now {rollout.memory_share:g}"),
        )
    holds = tokens // engine.longest
    if holds >= engine.side_by_side:
        return None
    on_gpus = machine.gpu_bytes is not None
    keys = ["rollout.tensor"] * on_gpus
    keys += ["rollout.memory_share"] * (on_gpus and rollout.memory_share is not None)
    keys += ["rollout.max_pool_tokens"] * (not on_gpus or rollout.max_pool_tokens is not None)
    return (
        f"the cache of a server holds {tokens:,} tokens, {holds} sequences of the longest ({engine.longest:,} tokens);"
        f" rollout.max_running asks for {engine.side_by_side}. While responses are that long the others wait, or are"
        " computed again",
        f"raise {', '.join(keys)}, or set rollout.max_running={max(1, holds)}; nothing is needed if most are shorter",
    )


def fits_with(config: RunConfig, machine: Machine, dims: ParallelDims) -> bool:
    """Returns whether GPUs would hold another layout of a run."""
    parallel = config.parallel.model_copy(update=asdict(dims))
    return gpu_problem(config.model_copy(update={"parallel": parallel}), machine) is None
