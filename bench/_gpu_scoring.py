"""Scoring inside kept sets against what others do on a device: time and peak memory. A check of `gpu_check.py`.

Contestants, forward and backward of a mean over the same rows, in bfloat16, temperature 1:

- *kept*: `score_kept`, its copy of the kept sets included, for realistic and for flat sizes of kept sets;
- *dense masked*: all logits, a mask, log-softmax of a masked float32 copy;
- *full*: `score_full`, over the full vocabulary in slabs;
- *Liger-Kernel* (`LigerFusedLinearCrossEntropyLoss`) and *cut-cross-entropy* (`linear_cross_entropy`), over the full
  vocabulary as well: they know no masks. Said where they cannot be imported.

Times and memory are context, without a goal. Limits: the log-probs of *kept* in float32, and that all contestants over
the full vocabulary have the same loss. Peak memory is what a pass holds beyond its inputs: on a GPU the head's gradient
included, which all make; on a CPU without it.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _gpu_checks import Findings
from _kept import NUM_VOCAB, KeptCase
from _memory import Pass, measure_pass
from _report import Result
from torch import Tensor

from moerl.kernels.head import Head, HeadInputs
from moerl.kernels.kept import KeptRows
from moerl.kernels.scores import score_full, score_kept
from moerl.kernels.vocab_parallel import VocabShard

LOGPROB_LIMIT = 1e-4
"""Nats; of sums in float32 over products of bfloat16 numbers, in two orders."""
LOSS_LIMIT = 1e-2
"""Relative; others round logits to bfloat16."""
MIB = 2**20
HEAD_GRADIENT = 2
"""Place of the head's gradient in what a pass returns: loss, gradients of hidden states and head."""


@dataclass(frozen=True, slots=True)
class Setting:
    """T, V, H, and how often each contestant runs."""

    num_rows: int
    num_vocab: int
    width: int
    turns: int


SETTINGS = {"cuda": Setting(4096, NUM_VOCAB, 2048, 7), "cpu": Setting(64, 1024, 64, 2)}


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What all contestants score."""

    hidden_TH: Tensor
    weight_VH: Tensor
    targets_T: Tensor
    temperatures_T: Tensor
    case: KeptCase

    @classmethod
    def draw(cls, setting: Setting, sizes: str, device: str) -> Inputs:
        generator = torch.Generator().manual_seed(0)
        hidden_TH = torch.randn(setting.num_rows, setting.width, generator=generator)
        weight_VH = 0.02 * torch.randn(setting.num_vocab, setting.width, generator=generator)
        case = KeptCase.draw(sizes, setting.num_rows, num_vocab=setting.num_vocab)
        return cls(
            hidden_TH.to(device, torch.bfloat16).requires_grad_(),
            weight_VH.to(device, torch.bfloat16).requires_grad_(),
            torch.from_numpy(case.target_ids_T).to(device),
            torch.ones(setting.num_rows, device=device),
            case,
        )

    def enter(self) -> HeadInputs:
        num_vocab = len(self.weight_VH)
        return Head(self.weight_VH, VocabShard.from_group(num_vocab, num_vocab, None)).enter(self.hidden_TH)

    def keep_mask(self) -> Tensor:
        rows = self.kept_rows()
        mask_TV = torch.zeros(len(self.hidden_TH), len(self.weight_VH), dtype=torch.bool, device=rows.rows.device)
        mask_TV[rows.rows, rows.ids] = True
        return mask_TV

    def kept_rows(self) -> KeptRows:
        return KeptRows.from_csr(self.case.kept, self.case.kept.sizes > 0, self.hidden_TH.device)


Contestant = Callable[[Inputs], Tensor]
"""Returns the mean negative log-prob of the targets."""


def kept(inputs: Inputs) -> Tensor:
    found = score_kept(inputs.enter(), inputs.targets_T, inputs.kept_rows(), inputs.temperatures_T)
    return -found.logprobs_T.mean()


def dense_masked(inputs: Inputs) -> Tensor:
    logits_TV = inputs.hidden_TH @ inputs.weight_VH.t()
    masked_TV = logits_TV.float().masked_fill(~inputs.keep_mask(), -torch.inf)
    return -masked_TV.log_softmax(-1).gather(1, inputs.targets_T[:, None]).mean()


def full(inputs: Inputs) -> Tensor:
    return -score_full(inputs.enter(), inputs.targets_T, inputs.temperatures_T).logprobs_T.mean()


def liger(inputs: Inputs) -> Tensor:
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports] - not among our requirements
        LigerFusedLinearCrossEntropyLoss,
    )

    return LigerFusedLinearCrossEntropyLoss()(inputs.weight_VH, inputs.hidden_TH, inputs.targets_T)


def cut_cross_entropy(inputs: Inputs) -> Tensor:
    from cut_cross_entropy import (  # pyright: ignore[reportMissingImports] - not among our requirements
        linear_cross_entropy,
    )

    return linear_cross_entropy(inputs.hidden_TH, inputs.weight_VH, inputs.targets_T)


OTHERS: dict[str, tuple[str, Contestant]] = {
    "Liger-Kernel": ("liger_kernel", liger),
    "cut-cross-entropy": ("cut_cross_entropy", cut_cross_entropy),
}
"""By name: the module that it takes, and the contestant; both need a GPU."""


def check(device: str) -> Findings:
    setting = SETTINGS[device]
    inputs = {sizes: Inputs.draw(setting, sizes, device) for sizes in ("realistic", "flat")}
    contestants: dict[str, tuple[Contestant, str]] = {
        "kept, realistic": (kept, "realistic"),
        "kept, flat": (kept, "flat"),
        "dense masked": (dense_masked, "realistic"),
        "full": (full, "realistic"),
    }
    left_out = []
    for name, (module, contestant) in OTHERS.items():
        if problem := not_importable(module):
            left_out.append(f"{name}: {problem}")
        elif device == "cpu":
            left_out.append(f"{name}: needs a GPU")
        else:
            contestants[name] = (contestant, "realistic")
    results = [agreement(f"kept, {sizes}", each) for sizes, each in inputs.items()]
    passes: dict[str, list[Pass]] = {name: [] for name in contestants}
    losses: dict[str, float] = {}
    for turn in range(setting.turns + 1):
        for name, (contestant, sizes) in contestants.items():
            taken, losses[name] = measure(contestant, inputs[sizes], device)
            if turn:  # the first one compiles
                passes[name].append(taken)
    shape = f"{setting.num_rows} rows, vocabulary {setting.num_vocab}, width {setting.width}"
    results.append(Result(f"{shape}: the head's gradient", inputs["flat"].weight_VH.nbytes / MIB, unit="MiB"))
    for sizes, each in inputs.items():
        results.append(Result(f"listed ids, {sizes}: {each.case.summary}", len(each.case.kept.ids), unit="ids"))
    return Findings([*results, *table(passes), *same_losses(losses)], left_out)


def not_importable(module: str) -> str:
    """Why; empty where a module can be imported."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"cannot be imported: {error}"
    return ""


def agreement(name: str, inputs: Inputs) -> Result:
    """Log-probs against a dense mask over float32 logits."""
    with torch.no_grad():
        found = score_kept(inputs.enter(), inputs.targets_T, inputs.kept_rows(), inputs.temperatures_T).logprobs_T
        logits_TV = inputs.hidden_TH.float() @ inputs.weight_VH.float().t()
        dense_TV = logits_TV.masked_fill_(~inputs.keep_mask(), -torch.inf).log_softmax(-1)
        largest = float((found - dense_TV.gather(1, inputs.targets_T[:, None])[:, 0]).abs().max())
    holds = largest <= LOGPROB_LIMIT
    return Result(f"{name}: log-probs against dense float32", largest, f"<= {LOGPROB_LIMIT:g}", holds, "nats")


def measure(contestant: Contestant, inputs: Inputs, device: str) -> tuple[Pass, float]:
    """A pass forward and backward, and its loss."""
    losses: list[Tensor] = []

    def step() -> tuple[Tensor, ...]:
        loss = contestant(inputs)
        losses.append(loss.detach())
        return loss.detach(), *torch.autograd.grad(loss, (inputs.hidden_TH, inputs.weight_VH))

    if device == "cpu":
        return measure_pass(step, HEAD_GRADIENT), float(losses[0])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    wall, cpu = time.perf_counter(), time.process_time()
    found = step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    peak = torch.cuda.max_memory_allocated() - before
    return Pass(*seconds, peak), float(found[0])


def table(passes: dict[str, list[Pass]]) -> list[Result]:
    """Times and memory of each contestant, and by those of *kept, realistic*."""
    results = []
    medians = {name: statistics.median(each.wall_seconds for each in own) for name, own in passes.items()}
    peaks = {name: max(each.peak_bytes for each in own) for name, own in passes.items()}
    for name, own in passes.items():
        seconds = [each.wall_seconds for each in own]
        results.append(Result(f"{name}: time", medians[name], unit="s", spread=max(seconds) - min(seconds)))
        results.append(Result(f"{name}: peak memory", peaks[name] / MIB, unit="MiB"))
    mine = "kept, realistic"
    for name in passes:
        if name != mine:
            results.append(Result(f"{name} / {mine}: time", medians[name] / medians[mine], unit="ratio"))
            results.append(Result(f"{name} / {mine}: peak memory", peaks[name] / peaks[mine], unit="ratio"))
    return results


def same_losses(losses: dict[str, float]) -> list[Result]:
    """Of what scores over the full vocabulary, relative to ours; of what scores under masks, too."""
    results = []
    for name, ours in [("dense masked", "kept, realistic"), *((other, "full") for other in OTHERS)]:
        if name in losses:
            apart = abs(losses[name] / losses[ours] - 1)
            holds = apart <= LOSS_LIMIT
            results.append(Result(f"loss of {name} against {ours}", apart, f"<= {LOSS_LIMIT:g}", holds, "relative"))
    return results
