"""Trainer state in Megatron's distributed format (torch_dist): its content, and its way to files and back.

Runs in every trainer rank. A tensor is stored under its place in the whole model, not under its rank, so a checkpoint
loads into another parallel layout. Data that are no tensors are small and the same for all ranks; if they depend on the
layout, a load keeps those of the optimizer that it fills:

- tensors: parameters and persistent buffers, master weights, Adam's moments;
- common: steps that Adam has made, learning-rate schedule, parallel layout, every rank's random state.

Files are written by torch.distributed.checkpoint and hold pickles: read only directories that you trust. Between ranks
nothing is pickled.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from moerl.contract.parallel import ParallelDims
from moerl.errors import CheckpointError
from moerl.kernels.transfer import HOST
from moerl.trainer.checkpoint_index import Shard, write_index, write_shards
from moerl.trainer.collectives import all_gather_bytes, gather_bytes, share_bytes, to_bytes, to_tensor

ENTRY_BYTES = 4096
"""Bytes of a stored tensor beyond its data, at most: archive header, padding and its lines in the index."""
_COMMON = "common_state"
"""Stored name of the data that are no tensors."""


@dataclass(frozen=True, slots=True)
class StagedState:
    """This rank's share of a checkpoint in host memory; training may go on while it is written."""

    entries: dict[str, Any]
    """Tensors and objects that torch.distributed.checkpoint writes, by stored name."""
    num_bytes: int
    """Bytes on disk, at most."""


def stage(chunks: Sequence[nn.Module], optimizer: Any, dims: ParallelDims, extra: Mapping[str, Any]) -> StagedState:
    """Copies the state that this rank has to write into host memory. A collective of all ranks.

    Args:
        chunks: bare Megatron models, one per virtual pipeline stage of this rank.
        optimizer: the Megatron optimizer over them.
        dims: parallel sizes.
        extra: plain data, the same on every rank; comes back from `load`.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist

    # `write_index` checks that shards make whole tensors, without sending objects around.
    sharded: Any = save_preprocess(_sharded(chunks, optimizer, loading=False), validate_access_integrity=False)[0]
    common = {
        "extra": dict(extra),
        "adam_steps": _adam_steps(optimizer),
        "layout": _layout(dims),
        "random_states": _gather_random_states(),
    }
    sharded[_COMMON] = ShardedObject(_COMMON, common, (1,), (0,), replica_id=dist.get_rank())
    by_name, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(  # pyright: ignore[reportPrivateUsage]
        sharded, keep_only_main_replica=True
    )
    num_bytes = 0
    for shards in by_name.values():
        for shard in shards:
            num_bytes += ENTRY_BYTES
            if isinstance(shard.data, Tensor):
                shard.data = shard.data.detach().to("cpu", copy=True)
                num_bytes += shard.data.nbytes
    entries = torch_dist.mcore_to_pyt_state_dict(by_name, is_loading=False)
    num_bytes += sum(len(entry.getbuffer()) for entry in entries.values() if isinstance(entry, io.BytesIO))
    return StagedState(entries, num_bytes)


def write(staged: StagedState, folder: Path, group: dist.ProcessGroup) -> list[Path]:
    """Writes and syncs the files of a checkpoint; returns those that this rank wrote. A collective of `group`.

    Runs in any thread, as long as nothing else uses `group`.

    Args:
        folder: the same empty directory on every rank.
        group: all ranks, on gloo.

    Raises:
        CheckpointError: on every rank, if any rank could not write.
    """
    rank, mine = dist.get_rank(group), _Written([])
    try:
        mine.shards = write_shards(staged.entries, folder, rank)
    except Exception as error:  # noqa: BLE001 - process boundary: the other ranks wait for this one's answer
        # torch's archive writer only says that it could not go on.
        free = shutil.disk_usage(folder.parent).free
        room = f"the disk {'is full' if free < staged.num_bytes else 'has room'}: {free} bytes free"
        mine.problem = f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())}; {room}"
    gathered = gather_bytes(msgspec.msgpack.encode(mine), group)
    problem = _index_problem([msgspec.msgpack.decode(each, type=_Written) for each in gathered], folder)
    problem = share_bytes(problem.encode(), group).decode()
    if problem:
        raise unwritten(folder, problem[:1000])
    files = sorted(folder.glob(f"__{rank}_*"))
    if rank == 0:
        files += [path for path in folder.iterdir() if not path.name.startswith("__")]
    return files


class _Written(msgspec.Struct):
    """Report of a rank on its files; a problem if the rank could not write them."""

    shards: list[Shard]
    problem: str = ""


def _index_problem(everyone: Sequence[_Written], folder: Path) -> str:
    """Writes the index, on the rank that has the reports of all, and returns what went wrong, empty if nothing did;
    does nothing on the others."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    problems = [written.problem for written in everyone if written.problem]
    if problems or not everyone:
        return "; ".join(problems)
    try:
        write_index([shard for written in everyone for shard in written.shards], folder)
        save_config(CheckpointingConfig("torch_dist"), str(folder))
    except (OSError, CheckpointError) as error:
        return f"rank 0: {error}"
    return ""


def unwritten(folder: Path, problem: str) -> CheckpointError:
    """Returns the error of a checkpoint that could not be written."""
    return CheckpointError(
        f"the checkpoint {folder.name.strip('.').removesuffix('.partial')} was not written",
        seen=problem,
        expected=f"files written and synced in {folder.parent}",
        remedy="the checkpoint before it is whole; free space or repair the file system, then resume the run",
    )


def load(folder: Path, chunks: Sequence[nn.Module], optimizer: Any, dims: ParallelDims) -> dict[str, Any]:
    """Loads models and optimizer from a checkpoint of any layout; returns what `stage` got as `extra`.

    Random states come back if the layout is the one that wrote them. In another layout there is no rank they
    belong to: every rank keeps the state that `groups.start` seeded. A collective of all ranks.

    Raises:
        CheckpointError: the checkpoint is not of these models.
    """
    loaded = _read(folder, _sharded(chunks, optimizer, loading=True), whole=True)
    _fill(chunks, loaded["model"], folder)
    for index, each in enumerate(optimizers_of(optimizer)):
        _load_optimizer(each, loaded["optimizer"][index], loaded["adam_steps"])
    if loaded["layout"] == _layout(dims):
        _set_random_state(loaded["random_states"][dist.get_rank()])
    return loaded["extra"]


def load_weights(folder: Path, chunks: Sequence[nn.Module]) -> None:
    """Loads models alone from a checkpoint of any layout. A collective of all ranks.

    Raises:
        CheckpointError: the checkpoint is not of these models.
    """
    loaded = _read(folder, {"model": _sharded_models(chunks)}, whole=False)
    _fill(chunks, loaded["model"], folder)


def _read(folder: Path, state: dict[str, Any], *, whole: bool) -> dict[str, Any]:
    """Returns the state with the data of the checkpoint. A collective: all ranks read it, or all raise.

    Args:
        whole: refuse a checkpoint with more tensors than the ranks ask for.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
    from megatron.core.dist_checkpointing.validation import StrictHandling

    load: Any = dist_checkpointing.load
    mine = _Read(_asked_for(state) if whole else set())
    loaded: dict[str, Any] = {}
    try:
        loaded = load(state, str(folder), validate_access_integrity=False, strict=StrictHandling.RAISE_UNEXPECTED)
    except CheckpointException as error:
        causes = sorted(error.failures.items())
        mine.problem = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in causes)
    except CheckpointingException as error:
        mine.problem = str(error)
    mine.problem = " ".join(mine.problem.split())[:1000]
    everyone = [msgspec.msgpack.decode(each, type=_Read) for each in all_gather_bytes(msgspec.msgpack.encode(mine))]
    problems = {read.problem for read in everyone if read.problem}
    if problems:
        raise _misfit(folder, "; ".join(sorted(problems)))
    if whole:
        stored = {each.key for each in load_sharded_metadata(str(folder)).values()} - {_COMMON}
        left = stored.difference(*(read.names for read in everyone))
        if left:
            raise _misfit(folder, f"{len(left)} tensors that the model has not, first {min(left)}")
    return loaded


class _Read(msgspec.Struct):
    """Report of a rank on its reading. names: the tensors that the rank asked for."""

    names: set[str]
    problem: str = ""


def _asked_for(state: dict[str, Any]) -> set[str]:
    """Returns the stored names that a state asks for."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

    return {each.key for each in nested_values(load_preprocess(state)[0]) if isinstance(each, ShardedBase)}


def _misfit(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"the trainer checkpoint {folder} does not fit the model",
        seen=problem,
        expected="the tensors of this model and optimizer",
        remedy="resume with the model configuration of the run",
    )


# --- what is stored --------------------------------------------------------------------------------------------------


def _sharded(chunks: Sequence[nn.Module], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    """Returns the tensors of models and optimizers with their places in the whole; all else is marked as this process's
    own: not stored, and unchanged by a load."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedTensorFactory

    def own(leaf: Any) -> Any:
        has_place = isinstance(leaf, ShardedBase | ShardedTensorFactory | LocalNonpersistentObject)
        return leaf if has_place else LocalNonpersistentObject(leaf)

    models = _sharded_models(chunks)
    optimizers = {}
    for index, each in enumerate(optimizers_of(optimizer)):
        make_moments(each)
        state = each.sharded_state_dict(models, is_loading=loading, metadata=_metadata())
        optimizers[index] = dict_list_map_outplace(own, state)
    return {"model": models, "optimizer": optimizers}


def _metadata() -> dict[str, Any]:
    """Returns the settings by which Megatron's modules and optimizers name and cut their tensors."""
    return {
        # Layers keep names of their own, so pipeline stages need not hold layers of one kind.
        "non_homogeneous_layers": True,
        # The distributed optimizer's moments are stored in the shape of their parameter, as the plain optimizer's are.
        "distrib_optim_sharding_type": "fully_reshardable",
        # Moments are put together in host memory, over gloo. The other way is over NCCL, and needs room on the device
        # for whole buffers of them in float32, in addition to weights and gradients.
        "distrib_optim_fully_reshardable_mem_efficient": True,
    }


def _sharded_models(chunks: Sequence[nn.Module]) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    models = {}
    for index, chunk in enumerate(chunks):
        state = chunk.sharded_state_dict(metadata=_metadata())  # pyright: ignore[reportCallIssue]
        # Objects of models are Transformer Engine's `_extra_state`, which holds nothing but FP8 scales.
        models[str(index)] = {name: value for name, value in state.items() if not isinstance(value, ShardedObject)}
    return models


def _fill(chunks: Sequence[nn.Module], loaded: Mapping[str, Any], folder: Path) -> None:
    for index, chunk in enumerate(chunks):
        wrong = chunk.load_state_dict(loaded[str(index)], strict=False)
        unmatched = [k for k in (*wrong.missing_keys, *wrong.unexpected_keys) if not k.endswith("_extra_state")]
        if unmatched:
            raise _misfit(folder, f"{len(unmatched)} unmatched tensors, first {unmatched[0]}")


# --- optimizers ------------------------------------------------------------------------------------------------------


def optimizers_of(optimizer: Any) -> list[Any]:
    """Returns the optimizers of a chain (dense parameters, expert parameters) that have parameters on this rank."""
    return [each for each in getattr(optimizer, "chained_optimizers", [optimizer]) if not each.is_stub_optimizer]


def make_moments(optimizer: Any) -> None:
    """Gives parameters without state their initial one, so that a load has tensors to fill."""
    inner = optimizer.optimizer
    optimizer.init_state_fn(inner, optimizer.config)
    if isinstance(inner, torch.optim.Adam):
        for moments in inner.state.values():
            moments.setdefault("step", torch.tensor(0.0))


def _adam_steps(optimizer: Any) -> int:
    """Returns the steps that were made: torch's Adam counts them per parameter, Transformer Engine's per group."""
    counts = set()
    for each in optimizers_of(optimizer):
        inner = each.optimizer
        if isinstance(inner, torch.optim.Adam):
            counts |= {int(moments["step"]) for moments in inner.state.values()}
        else:
            counts |= {int(group["step"]) for group in inner.param_groups if group["params"] and "step" in group}
    assert len(counts) <= 1, counts
    return max(counts, default=0)


def _load_optimizer(optimizer: Any, state: dict[str, Any], adam_steps: int) -> None:
    inner = optimizer.optimizer
    counts_per_parameter = isinstance(inner, torch.optim.Adam)
    sharded = state.pop("param_state", None)
    plain = state.get("optimizer", state)
    if sharded is None and counts_per_parameter:
        plain["state"]["common_step"] = torch.tensor(float(adam_steps))
    else:
        for group in plain["param_groups"]:
            group["step"] = adam_steps
    optimizer.load_state_dict(state)
    if sharded is not None:
        # The distributed optimizer would look for torch's counts among the stored moments.
        for moments in inner.state.values():
            moments.pop("step", None)
        optimizer.load_parameter_state_from_fully_reshardable(sharded)
    if counts_per_parameter:
        # A tensor of its own for each: torch counts in place.
        for moments in inner.state.values():
            moments["step"] = torch.tensor(float(adam_steps))


# --- random states ---------------------------------------------------------------------------------------------------


class _RandomState(TypedDict):
    """States of a rank's generators, each uint8 [bytes]."""

    cpu: Tensor
    """State of torch's generator of the host."""
    device: Tensor | None
    """State of torch's generator of the rank's GPU; None on a CPU."""
    regions: dict[str, Tensor]
    """States that Megatron keeps for parallel regions, by name."""


def _gather_random_states() -> list[_RandomState]:
    """Gathers the random states of all ranks, in rank order."""
    mine: _RandomState = {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state().cpu() if torch.cuda.is_available() else None,
        "regions": {name: value.cpu() for name, value in _regions().get_states().items()},
    }
    decoder = msgspec.msgpack.Decoder(_RandomState, dec_hook=lambda kind, data: to_tensor(data, HOST))
    return [decoder.decode(each) for each in all_gather_bytes(msgspec.msgpack.encode(mine, enc_hook=to_bytes))]


def _set_random_state(state: _RandomState) -> None:
    """Restores the generators of a rank. Those of devices are left as they are if the checkpoint is of another kind of
    device: a GPU's have another size than a CPU's."""
    torch.set_rng_state(state["cpu"])
    if (state["device"] is not None) != torch.cuda.is_available():
        return
    if state["device"] is not None:
        torch.cuda.set_rng_state(state["device"])
    _regions().set_states(state["regions"])


def _regions() -> Any:
    """Returns Megatron's generators of parallel regions."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


# --- layout -----------------------------------------------------------------------------------------------------------


def _layout(dims: ParallelDims) -> dict[str, int]:
    names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    return {"ranks": dims.world_size, **{name: getattr(dims, name) for name in names}}
