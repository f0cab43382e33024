"""Training batches: what the buffer hands to the trainer.

Shape legend: T = packed input rows of a microbatch, N = sequences in it, L, K as in trajectory.py. Row t of every
per-row array belongs to input token t, and `target_ids`, `rollout_logprobs`, `kept` and the masks of row t describe the
token that follows it (labels are shifted here, before any slicing). Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moerl.contract.trajectory import KeptSets, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample:
    """One trajectory with what the algorithm attached to it. advantages: float32 [S], 0 where not trained on."""

    trajectory: Trajectory
    advantages: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class TextSample:
    """One supervised sequence. token_ids: int32 [S]; loss_mask: bool [S], True on tokens to be learned."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Packed (THD) sequences, one forward pass, whole or one rank's share of it (`moerl.contract.shares`).

    Pad rows stand at the end of their sequence or form a last sequence of their own, with `loss_mask` False. In a share
    T counts the rows of this rank, `cu_seqlens` and `rollout_keys` stay those of the whole microbatch, and
    `expert_ids` and `routing_checksums` hold this rank's routing rows and layers.

    input_ids, target_ids, position_ids: int64 [T]. cu_seqlens: int32 [N + 1], pad sequence included.
    loss_mask: bool [T]; True where the target was sampled (or is to be learned).
    is_pad: bool [T].
    advantages, rollout_logprobs, temperatures: float32 [T] (zeros, zeros, ones without trajectories).
    versions: int64 [T]; weight version that sampled the target, -1 where it was not sampled.
    kept: CSR over T rows; truncated: bool [T], True where the target was drawn from a listed kept set.
    expert_ids: uint8/uint16 [T, L, K] or None (no replay); pad rows hold distinct, spread ids.
    routed: bool [T]; False where the row's routing was not captured and the trainer's own router decides.
    sample_index: int32 [T]; index of the row's sample in the batch handed to the packer, -1 on pad rows.
    routing_checksums: uint64 [L] or None; the salted checksum per MoE layer over captured rows, computed from the
        trajectories before packing (`moerl.contract.routing`).
    rollout_keys: uint64 [N]; salt of each sequence, 0 for the pad sequence.
    prefix_of: int32 [N], for each sequence the earlier one whose rows come before its own, or -1; None where no rows
        are shared. A prefix has none itself, and positions go on from it.
    context_checksum, kept_checksum: of the tokens that sequences attend to and of kept sets, of the whole microbatch,
        computed from the trajectories before packing (`moerl.contract.batch_checksums`).
    """

    input_ids: NDArray[np.int64]
    target_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    is_pad: NDArray[np.bool_]
    advantages: NDArray[np.float32]
    rollout_logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    kept: KeptSets
    truncated: NDArray[np.bool_]
    sample_index: NDArray[np.int32]
    routed: NDArray[np.bool_]
    expert_ids: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    routing_checksums: NDArray[np.uint64] | None = None
    rollout_keys: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    prefix_of: NDArray[np.int32] | None = None
    context_checksum: int = 0
    kept_checksum: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of this rank: all of the microbatch, or its share."""
        return len(self.input_ids)

    @property
    def num_rows_of_all(self) -> int:
        """Rows of the whole microbatch, over all context-parallel ranks."""
        return int(self.cu_seqlens[-1])


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Totals of a batch of one optimizer step, over all microbatches and ranks.

    num_tokens: trained tokens. num_sequences: sequences with at least one trained token. facts: further numbers about
    the whole batch that the algorithm wants to know, finite, by name.
    """

    num_tokens: float
    num_sequences: float
    facts: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, batches: Iterable[Microbatch]) -> BatchTotals:
        """Returns the totals of whole microbatches, not shares, of all data-parallel ranks; each sample is in one."""
        num_tokens = num_sequences = 0
        for batch in batches:
            num_tokens += int(batch.loss_mask.sum())
            num_sequences += len(np.unique(batch.sample_index[batch.loss_mask]))
        return cls(float(num_tokens), float(num_sequences))

    def numbers(self) -> dict[str, float]:
        """All of it, by name."""
        return {**self.facts, "num_tokens": self.num_tokens, "num_sequences": self.num_sequences}

    @classmethod
    def read(cls, numbers: Mapping[str, float]) -> BatchTotals:
        """From `numbers`."""
        facts = dict(numbers)
        return cls(facts.pop("num_tokens"), facts.pop("num_sequences"), facts)
