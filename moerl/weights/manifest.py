"""The manifest of a weight update: the tensors that the trainer publishes, and the ranks of each slice. Torch-free.

The plan of an update (`moerl.weights.plan`) is made from a manifest alone. A manifest is made in one of two ways:

- `merge_shards` merges the names, shapes and dtypes of the shards that the trainer's ranks publish. Any part of a model
  can be published, so changed tensors alone are a manifest, too.
- `model_manifest` computes that of all weights of a model in a layout, before anything is built.

A tensor's name and the model determine the place of its rows in Hugging Face tensors (`moerl.weights.tensors`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from moerl.contract.parallel import ParallelDims
from moerl.errors import WeightSyncError
from moerl.models.description import ModelDescription
from moerl.weights.tensors import FIRST_STAGE, LAST_STAGE, MegatronTensor, Split, model_tensors, shard_shape

Shape = tuple[int, ...]
Owners = tuple[tuple[int, ...], ...]
"""Ranks that have each slice of a tensor, ascending."""
HeldShard = tuple[Shape, str]
"""Shape and dtype of the shard of a tensor that one rank publishes; the dtype as torch names it, without ``torch.``."""


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """One Megatron tensor that the trainer publishes."""

    tensor: MegatronTensor
    """The tensor; its split is `Split.WHOLE` if it is in one slice."""
    owners: Owners
    """Ranks of each slice."""

    @property
    def ways(self) -> int:
        """Number of slices."""
        return len(self.owners)

    @property
    def shard_shape(self) -> Shape:
        return shard_shape(self.tensor, self.ways)


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """The content of an update."""

    dims: ParallelDims
    """Parallel layout of the trainer."""
    tensors: tuple[PublishedTensor, ...]
    """Published tensors, in the order of the model's layers."""

    def shard_shapes(self, rank: int) -> dict[str, Shape]:
        """Returns the shape of a rank's shard of each tensor that it publishes, by name."""
        held = (each for each in self.tensors if any(rank in owners for owners in each.owners))
        return {each.tensor.name: each.shard_shape for each in held}


def model_manifest(model: ModelDescription, dims: ParallelDims, *, split_latents: bool = False) -> WeightManifest:
    """Returns the manifest of all weights of a model in a layout, from sizes alone. split_latents: as in
    `model_tensors`.

    Ranks are numbered as in `moerl.contract.parallel`. A tied embedding is published by the first stage.
    """
    stages = {layer: stage for stage in range(dims.pipeline) for layer in dims.layers_of_stage(model.num_layers, stage)}
    stages |= {FIRST_STAGE: 0, LAST_STAGE: dims.pipeline - 1}
    published = []
    for tensor in model_tensors(model, tensor=dims.tensor, split_latents=split_latents):
        ways = 1 if tensor.split is Split.WHOLE else _axis(tensor, dims)
        first = stages[tensor.layer] * dims.ranks_per_stage
        end, step = first + dims.ranks_per_stage, ways
        if tensor.expert is not None:
            first += dims.expert_tensor * (tensor.expert // (model.num_experts // dims.expert))
            step = dims.expert_tensor * dims.expert
        owners = tuple(tuple(range(first + shard, end, step)) for shard in range(ways))
        published.append(PublishedTensor(tensor if ways > 1 else replace(tensor, split=Split.WHOLE), owners))
    return WeightManifest(dims, tuple(published))


def encode_shards(shards: Mapping[str, Any]) -> bytes:
    """Encodes names, shapes and dtypes of the tensors that a rank publishes."""
    return msgspec.json.encode({name: (t.shape, str(t.dtype).removeprefix("torch.")) for name, t in shards.items()})


def merge_shards(model: ModelDescription, dims: ParallelDims, ranks: Sequence[bytes]) -> WeightManifest:
    """Merges the shards of all ranks to a manifest.

    Args:
        ranks: results of `encode_shards`, in rank order.

    Raises:
        WeightSyncError: a tensor has no place in the model, or its shards do not make up a whole.
    """
    held: dict[str, dict[int, HeldShard]] = {}
    for rank, said in enumerate(ranks):
        for name, shard in msgspec.json.decode(said, type=dict[str, HeldShard]).items():
            held.setdefault(name, {})[rank] = shard
    known = {tensor.name: tensor for tensor in model_tensors(model, tensor=dims.tensor, split_latents=False)}
    unknown = sorted(held.keys() - known.keys())
    if unknown:
        raise _unfit(
            f"{len(unknown)} tensors, first '{unknown[0]}'", "tensors that the model's checkpoint has a place for"
        )
    coordinates = dims.ranks()
    published = []
    for name, tensor in known.items():
        if name not in held:
            continue
        split = _split(tensor, held[name], dims)
        slices: dict[int, list[int]] = {}
        for rank in held[name]:
            at = coordinates[rank]
            mine = at.tensor_rank if tensor.expert is None else at.expert_tensor_rank
            slices.setdefault(0 if split is Split.WHOLE else mine, []).append(rank)
        ways = 1 if split is Split.WHOLE else _axis(tensor, dims)
        if sorted(slices) != list(range(ways)):
            raise _unfit(f"slices {sorted(slices)} of '{name}'", f"{ways} slices")
        owners = tuple(tuple(slices[number]) for number in range(ways))
        published.append(PublishedTensor(replace(tensor, split=split), owners))
    return WeightManifest(dims, tuple(published))


def _axis(tensor: MegatronTensor, dims: ParallelDims) -> int:
    """Returns the number of ranks that may cut a tensor."""
    return dims.tensor if tensor.expert is None else dims.expert_tensor


def _split(tensor: MegatronTensor, shards: Mapping[int, HeldShard], dims: ParallelDims) -> Split:
    """Returns how the ranks cut a tensor, by the shapes of their shards. Raises `WeightSyncError` if the ranks do not
    agree on the cut and the dtype."""
    seen = sorted(set(shards.values()))
    if len(seen) == 1:
        (shape, dtype), ways = seen[0], _axis(tensor, dims)
        is_float32 = tensor.element == "float32"
        for split in (Split.WHOLE, Split.ROWS, Split.COLUMNS):
            divides = split is not Split.COLUMNS or not tensor.is_vector
            wanted = shard_shape(replace(tensor, split=split), 1 if split is Split.WHOLE else ways)
            if divides and shape == wanted and (not is_float32 or dtype == "float32"):
                return split
    expected = shard_shape(replace(tensor, split=Split.WHOLE), 1)
    raise _unfit(
        f"'{tensor.name}' as {seen[:3]}", f"{list(expected)} in one slice, or in {_axis(tensor, dims)} equal ones"
    )


def _unfit(seen: str, expected: str) -> WeightSyncError:
    return WeightSyncError(
        "the trainer publishes tensors that are not those of its model",
        seen=seen,
        expected=expected,
        remedy="report it with the model and layout; nothing was sent",
    )
