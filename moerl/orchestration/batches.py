"""From samples to frames: a minibatch is packed, cut, and written as one frame for each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType

from moerl.batching.packing import PackOptions, Uncaptured, pack_for_ranks, pack_text_for_ranks, packing_metrics
from moerl.contract.batch import BatchTotals, TextSample, TrainSample
from moerl.contract.batch_wire import share_frames
from moerl.contract.parallel import RankCoordinates


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """Encoded microbatches of one optimizer step."""

    frames: list[bytes]
    """One frame for each rank, in rank order."""
    totals: BatchTotals
    """Sums over all ranks."""
    metrics: dict[str, float]
    """Metrics of packing, and of cutting into shares of ranks."""
    samples: Sequence[TrainSample] = ()
    """Trajectories of the minibatch, in the order of `sample_index`; empty for supervised sequences."""
    model_flops: float = 0.0
    """Operations of forward and backward passes over all sequences, shared prompts counted for each."""

    @property
    def num_tokens(self) -> float:
        """Trained tokens of all ranks."""
        return self.totals.num_tokens


def pack_minibatch(
    samples: Sequence[TrainSample],
    ranks: Sequence[RankCoordinates],
    options: PackOptions,
    uncaptured: Uncaptured,
    facts: Mapping[str, float] = MappingProxyType({}),
) -> Minibatch:
    """Packs a minibatch of trajectories and cuts it for every rank.

    Args:
        ranks: coordinates of each rank, in rank order.
        uncaptured: treatment of rows without captured routing, `keep_routing.uncaptured`.
        facts: facts of the algorithm about the minibatch (`Algorithm.batch_facts`).
    """
    packed = pack_for_ranks(samples, ranks[0].dims.data, options, replay=True, uncaptured=uncaptured)
    totals = replace(BatchTotals.of(chain.from_iterable(packed)), facts=facts)
    frames, metrics = share_frames(packed, ranks, totals.numbers())
    flops = _model_flops((len(sample.trajectory) for sample in samples), options)
    return Minibatch(frames, totals, metrics | packing_metrics(packed, options), samples, flops)


def pack_text_minibatch(
    samples: Sequence[TextSample], ranks: Sequence[RankCoordinates], options: PackOptions
) -> Minibatch:
    """Packs a minibatch of supervised sequences and cuts it for every rank, as `pack_minibatch` does."""
    packed = pack_text_for_ranks(samples, ranks[0].dims.data, options)
    totals = BatchTotals.of(chain.from_iterable(packed))
    frames, _ = share_frames(packed, ranks, totals.numbers())
    flops = _model_flops((len(sample.token_ids) for sample in samples), options)
    return Minibatch(frames, totals, packing_metrics(packed, options), model_flops=flops)


def _model_flops(lengths: Iterable[int], options: PackOptions) -> float:
    """Sums up operations: a sequence of n tokens is n - 1 rows; the backward pass needs twice those of the forward."""
    return 3.0 * sum(options.cost(length - 1) for length in lengths)
