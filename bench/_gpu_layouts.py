"""Layouts of two ranks that share one device, against one rank. A check of `gpu_check.py`.

NCCL refuses such ranks, so their collectives go through the host (`_staged_groups.py`): this shows the layouts, and
Transformer Engine's kernels in them, not NCCL. Each layout loads the same weights in bfloat16 and makes one step of
GRPO with recorded routes and kept sets. Log-probs, and weights after the step, may be `APART_LIMIT` times as far from
those of one rank in float32, on average, as those of one rank in bfloat16 are. Bit for bit: what is exported before the
step is what was loaded, and what a weight update publishes after it is what is exported.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import _staged_groups
import numpy as np
import torch
from _gpu_checks import Findings, keep
from _gpu_collectives import KeepingSink
from _gpu_models import APART_LIMIT, SIZES, read_checkpoint, write_checkpoint
from _gpu_parity import differing_tensors
from _ranks import on_ranks
from _report import Result
from _samples import long_tailed_lengths, make_samples
from _steps import num_trained, policy_loss, shares
from numpy.typing import NDArray
from torch import Tensor

from moerl.config.schema import OptimizerConfig
from moerl.contract.batch import Microbatch, TrainSample
from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.contract.weight_update import UpdateKind, WeightUpdate
from moerl.trainer import platform
from moerl.trainer.collectives import all_gather_bytes
from moerl.trainer.model import ModelOptions
from moerl.trainer.trainer import MegatronTrainer, RowScores
from moerl.weights.gather import SenderGather
from moerl.weights.manifest import encode_shards, merge_shards
from moerl.weights.peers import Peers
from moerl.weights.plan import PlanOptions, make_plan
from moerl.weights.publish import Publisher

LAYOUTS = {
    "TP2": ParallelDims(tensor=2),
    "EP2": ParallelDims(data=2, expert=2),
    "PP2": ParallelDims(pipeline=2),
    "TP2 x EP2": ParallelDims(tensor=2, expert=2),
}
ONE = ParallelDims()
ROWS = {"cuda": 4096, "cpu": 192}
ROW_BUDGET = {"cuda": 1024, "cpu": 96}
MEAN_LENGTH = {"cuda": 200, "cpu": 40}
BUCKET_BYTES = {"cuda": 4 << 20, "cpu": 1 << 14}
STEP_SECONDS = 60.0
NORM_LIMIT = 2.0**-6
"""Largest relative difference of gradient norms: four roundings to bfloat16."""

# Moves weights by more than they are rounded; eps keeps Adam from turning the rounding of small gradients into steps.
OPTIMIZER = OptimizerConfig(
    lr=1e-2,
    min_lr_ratio=1.0,
    schedule="constant",
    warmup_steps=0,
    beta1=0.9,
    beta2=0.95,
    eps=1e-3,
    weight_decay=0.0,
    clip_grad=1.0,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Report of one rank on its step.

    rows: float64 [R, 3], sample, position and log-prob of its rows; over all ranks every row once. rows_verified: of
    the proof. grad_norm: before clipping. changed: exported tensors that differ from the loaded ones, published: those
    of a weight update that differ from the exported ones. weights: after the step, on rank 0.
    """

    rows: NDArray[np.float64]
    rows_verified: int
    grad_norm: float
    changed: int
    published: int
    weights: dict[str, NDArray[np.float32]]


def check(device: str) -> Findings:
    lengths = long_tailed_lengths(ROWS[device], MEAN_LENGTH[device], ROW_BUDGET[device] - 2, seed=5)
    samples = make_samples(SIZES[device].spec, lengths, seed=6)
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(len(LAYOUTS) + 2 if device == "cuda" else 1) as pool,
    ):
        write_checkpoint(Path(folder), device)

        def run(dims: ParallelDims, dtype: str) -> list[Outcome]:
            before = None if dims == ONE else _staged_groups.load
            return on_ranks(dims, _rank, Path(folder), device, samples, dtype, before=before)

        exact, half = (pool.submit(run, ONE, dtype) for dtype in ("float32", "bfloat16"))
        cut = {pool.submit(run, dims, "bfloat16"): name for name, dims in LAYOUTS.items()}
        (wanted,), (one,) = exact.result(), half.result()
        return _compare_all(cut, one, wanted)


def _compare_all(cut: Mapping[Future[list[Outcome]], str], one: Outcome, exact: Outcome) -> Findings:
    """Compares each layout as it ends. One that failed ends the check after the others have been compared."""
    found = Findings([], ["several GPUs and NCCL between ranks: one device cannot show them"])
    failed: list[BaseException] = []
    for ranks in as_completed(cut):
        if (error := ranks.exception()) is not None:
            failed.append(error)
            continue
        found.results.extend(_compare(cut[ranks], ranks.result(), one, exact))
        keep(found)
    if failed:
        raise failed[0]
    return found


def _compare(name: str, ranks: Sequence[Outcome], one: Outcome, exact: Outcome) -> list[Result]:
    rows = np.concatenate([each.rows for each in ranks])
    ours, theirs, wanted = (each[np.lexsort((each[:, 1], each[:, 0]))] for each in (rows, one.rows, exact.rows))
    if not np.array_equal(ours[:, :2], wanted[:, :2]):
        raise RuntimeError(f"{name}: its ranks scored {len(ours)} rows, and not the {len(wanted)} of one rank")
    verified = sum(each.rows_verified for each in ranks)
    norms = max(abs(each.grad_norm / one.grad_norm - 1) for each in ranks)
    changed, published = (sum(getattr(each, what) for each in ranks) for what in ("changed", "published"))
    return [
        _apart(f"{name}: log-probs", *(each[:, 2] for each in (ours, theirs, wanted))),
        _apart(f"{name}: weights after a step", *(_flat(each.weights) for each in (ranks[0], one, exact))),
        Result(
            f"{name}: norm of the gradient, apart from one rank",
            norms,
            f"<= {NORM_LIMIT:g}",
            norms <= NORM_LIMIT,
            "share",
        ),
        Result(
            f"{name}: routing rows proved, one rank {one.rows_verified}",
            verified,
            f"== {one.rows_verified}",
            verified == one.rows_verified > 0,
            "rows",
        ),
        Result(f"{name}: exported tensors that differ from the loaded ones", changed, "== 0", changed == 0, "tensors"),
        Result(
            f"{name}: published tensors that differ from the exported ones",
            published,
            "== 0",
            published == 0,
            "tensors",
        ),
    ]


def _apart(name: str, ours: NDArray[np.floating], theirs: NDArray[np.floating], exact: NDArray[np.floating]) -> Result:
    """Mean distances to float32, of a layout in bfloat16 and of one rank in bfloat16."""
    ratio = float(np.abs(ours - exact).mean() / np.abs(theirs - exact).mean())
    what = f"{name}: mean distance to float32 / that of one rank in bfloat16"
    return Result(what, ratio, f"<= {APART_LIMIT:g}", ratio <= APART_LIMIT, "ratio")


def _flat(weights: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate([weights[name].ravel() for name in sorted(weights)])


# --- in a rank -------------------------------------------------------------------------------------------------------


def _rank(layout: RankCoordinates, folder: Path, device: str, samples: Sequence[TrainSample], dtype: str) -> Outcome:
    model = read_checkpoint(folder, device)
    trainer = MegatronTrainer(model, layout, ModelOptions(dtype=dtype), OPTIMIZER)
    if trainer.model.chunks[0].decoder.layers[0].mlp.router.weight.device.type != device:  # pyright: ignore
        raise RuntimeError(f"the policy of rank {layout.rank} is not on {device}")
    changed = differing_tensors(folder, ((name, each.bfloat16()) for name, each in trainer.export()))
    batches = shares(trainer, samples, ROW_BUDGET[device], replay=True)
    report = trainer.step(batches, policy_loss(trainer, batches, num_trained(samples)), enforce=True)
    assert report.update is not None
    exported = {name: tensor.clone() for name, tensor in trainer.export()}
    return Outcome(
        rows=_rows(trainer, batches, report.rows),
        rows_verified=report.rows_verified,
        grad_norm=report.update.grad_norm,
        changed=changed,
        # A weight update brings tensors as the checkpoint has them, in bfloat16.
        published=_published(trainer, device, exported) if dtype == "bfloat16" else 0,
        weights={name: each.float().numpy() for name, each in exported.items()} if layout.rank == 0 else {},
    )


def _rows(trainer: MegatronTrainer, batches: Sequence[Microbatch], scored: Sequence[RowScores]) -> NDArray[np.float64]:
    if not scored or trainer.layout.tensor_rank != 0:
        return np.zeros((0, 3))
    parts = [
        np.stack([batch.sample_index, batch.position_ids, row.logprobs_T.double().numpy()], 1)[batch.loss_mask]
        for batch, row in zip(batches, scored, strict=True)
    ]
    return np.concatenate(parts).astype(np.float64)


def _published(trainer: MegatronTrainer, device: str, exported: dict[str, Tensor]) -> int:
    """Tensors of a weight update to a sink of rank 0 that are not, bit for bit, what was exported."""
    layout = trainer.layout
    everyone = all_gather_bytes(encode_shards(trainer.shards()))
    manifest = merge_shards(trainer.model.description, layout.dims, everyone)
    plan = make_plan(manifest, PlanOptions((0,), 2, BUCKET_BYTES[device]))
    peers = Peers(layout.rank, platform.device(), STEP_SECONDS)
    sink = KeepingSink() if layout.rank == 0 else None
    Publisher(plan, SenderGather(plan, peers), peers, sink).publish(
        trainer.shards(), WeightUpdate(1, UpdateKind.FULL, plan.tensors())
    )
    if sink is None:
        return 0
    names = sink.tensors.keys() | exported.keys()
    return sum(
        name not in sink.tensors or name not in exported or not torch.equal(sink.tensors[name], exported[name])
        for name in names
    )
