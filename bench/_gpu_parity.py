"""The Megatron policy in bfloat16 against transformers on the same weights. A check of `gpu_check.py`.

Log-probs of recorded tokens inside their kept sets, with the experts that the policy itself chose, against float32; the
limit is that of `_gpu_models.py`. And the policy exports the bits that it loaded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from _gpu_checks import Findings
from _gpu_models import SIZES, apart_results, replays, same_experts, sampled_logprobs, write_checkpoint
from _ranks import as_only_rank
from _report import Result
from _samples import long_tailed_lengths, make_samples, with_routes
from _steps import make_trainer, natural_routes, shares
from numpy.typing import NDArray
from torch import Tensor

from moerl.contract.batch import TrainSample
from moerl.contract.parallel import RankCoordinates
from moerl.trainer.losses import Scorer
from moerl.trainer.trainer import MegatronTrainer

ROWS = {"cuda": 4096, "cpu": 128}
ROW_BUDGET = {"cuda": 1024, "cpu": 96}
MEAN_LENGTH = {"cuda": 200, "cpu": 40}


def check(device: str) -> Findings:
    lengths = long_tailed_lengths(ROWS[device], MEAN_LENGTH[device], ROW_BUDGET[device] - 2, seed=3)
    drawn = make_samples(SIZES[device].spec, lengths, seed=4)
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), device)
        routes, logprobs, changed = as_only_rank(_policy, Path(folder), device, drawn)
        trajectories = [sample.trajectory for sample in with_routes(drawn, routes)]
        exact, half = (replays(model, trajectories, dtype, device) for dtype in (torch.float32, torch.bfloat16))
    ours = sampled_logprobs(trajectories, logprobs)
    theirs, wanted = (sampled_logprobs(trajectories, [each.logprobs for each in found]) for found in (half, exact))
    return Findings(
        [
            *apart_results("policy", ours, theirs, wanted),
            Result("experts of the policy that float32 would choose", same_experts(trajectories, exact), unit="share"),
            Result(
                "experts of the policy that transformers in bfloat16 would choose",
                same_experts(trajectories, half),
                unit="share",
            ),
            Result("exported tensors that differ from the loaded ones", changed, "== 0", changed == 0, "tensors"),
        ]
    )


def _policy(
    layout: RankCoordinates, folder: Path, device: str, drawn: Sequence[TrainSample]
) -> tuple[list[NDArray[np.integer]], list[NDArray[np.float64]], int]:
    """The policy's own experts and, with them, log-probs of every token, [S] each; exported tensors that differ."""
    trainer = make_trainer(layout, folder, SIZES[device].spec, "bfloat16")
    if trainer.model.head_weight().device.type != device:
        raise RuntimeError(f"the policy is on {trainer.model.head_weight().device}, not on {device}")
    routes = natural_routes(trainer, drawn, ROW_BUDGET[device])
    found = replayed_logprobs(trainer, with_routes(drawn, routes), ROW_BUDGET[device])
    return routes, found, differing_tensors(folder, trainer.export())


def replayed_logprobs(
    trainer: MegatronTrainer, samples: Sequence[TrainSample], budget: int
) -> list[NDArray[np.float64]]:
    """The policy's log-probs of every token with the recorded experts and kept sets, proved: [S] of each sample."""
    batches = shares(trainer, samples, budget, replay=True)
    rows = trainer.score(batches, Scorer(batches, keep_mask=True), enforce=True)
    found = [np.zeros(len(sample.trajectory)) for sample in samples]
    for batch, row in zip(batches, rows, strict=True):
        for index in np.unique(batch.sample_index[~batch.is_pad]).tolist():
            mine = (batch.sample_index == index) & ~batch.is_pad
            # Row t scores the token behind it.
            found[index][batch.position_ids[mine] + 1] = row.logprobs_T.double().numpy()[mine]
    return found


def differing_tensors(folder: Path, exported: Iterable[tuple[str, Tensor]]) -> int:
    """Returns how many exported tensors are not, bit for bit, those of the checkpoint."""
    from safetensors.torch import load_file

    loaded = load_file(folder / "model.safetensors")
    found = dict(exported)
    names = loaded.keys() | found.keys()
    return sum(name not in loaded or name not in found or not torch.equal(loaded[name], found[name]) for name in names)
