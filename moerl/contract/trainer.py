"""The trainer as the controller sees it: a port, and the reports of its ranks. Torch-free; any process.

Shape legend: R = trained tokens over all ranks, C = columns, L = MoE layers, E = experts, S = statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from moerl.contract.parallel import RankCoordinates
from moerl.contract.ports import PolicyEngine, UpdateDone
from moerl.contract.trajectory import ModelSpec

WORDS = ("key", "position", "layer", "checksum", "rank", "routed")
"""Columns of a table of traced rows, int64: rollout key, token position, MoE layer, checksum of the row there, rank it
was on, 0 if the row was left to the router."""

STATISTICS = ("rows", "flips", "jaccard", "margin_at_flips", "margin_elsewhere")
"""Statistics of natural routing (`moerl.kernels.routing`): sums over rows, in this order: rows compared; rows whose
natural choice is not the recorded one; Jaccard similarity of the two sets; margin of the natural choice if it is not
the recorded one; the same if it is."""

PROFILES = "profile"
"""Folder of traces of single steps in the run directory."""

Stage = Literal["sft", "rl"]


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """Table of the trained tokens of all ranks: float32 [R] each."""

    trainer: NDArray[np.float32]
    """Trainer's log-prob under the support that the token was drawn from, nats."""
    rollout: NDArray[np.float32]
    """Engine's log-prob under the same support, nats."""
    full: NDArray[np.float32]
    """Trainer's log-prob over the whole vocabulary, nats; zeros if it was not asked for."""
    entropy: NDArray[np.float32]
    """Entropy of the distribution of `trainer`, nats."""
    clipped: NDArray[np.float32]
    """1 if the algorithm clipped the token's ratio, else 0."""
    layers_differing: NDArray[np.float32]
    """MoE layers whose natural choice of experts was not the recorded one."""
    weight: NDArray[np.float32]
    """Correction of the token's loss; 1 without one, 0 = left out of the loss."""
    kl: NDArray[np.float32]
    """KL to the reference model, nats; zeros without one."""
    sample: NDArray[np.float32]
    """Index of the token's sample in the minibatch; exact up to 2^24."""
    position: NDArray[np.float32]
    """Position of the token in its sample; exact up to 2^24."""

    @classmethod
    def of(cls, rows_RC: NDArray[np.float32]) -> RowTable:
        """Returns the columns of rows, as ranks report them."""
        return cls(*np.ascontiguousarray(rows_RC.T))


ROW_COLUMNS = tuple(column.name for column in fields(RowTable))
"""Columns of `PassReport.rows_RC`, in this order."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Report of one update."""

    grad_norm: float
    """Norm of the gradient before clipping; 0 if the update was skipped."""
    learning_rate: float
    """Learning rate of this update."""
    skipped: bool = False
    """True if the gradient was not finite, so that weights, moments and schedule are as they were."""
    skipped_in_a_row: int = 0
    """Skipped updates without another between them, up to this one."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A rank's GPU and the peaks of its memory since the last report."""

    name: str
    """Name that the driver gives the GPU."""
    allocated_bytes: int
    """Most bytes of tensors at once."""
    reserved_bytes: int
    """Most bytes that torch's allocator had at once."""


@dataclass(frozen=True, slots=True, eq=False)
class PassReport:
    """Report of one pass over a minibatch, of one rank or of all of them."""

    rows_RC: NDArray[np.float32]
    """float32 [R, C], columns `ROW_COLUMNS`; every trained token once."""
    loss_sum: float | None
    """Sum of the losses of these tokens; None if there are none, as after a pass without an update."""
    rows_verified: int
    """Routing rows proved (rows x layers x phases)."""
    load_LE: NDArray[np.int64]
    """int64 [L, E], tokens per expert."""
    agreement_LS: NDArray[np.float64]
    """float64 [L, S], sums of `STATISTICS`."""
    live_rows_L: NDArray[np.int64]
    """int64 [L], rows left to the router."""
    update: UpdateReport | None = None
    """None after a forward-only pass."""


def sum_reports(reports: Sequence[PassReport]) -> PassReport:
    """Returns the report of all ranks from those of each, in rank order; every rank reports the same update."""
    losses = [report.loss_sum for report in reports if report.loss_sum is not None]
    return PassReport(
        np.concatenate([report.rows_RC for report in reports]),
        sum(losses) if losses else None,
        sum(report.rows_verified for report in reports),
        sum((report.load_LE for report in reports[1:]), reports[0].load_LE),
        sum((report.agreement_LS for report in reports[1:]), reports[0].agreement_LS),
        sum((report.live_rows_L for report in reports[1:]), reports[0].live_rows_L),
        reports[0].update,
    )


@dataclass(frozen=True, slots=True)
class Traced:
    """Rows that reached the dispatchers for one microbatch, over all ranks."""

    dispatched: NDArray[np.int64]
    """int64 [R, 6], columns `WORDS`."""
    recorded: NDArray[np.int64] | None
    """Such rows of the pass whose own routing is kept; None if the trajectories' routing is kept."""


class Trainer(Protocol):
    """A policy and its optimizer on any number of ranks, wherever they run.

    Minibatches are handed over with `load` and named by their number from then on. An error of a rank is raised in the
    controller, and names the rank if there are several (`moerl.contract.commands` has exceptions).
    """

    @property
    def coordinates(self) -> Sequence[RankCoordinates]:
        """Coordinates of each rank, which decide its part of a batch, in rank order; known after `build`."""
        ...

    @property
    def shares_prompts(self) -> bool:
        """True if batches are packed with shared prompts (`trainer.share_prompts`); known after `build`."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user about the device of the ranks, a line each; known after `build`."""
        ...

    @property
    def peak_rss_bytes(self) -> Sequence[int]:
        """Peak resident memory, in bytes, of each process of the trainer other than the controller."""
        ...

    def device_use(self) -> Sequence[DeviceUse]:
        """Returns the GPU of each rank in rank order, with peaks since the last call; empty on CPUs."""
        ...

    def profile(self, step: int) -> None:
        """Has rank 0 record a trace of this step from now on; 0 ends the trace and writes it."""

    def build(self, stage: Stage, model: Path, spec: ModelSpec, engine: PolicyEngine | None = None) -> None:
        """Builds the policy of a stage from a Hugging Face directory, in place of the one before.

        engine: receives the weights that `publish` brings; None for a stage without an engine.
        """

    def load(self, minibatches: Sequence[Sequence[bytes]]) -> None:
        """Hands over a batch: per minibatch one frame for each rank (`moerl.contract.batch_wire`)."""

    def score(self, minibatch: int, *, enforce: bool, prove: bool, full: bool = False) -> PassReport:
        """Runs a forward-only pass. full: score over the full vocabulary, too."""
        ...

    def prepare(self, minibatch: int, *, prove: bool) -> PassReport:
        """Runs before the updates of a batch: keeps its log-probs as the proximal ones, records the trainer's own
        routing if that is the one that is kept, and computes the KL to the reference if rewards need it."""
        ...

    def step(self, minibatch: int, *, prove: bool, advantages: NDArray[np.float32] | None = None) -> PassReport:
        """Runs forward, backward, proof and update.

        advantages: float32 [B], of each sample of the minibatch, in place of those that came with it.

        Raises:
            UnprovedError: routing was not enforced as recorded on some rank. No update was applied.
        """
        ...

    def trace(self, microbatch: int) -> Traced:
        """Runs a slow pass after `UnprovedError` that reports the routing that reached the dispatchers, row by row."""
        ...

    def give_back(self, *, stage: bool) -> None:
        """Gives memory that updates alone need back to the devices, before an engine on them takes it.

        Args:
            stage: copy the state for a `save` before the next update now, while the weights are on the devices.
        """

    def publish(self, version: int, *, verify: bool, done: UpdateDone) -> Callable[[], dict[str, float]]:
        """Begins to bring the weights to the engine.

        Args:
            done: called from any thread once the engine holds the weights, or with the error if it does not get them;
                the ranks may be in their next step by then. The next `publish` has to wait for that call.

        Returns:
            A function that waits until the weights have left the ranks, and returns metrics; call it before the
            trainer's next method.
        """
        ...

    def save(self, name: str, state: dict[str, Any], corrupt: Sequence[str] = ()) -> None:
        """Begins a checkpoint, which the ranks write while training goes on. corrupt: older ones that do not count as
        kept."""

    def poll_save(self, *, wait: bool = False) -> None:
        """Raises `CheckpointError` if the checkpoint in flight failed. With `wait` no checkpoint is in flight
        afterwards."""

    def restore(self, checkpoint: Path) -> None:
        """Loads weights, optimizer and random state of a checkpoint."""

    def export(self, folder: Path, like: Path) -> None:
        """Writes the weights as a Hugging Face directory, with config and tokenizer of `like`."""

    def rewrite(self, model: Path, checkpoint: Path, folder: Path) -> None:
        """Writes the weights of a checkpoint of the SFT stage as a Hugging Face directory."""
