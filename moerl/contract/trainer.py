"""The trainer as the controller sees it: a port, and what its ranks report. Torch-free; any process.

Shape legend: R = trained tokens over all ranks, C = columns, L = MoE layers, E = experts, S = statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from moerl.contract.parallel import RankCoordinates
from moerl.contract.ports import PolicyEngine, Taken
from moerl.contract.trajectory import ModelSpec

ROW_COLUMNS = ("trainer", "rollout", "full", "entropy", "clipped", "layers_differing", "weight", "kl", "sample")
"""Columns of `PassReport.rows_RC`. sample: index in the minibatch, exact up to 2^24."""

WORDS = ("key", "position", "layer", "checksum", "rank", "routed")
"""Columns of a table of traced rows, int64: rollout key, token position, MoE layer, checksum of the row there, rank it
was on, 0 where the row was left to the router."""

Stage = Literal["sft", "rl"]


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Report of one update.

    grad_norm: before clipping; 0 if the update was skipped. learning_rate: the one that was used. skipped: the gradient
    was not finite, so weights, moments and schedule are as they were. skipped_in_a_row: updates, up to this one.
    """

    grad_norm: float
    learning_rate: float
    skipped: bool = False
    skipped_in_a_row: int = 0


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A rank's GPU. name: as its driver calls it. allocated_bytes, reserved_bytes: most of its memory that tensors, and
    torch's allocator, had at once since the last time that it was asked."""

    name: str
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PassReport:
    """One pass over a minibatch, of one rank or of all of them.

    rows_RC: float32 [R, C], columns `ROW_COLUMNS`; every trained token once. loss_sum: of the losses of these tokens;
    None if there are none, as after a pass without an update.
    rows_verified: routing rows proved (rows x layers x phases). load_LE: int64, tokens per expert. agreement_LS:
    float64, sums of `moerl.algorithms.agreement.STATISTICS`. live_rows_L: int64, rows left to the router. update: None
    after a forward-only pass.
    """

    rows_RC: NDArray[np.float32]
    loss_sum: float | None
    rows_verified: int
    load_LE: NDArray[np.int64]
    agreement_LS: NDArray[np.float64]
    live_rows_L: NDArray[np.int64]
    update: UpdateReport | None = None


def sum_reports(reports: Sequence[PassReport]) -> PassReport:
    """The report of all ranks from those of each, in rank order; every rank reports the same update."""
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
    """Rows that reached the dispatchers for one microbatch, over all ranks: int64 [R, 6], columns `WORDS`.

    recorded: such rows of the pass whose own routing is kept; None if the trajectories' routing is kept.
    """

    dispatched: NDArray[np.int64]
    recorded: NDArray[np.int64] | None


class Trainer(Protocol):
    """A policy and its optimizer on any number of ranks, wherever they run.

    Minibatches are handed over with `load` and named by their number from then on. What a rank raises is raised here,
    and names the rank where there are several.
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
        """Peak resident memory of each process of the trainer other than this one."""
        ...

    def device_use(self) -> Sequence[DeviceUse]:
        """Returns the GPU of each rank in rank order, with peaks since the last call; empty on CPUs."""
        ...

    def profile(self, step: int) -> None:
        """Has rank 0 record a trace of this step from now on; 0 ends the trace and writes it."""
        ...

    def build(self, stage: Stage, model: Path, spec: ModelSpec, engine: PolicyEngine | None = None) -> None:
        """Builds the policy of a stage from a Hugging Face directory, in place of the one before.

        engine: takes the weights that `publish` brings.
        """
        ...

    def load(self, minibatches: Sequence[Sequence[bytes]]) -> None:
        """Hands over a batch: per minibatch one frame for each rank (`moerl.contract.batch_wire`)."""
        ...

    def score(self, minibatch: int, *, enforce: bool, prove: bool, full: bool = False) -> PassReport:
        """A forward-only pass. full: score over the full vocabulary, too."""
        ...

    def prepare(self, minibatch: int, *, prove: bool) -> PassReport:
        """Before the updates of a batch: keeps its log-probs as the proximal ones, records the trainer's own routing
        where that is what is kept, and computes the KL to the reference where rewards need it."""
        ...

    def step(self, minibatch: int, *, prove: bool, advantages: NDArray[np.float32] | None = None) -> PassReport:
        """Forward, backward, proof, update.

        advantages: float32 [B], of each sample of the minibatch, in place of those that came with it.

        Raises:
            UnprovedError: routing was not enforced as recorded on some rank. No update was applied.
        """
        ...

    def trace(self, microbatch: int) -> Traced:
        """After `UnprovedError`: a slow pass that says what reached the dispatchers, row by row."""
        ...

    def give_back(self, *, stage: bool) -> None:
        """Gives memory that updates alone need back to the devices, before an engine on them takes it.

        Args:
            stage: copy the state for a `save` before the next update now, while the weights are on the devices.
        """
        ...

    def publish(self, version: int, *, verify: bool, taken: Taken) -> Callable[[], dict[str, float]]:
        """Begins to bring the weights to the engine.

        Args:
            taken: called once the engine holds them, from any thread; the ranks may be in their next step by then. The
                next `publish` has to wait for it.

        Returns:
            Waits until the weights have left the ranks, and returns metrics; to be called before what comes next.
        """
        ...

    def save(self, name: str, state: dict[str, Any], corrupt: Sequence[str] = ()) -> None:
        """Begins a checkpoint; it is written beside training. corrupt: older ones that do not count as kept."""
        ...

    def poll_save(self, *, wait: bool = False) -> None:
        """Raises `CheckpointError` where the checkpoint in flight failed; with `wait` nothing is in flight after it."""
        ...

    def restore(self, checkpoint: Path) -> None:
        """Takes weights, optimizer and random state of a checkpoint."""
        ...

    def export(self, folder: Path, like: Path) -> None:
        """Writes the weights as a Hugging Face directory, with config and tokenizer of `like`."""
        ...

    def rewrite(self, model: Path, checkpoint: Path, folder: Path) -> None:
        """Writes the weights of a checkpoint of the SFT stage as a Hugging Face directory."""
        ...
