"""From samples to each rank's microbatches: packed and cut on the main rank, received by every rank as its own share.

Runs in every trainer rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moerl.buffer.cost import sequence_flops
from moerl.buffer.packing import PackOptions, Uncaptured, pack_for_ranks, pack_text_for_ranks, packing_metrics
from moerl.buffer.rows import Padding
from moerl.config.schema import RunConfig
from moerl.contract.batch import Microbatch, TextSample, TrainSample
from moerl.contract.batch_wire import decode_batches, share_frames
from moerl.contract.frame import WireLimits
from moerl.contract.parallel import RankCoordinates
from moerl.contract.shares import cut_share
from moerl.contract.trajectory import ModelSpec
from moerl.errors import ContractError
from moerl.models.description import ModelDescription
from moerl.orchestration.exchange import gather_layouts, raise_together, scatter_bytes
from moerl.trainer.trainer import MegatronTrainer

_SHARES = WireLimits(max_frame_bytes=64 << 30, max_payload_bytes=128 << 30)
"""Of a frame that the main rank made: thousands of long trajectories with the routing of every token."""


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """What one optimizer step works on.

    batches: this rank's shares. num_tokens: trained tokens of all ranks. metrics: of packing and exchange, on the main
    rank. samples: on the main rank, all of them; empty elsewhere.
    """

    batches: list[Microbatch]
    num_tokens: float
    metrics: dict[str, float]
    samples: Sequence[TrainSample] = ()


def pack_options(config: RunConfig, layout: RankCoordinates, model: ModelDescription) -> PackOptions:
    """How sequences share microbatches in this run: the layout's padding, ranks balanced by operations."""
    return PackOptions(
        config.trainer.microbatch_tokens,
        Padding.of(layout.dims),
        cost=sequence_flops(model),
        count_multiple=layout.dims.microbatch_multiple,
    )


class BatchExchange:
    """Hands minibatches of trajectories from the main rank to all.

    Args:
        trainer: whose shares these are; a collective.
        options: how to pack.
        uncaptured: what happens to rows without captured routing, `keep_routing.uncaptured`.
    """

    def __init__(self, trainer: MegatronTrainer, options: PackOptions, config: RunConfig) -> None:
        self._layouts = gather_layouts(trainer.layout)
        self._spec: ModelSpec = trainer.spec
        self._dims, self._options = trainer.layout.dims, options
        self._uncaptured: Uncaptured = config.keep_routing.uncaptured

    def share(self, minibatches: Sequence[Sequence[TrainSample]] | None) -> list[Minibatch]:
        """Every rank's shares of the minibatches that the main rank gives; a collective.

        Args:
            minibatches: on the main rank. None there means that it failed and its own error is on its way.

        Raises:
            MoerlError: on the other ranks, where the main rank failed, here or before.
            ContractError: on every rank, where what arrived at one of them cannot be its share.
        """
        shared: list[Minibatch] = []
        count = 1
        while len(shared) < count:
            samples = minibatches[len(shared)] if minibatches else ()
            frames, metrics = None, {}
            try:
                if minibatches:
                    frames, metrics = self._frames(samples, len(minibatches))
            finally:
                # The others wait for a frame, or to be told that none will come.
                frame = scatter_bytes(frames)
            if not frame:
                return []
            batches, facts = self._decode(frame)
            count = int(facts["minibatches"])
            shared.append(Minibatch(batches, facts["num_tokens"], metrics, samples))
        return shared

    def _decode(self, frame: bytes) -> tuple[list[Microbatch], dict[str, float]]:
        try:
            decoded, problem = decode_batches(frame, spec=self._spec, limits=_SHARES), None
        except ContractError as error:
            decoded, problem = ([], {}), error
        raise_together(problem)
        return decoded

    def _frames(self, samples: Sequence[TrainSample], count: int) -> tuple[list[bytes], dict[str, float]]:
        ranks = pack_for_ranks(samples, self._dims.data, self._options, replay=True, uncaptured=self._uncaptured)
        num_tokens = sum(int(batch.loss_mask.sum()) for batches in ranks for batch in batches)
        frames, metrics = share_frames(ranks, self._layouts, {"num_tokens": num_tokens, "minibatches": count})
        return frames, metrics | packing_metrics(ranks, self._options)


def share_text(samples: Sequence[TextSample], trainer: MegatronTrainer, options: PackOptions) -> Minibatch:
    """This rank's shares of supervised sequences, which every rank has."""
    ranks = pack_text_for_ranks(samples, trainer.layout.dims.data, options)
    num_tokens = sum(int(batch.loss_mask.sum()) for batches in ranks for batch in batches)
    shares = [cut_share(batch, trainer.layout) for batch in ranks[trainer.layout.data_rank]]
    return Minibatch(shares, float(num_tokens), packing_metrics(ranks, options))
