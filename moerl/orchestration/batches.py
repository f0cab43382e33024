"""From samples to frames: a minibatch is packed, cut, and written as one frame for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moerl.buffer.cost import sequence_flops
from moerl.buffer.packing import PackOptions, Uncaptured, pack_for_ranks, pack_text_for_ranks, packing_metrics
from moerl.buffer.rows import Padding
from moerl.config.schema import RunConfig
from moerl.contract.batch import Microbatch, TextSample, TrainSample
from moerl.contract.batch_wire import share_frames
from moerl.contract.parallel import RankCoordinates
from moerl.models.description import ModelDescription


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """What one optimizer step works on.

    frames: one for each rank. num_tokens: trained tokens of all ranks. metrics: of packing and cutting.
    """

    frames: list[bytes]
    num_tokens: float
    metrics: dict[str, float]
    samples: Sequence[TrainSample] = ()


def pack_options(config: RunConfig, model: ModelDescription) -> PackOptions:
    """How sequences share microbatches in this run: the layout's padding, ranks balanced by operations."""
    dims = config.parallel.dims
    return PackOptions(
        config.trainer.microbatch_tokens,
        Padding.of(dims),
        cost=sequence_flops(model),
        count_multiple=dims.microbatch_multiple,
    )


def pack_minibatch(
    samples: Sequence[TrainSample], ranks: Sequence[RankCoordinates], options: PackOptions, uncaptured: Uncaptured
) -> Minibatch:
    """A minibatch of trajectories, packed and cut for every rank.

    Args:
        ranks: where each rank stands, in rank order.
        uncaptured: what happens to rows without captured routing, `keep_routing.uncaptured`.
    """
    packed = pack_for_ranks(samples, ranks[0].dims.data, options, replay=True, uncaptured=uncaptured)
    num_tokens = _num_tokens(packed)
    frames, metrics = share_frames(packed, ranks, {"num_tokens": num_tokens})
    return Minibatch(frames, num_tokens, metrics | packing_metrics(packed, options), samples)


def pack_text_minibatch(
    samples: Sequence[TextSample], ranks: Sequence[RankCoordinates], options: PackOptions
) -> Minibatch:
    """The same of supervised sequences."""
    packed = pack_text_for_ranks(samples, ranks[0].dims.data, options)
    num_tokens = _num_tokens(packed)
    frames, _ = share_frames(packed, ranks, {"num_tokens": num_tokens})
    return Minibatch(frames, num_tokens, packing_metrics(packed, options))


def _num_tokens(packed: Sequence[Sequence[Microbatch]]) -> float:
    return float(sum(int(batch.loss_mask.sum()) for batches in packed for batch in batches))
