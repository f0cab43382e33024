"""Training batches: what `moerl.batching` packs for the trainer.

Shape legend: T = packed input rows of a microbatch, N = sequences in it, L, K as in trajectory.py. Row t of every
per-row array belongs to input token t, and `target_ids`, `rollout_logprobs`, `kept` and the masks of row t describe the
token that follows it (labels are shifted here, before any slicing). Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.trajectory import KeptSets, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample:
    """One trajectory with what the algorithm attached to it."""

    trajectory: Trajectory
    """The tokens, with their routing and kept sets."""
    advantages: NDArray[np.float32]
    """float32 [S]; 0 on tokens that are not trained on."""


@dataclass(frozen=True, slots=True, eq=False)
class TextSample:
    """One supervised sequence."""

    token_ids: NDArray[np.int32]
    """int32 [S]."""
    loss_mask: NDArray[np.bool_]
    """bool [S]; True on tokens to be learned."""


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Packed (THD) sequences, one forward pass, whole or one rank's share of it (`moerl.contract.shares`).

    Pad rows stand at the end of their sequence or form a last sequence of their own, with `loss_mask` False. In a share
    T counts the rows of this rank, `cu_seqlens` and `rollout_keys` stay those of the whole microbatch, and `expert_ids`
    and `routing_checksums` hold this rank's routing rows and layers.
    """

    input_ids: NDArray[np.int64]
    """int64 [T]; 0 on pad rows."""
    target_ids: NDArray[np.int64]
    """int64 [T]; the token after each input, 0 on pad rows."""
    position_ids: NDArray[np.int64]
    """int64 [T]; go on from the prefix of the row's sequence (`prefix_of`)."""
    cu_seqlens: NDArray[np.int32]
    """int32 [N + 1]; first row of each sequence and the end, pad sequence included."""
    loss_mask: NDArray[np.bool_]
    """bool [T]; True where the target was sampled (or is to be learned)."""
    is_pad: NDArray[np.bool_]
    """bool [T]; True on rows without a token of a sample."""
    advantages: NDArray[np.float32]
    """float32 [T]; zeros without trajectories."""
    rollout_logprobs: NDArray[np.float32]
    """float32 [T], nats; zeros without trajectories."""
    versions: NDArray[np.int64]
    """int64 [T]; weight version that sampled the target, -1 if it was not sampled."""
    temperatures: NDArray[np.float32]
    """float32 [T]; ones without trajectories."""
    kept: KeptSets
    """CSR over T rows."""
    truncated: NDArray[np.bool_]
    """bool [T]; True where the target was drawn from a listed kept set."""
    sample_index: NDArray[np.int32]
    """int32 [T]; index of the row's sample in the batch handed to the packer, -1 on pad rows."""
    routed: NDArray[np.bool_]
    """bool [T]; False where the row's routing was not captured and the trainer's own router decides."""
    expert_ids: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """uint8/uint16 [T, L, K], pad rows hold distinct, spread ids; None without replay."""
    routing_checksums: NDArray[np.uint64] | None = None
    """uint64 [L]; the salted checksum per MoE layer over captured rows, computed from the trajectories before packing
    (`moerl.contract.routing`). None without replay."""
    scores: Mapping[str, NDArray[np.float32]] = field(default_factory=dict[str, NDArray[np.float32]])
    """By name float32 [T]; side scores of the target that the algorithm needs, 0 on pad rows and not sampled ones."""
    rollout_keys: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    """uint64 [N]; salt of each sequence, 0 for the pad sequence."""
    prefix_of: NDArray[np.int32] | None = None
    """int32 [N]; for each sequence the earlier one whose first rows come before its own, or -1. A prefix has none
    itself. None if no rows are shared."""
    prefix_rows: NDArray[np.int32] | None = None
    """int32 [N]; number of rows of the prefix that come before the own ones, 0 without a prefix. None if no rows are
    shared."""
    context_checksum: int = 0
    """Checksum over the tokens that sequences of the whole microbatch attend to, computed from the trajectories before
    packing (`moerl.contract.batch_checksums`)."""
    kept_checksum: int = 0
    """Checksum over the kept sets of the whole microbatch, computed from the trajectories likewise."""

    @property
    def num_rows(self) -> int:
        """Rows of this rank: all of the microbatch, or its share."""
        return len(self.input_ids)

    @property
    def rows_before(self) -> NDArray[np.int64]:
        """int64 [N]; rows that come before the own ones of each sequence."""
        if self.prefix_rows is None:
            return np.zeros(len(self.cu_seqlens) - 1, np.int64)
        return self.prefix_rows.astype(np.int64)

    @property
    def num_rows_of_all(self) -> int:
        """Rows of the whole microbatch, over all context-parallel ranks."""
        return int(self.cu_seqlens[-1])


INT_ROWS = ("input_ids", "target_ids", "position_ids", "versions")
FLOAT_ROWS = ("advantages", "rollout_logprobs", "temperatures")
FLAG_ROWS = ("loss_mask", "is_pad", "truncated", "routed")
"""Fields of a microbatch that have a value a row, besides `sample_index`."""
UNSCORED: Mapping[str, tuple[type[np.generic], float]] = {
    "advantages": (np.float32, 0),
    "rollout_logprobs": (np.float32, 0),
    "versions": (np.int64, -1),
    "temperatures": (np.float32, 1),
    "truncated": (np.bool_, False),
}
"""Fields of these that the loss alone needs: the dtype, and the value of a row that is not scored."""


def unscored(num_rows: int) -> dict[str, Any]:
    """Returns the fields of `UNSCORED` of rows none of which is scored."""
    return {name: np.full(num_rows, value, dtype) for name, (dtype, value) in UNSCORED.items()}


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Totals of a batch of one optimizer step, over all microbatches and ranks."""

    num_tokens: float
    """Trained tokens."""
    num_sequences: float
    """Sequences with at least one trained token."""
    facts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers about the whole batch that the algorithm needs, finite, by name."""

    @classmethod
    def of(cls, batches: Iterable[Microbatch]) -> BatchTotals:
        """Returns the totals of whole microbatches, not shares, of all data-parallel ranks; each sample is in one."""
        num_tokens = num_sequences = 0
        for batch in batches:
            num_tokens += int(batch.loss_mask.sum())
            num_sequences += len(np.unique(batch.sample_index[batch.loss_mask]))
        return cls(float(num_tokens), float(num_sequences))

    def numbers(self) -> dict[str, float]:
        """Returns all totals and facts by name."""
        return {**self.facts, "num_tokens": self.num_tokens, "num_sequences": self.num_sequences}

    @classmethod
    def read(cls, numbers: Mapping[str, float]) -> BatchTotals:
        """Restores the totals from what `numbers` returned."""
        facts = dict(numbers)
        return cls(facts.pop("num_tokens"), facts.pop("num_sequences"), facts)
