"""Scoring inside kept sets against what others do on a device: time and peak memory. A check of `gpu_check.py`.

Contestants, forward and backward of a mean over the same rows, in bfloat16, temperature 1, until the head's gradient is
in the optimizer's float32 sum of gradients, as in a step: ours add to it, that of others is added afterwards.

- *kept*: `score_kept`, for realistic and for flat sizes of kept sets with uniform ids, and for realistic sizes with
  common ids, each listed by many rows, as real sets have them. Its plan, which is made when a batch is packed, is timed
  apart;
- *dense masked*: all logits, a mask, log-softmax of a masked float32 copy;
- *full*: `score_full`, over the full vocabulary in slabs; *full, overlap*: with a gradient of the head of its own, as
  `trainer.distributed_optimizer=overlap` makes it, that is added afterwards;
- *full KL*: `kl_full` to a reference of half the logits, in slabs; *dense KL*: the same from all logits in float32;
- *Liger-Kernel* (`LigerFusedLinearCrossEntropyLoss`) and *cut-cross-entropy* (`linear_cross_entropy`), over the full
  vocabulary as well: they know no masks. A line says so if they cannot be imported.

The last two are by other parties: if one fails, a line says why, and the rest goes on. Cut-cross-entropy runs twice: by
default, when it leaves out gradients that it takes for small, and *exact*, with all of them. In both it adds gradients
in the dtype of the tensors, here bfloat16; *full* sums in float32.

Limits: the log-probs of *kept* in float32, and that all contestants over the full vocabulary have the same loss. Times
and memory have none: goals of *kept* and *full* are in `_gpu_goals.py`. Peak memory is what a pass holds beyond its
inputs and that sum.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from _gpu_checks import Findings, keep
from _kept import NUM_VOCAB, KeptCase
from _memory import Pass, measure_pass
from _report import Result
from numpy.typing import NDArray
from torch import Tensor

from moerl.kernels.full import FullRows
from moerl.kernels.full_kl import kl_full
from moerl.kernels.head import Head, HeadInputs, VocabShard
from moerl.kernels.kept import KeptRows, kept_arrays
from moerl.kernels.plan import Rows, ScorePlan, plan_full, plan_rows
from moerl.kernels.scores import score_full, score_kept
from moerl.kernels.transfer import transfer

LOGPROB_LIMIT = 1e-4
"""Nats; of sums in float32 over products of bfloat16 numbers, in two orders."""
LOSS_LIMIT = 1e-2
"""Relative; others round logits to bfloat16."""
CASES = {"realistic": ("realistic", 0), "flat": ("flat", 0), "realistic sets with common ids": ("realistic", 50)}
"""By name: distribution of the sizes of kept sets, and the number of common ids."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Setting:
    """T, V, H, and how often each contestant runs."""

    num_rows: int
    num_vocab: int
    width: int
    turns: int


SETTINGS = {"cuda": Setting(4096, NUM_VOCAB, 2048, 7), "cpu": Setting(64, 1024, 64, 2)}


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs that all contestants score."""

    hidden_TH: Tensor
    weight_VH: Tensor
    main_grad_VH: Tensor
    """Sum of gradients of the head, float32."""
    targets_T: Tensor
    case: KeptCase

    def enter(self) -> HeadInputs:
        return self._with(self.weight_VH, self.hidden_TH, self.main_grad_VH)

    def enter_alone(self) -> HeadInputs:
        return self._with(self.weight_VH, self.hidden_TH)

    def enter_reference(self) -> HeadInputs:
        return self._with(self.reference, self.hidden_TH.detach())

    @staticmethod
    def _with(weight_VH: Tensor, hidden_TH: Tensor, main_grad_VH: Tensor | None = None) -> HeadInputs:
        shard = VocabShard.from_group(len(weight_VH), len(weight_VH), None)
        return Head(weight_VH, shard, main_grad_VpH=main_grad_VH).enter(hidden_TH)

    def keep_mask(self) -> Tensor:
        arrays = kept_arrays(self.case.kept, self.case.kept.sizes > 0)
        rows = KeptRows(**transfer(arrays, self.hidden_TH.device))
        mask_TV = torch.zeros(len(self.hidden_TH), len(self.weight_VH), dtype=torch.bool, device=rows.rows.device)
        mask_TV[rows.rows, rows.ids] = True
        return mask_TV

    @property
    def rows(self) -> Rows:
        return Rows(self.case.target_ids_T, self.ones, self.case.kept, self.case.kept.sizes > 0)

    @functools.cached_property
    def plan(self) -> ScorePlan:
        return plan_rows(self.rows, self.enter())

    @functools.cached_property
    def full_plan(self) -> ScorePlan:
        return plan_rows(Rows.open(self.case.target_ids_T, self.ones), self.enter())

    @functools.cached_property
    def kl_plan(self) -> FullRows:
        rows = Rows.open(self.case.target_ids_T, self.ones)
        return plan_full(rows, np.ones(rows.num_rows, np.bool_), self.enter())

    @functools.cached_property
    def reference(self) -> Tensor:
        return (self.weight_VH / 2).detach()

    @property
    def ones(self) -> NDArray[np.float32]:
        """Temperatures, [T]."""
        return np.ones(len(self.hidden_TH), np.float32)


def draw(setting: Setting, device: str) -> dict[str, Inputs]:
    """Draws inputs by name of the case; all cases share hidden states and head."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    hidden_TH = normal(setting.num_rows, setting.width).bfloat16().requires_grad_()
    weight_VH = (0.02 * normal(setting.num_vocab, setting.width)).bfloat16().requires_grad_()
    main_grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
    inputs: dict[str, Inputs] = {}
    for name, (sizes, num_common) in CASES.items():
        case = KeptCase.draw(sizes, setting.num_rows, num_vocab=setting.num_vocab, num_common=num_common)
        inputs[name] = Inputs(hidden_TH, weight_VH, main_grad_VH, torch.from_numpy(case.target_ids_T).to(device), case)
    return inputs


Contestant = Callable[[Inputs], Tensor]
"""Returns the mean over rows of the negative log-prob of the target, or of the KL."""


def kept(inputs: Inputs) -> Tensor:
    return -score_kept(inputs.enter(), inputs.plan).logprobs_T.mean()


def dense_masked(inputs: Inputs) -> Tensor:
    logits_TV = inputs.hidden_TH @ inputs.weight_VH.t()
    masked_TV = logits_TV.float().masked_fill(~inputs.keep_mask(), -torch.inf)
    return -masked_TV.log_softmax(-1).gather(1, inputs.targets_T[:, None]).mean()


def full(inputs: Inputs) -> Tensor:
    return -score_full(inputs.enter(), inputs.full_plan).logprobs_T.mean()


def full_alone(inputs: Inputs) -> Tensor:
    return -score_full(inputs.enter_alone(), inputs.full_plan).logprobs_T.mean()


def full_kl(inputs: Inputs) -> Tensor:
    return kl_full(inputs.enter(), inputs.enter_reference(), inputs.kl_plan).mean()


def dense_kl(inputs: Inputs) -> Tensor:
    log_p_TV = (inputs.hidden_TH.float() @ inputs.weight_VH.float().t()).log_softmax(-1)
    log_q_TV = (inputs.hidden_TH.detach().float() @ inputs.reference.float().t()).log_softmax(-1)
    return (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1).mean()


def liger(inputs: Inputs) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore[reportMissingImports] - not among our requirements

    return LigerFusedLinearCrossEntropyLoss()(inputs.weight_VH, inputs.hidden_TH, inputs.targets_T)


def cut_cross_entropy(inputs: Inputs, **options: Any) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports] - not among our requirements

    return linear_cross_entropy(inputs.hidden_TH, inputs.weight_VH, inputs.targets_T, **options)


OTHERS: dict[str, tuple[str, Contestant]] = {
    "Liger-Kernel": ("liger_kernel", liger),
    "cut-cross-entropy": ("cut_cross_entropy", cut_cross_entropy),
    "cut-cross-entropy, exact": ("cut_cross_entropy", functools.partial(cut_cross_entropy, filter_eps=None)),
}
"""By name: the module that it takes, and the contestant; all need a GPU."""


def check(device: str) -> Findings:
    setting = SETTINGS[device]
    inputs = draw(setting, device)
    contestants: dict[str, tuple[Contestant, str]] = {
        **{f"kept, {case}": (kept, case) for case in CASES},
        "dense masked": (dense_masked, "realistic"),
        "full": (full, "realistic"),
        "full, overlap": (full_alone, "realistic"),
        "full KL": (full_kl, "realistic"),
        "dense KL": (dense_kl, "realistic"),
    }
    race = Race(device)
    for name, (module, contestant) in OTHERS.items():
        if problem := not_importable(module):
            race.left_out.append(f"{name}: {problem}")
        elif device == "cpu":
            race.left_out.append(f"{name}: needs a GPU")
        else:
            contestants[name] = (contestant, "realistic")
    results = context(setting, inputs)
    keep(Findings(results, race.left_out))
    for turn in range(setting.turns + 1):
        for name, (contestant, case) in list(contestants.items()):
            if not race.run(name, contestant, inputs[case], is_timed=turn > 0):
                del contestants[name]
        keep(race.findings(results))
    return race.findings(results)


@dataclass
class Race:
    """Passes of contestants so far."""

    device: str
    passes: dict[str, list[Pass]] = field(default_factory=dict[str, list[Pass]])
    losses: dict[str, float] = field(default_factory=dict[str, float])
    left_out: list[str] = field(default_factory=list[str])
    """Contestants that could not run, each with the reason."""

    def run(self, name: str, contestant: Contestant, inputs: Inputs, *, is_timed: bool) -> bool:
        """Makes a pass; tells whether the contestant stays. The first pass compiles, and is not timed."""
        try:
            taken, self.losses[name] = measure(contestant, inputs, self.device)
        except Exception as error:
            if name not in OTHERS:
                raise
            self.left_out.append(f"{name}: failed: {reason(error)}")
            self.passes.pop(name, None)
            self.losses.pop(name, None)
            return False
        if is_timed:
            self.passes.setdefault(name, []).append(taken)
        return True

    def findings(self, results: list[Result]) -> Findings:
        """Puts what was measured behind other results."""
        return Findings([*results, *table(self.passes), *same_losses(self.losses)], self.left_out)


def context(setting: Setting, inputs: dict[str, Inputs]) -> list[Result]:
    """Compares log-probs of all cases with a dense mask, and measures their plans; sizes are among the results."""
    results = [agreement(f"kept, {name}", each) for name, each in inputs.items()]
    shape = f"{setting.num_rows} rows, vocabulary {setting.num_vocab}, width {setting.width}"
    results.append(Result(f"{shape}: the head's gradient", inputs["flat"].weight_VH.nbytes / MIB, unit="MiB"))
    for name, each in inputs.items():
        results.append(Result(f"listed ids, {name}: {each.case.summary}", len(each.case.kept.ids), unit="ids"))
        results.append(Result(f"plan, {name}: time on the host", plan_seconds(each), unit="s"))
    return results


def plan_seconds(inputs: Inputs) -> float:
    """Measures how long the host checks and sorts the sets, without the transfer's time on the device; the shortest of
    three times."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        plan_rows(inputs.rows, inputs.enter())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def not_importable(module: str) -> str:
    """Returns why a module cannot be imported; empty if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - of other parties, who may raise anything
        return f"cannot be imported: {reason(error)}"
    return ""


def reason(error: Exception) -> str:
    """Returns the kind of an error, and the first line of its text."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def agreement(name: str, inputs: Inputs) -> Result:
    """Log-probs against a dense mask over float32 logits."""
    with torch.no_grad():
        found = score_kept(inputs.enter(), inputs.plan).logprobs_T
        logits_TV = inputs.hidden_TH.float() @ inputs.weight_VH.float().t()
        dense_TV = logits_TV.masked_fill_(~inputs.keep_mask(), -torch.inf).log_softmax(-1)
        largest = float((found - dense_TV.gather(1, inputs.targets_T[:, None])[:, 0]).abs().max())
    holds = largest <= LOGPROB_LIMIT
    return Result(f"{name}: log-probs against dense float32", largest, f"<= {LOGPROB_LIMIT:g}", holds, "nats")


def measure(contestant: Contestant, inputs: Inputs, device: str) -> tuple[Pass, float]:
    """A pass forward and backward, and its loss."""
    losses: list[Tensor] = []

    def step() -> list[Tensor]:
        loss = contestant(inputs)
        losses.append(loss.detach())
        loss.backward()
        with torch.no_grad():
            if inputs.weight_VH.grad is not None:
                inputs.main_grad_VH.add_(inputs.weight_VH.grad)
        inputs.hidden_TH.grad = inputs.weight_VH.grad = None
        return losses

    if device == "cpu":
        return measure_pass(step), float(losses[0])
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
    """Times and memory of each contestant, and by those of *kept, realistic*; a check fails for none of them."""
    results = []
    medians = {name: statistics.median(each.wall_seconds for each in own) for name, own in passes.items()}
    peaks = {name: max(each.peak_bytes for each in own) for name, own in passes.items()}
    for name, own in passes.items():
        seconds = [each.wall_seconds for each in own]
        spread = max(seconds) - min(seconds)
        results.append(Result(f"{name}: time", medians[name], unit="s", spread=spread))
        results.append(Result(f"{name}: peak memory", peaks[name] / MIB, unit="MiB"))
    mine = "kept, realistic"
    for name in passes:
        if name != mine:
            results.append(Result(f"{name} / {mine}: time", medians[name] / medians[mine], unit="ratio"))
            results.append(Result(f"{name} / {mine}: peak memory", peaks[name] / peaks[mine], unit="ratio"))
    if (theirs := "cut-cross-entropy") in passes:
        for what, values in (("time", medians), ("peak memory", peaks)):
            for ours in ("full", "full, overlap"):
                results.append(Result(f"{ours} / {theirs}: {what}", values[ours] / values[theirs], unit="ratio"))
    return results


def same_losses(losses: dict[str, float]) -> list[Result]:
    """Compares losses of other methods with ours, relatively: under masks, of the KL, over the full vocabulary."""
    results = []
    pairs = [("dense masked", "kept, realistic"), ("dense KL", "full KL"), *((other, "full") for other in OTHERS)]
    for name, ours in pairs:
        if name in losses:
            apart = abs(losses[name] / losses[ours] - 1)
            holds = apart <= LOSS_LIMIT
            results.append(Result(f"loss of {name} against {ours}", apart, f"<= {LOSS_LIMIT:g}", holds, "relative"))
    return results
