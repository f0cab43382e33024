"""Scoring inside kept sets against a dense mask: time and peak memory of forward and backward, on one CPU thread.

`python bench/kept_scoring.py [--json FILE]`. Vocabulary 151,936, hidden width 2,048, float32, T of 512 and 2,048 rows.
Contestants, on the same hidden states, head, targets, temperatures and kept sets:

- *kept*: `score_kept`, its plan included, for realistic and for flat sizes of kept sets;
- *dense masked*: all logits, a bool [T, V] mask filled row by row, log-softmax of a masked float32 copy;
- *dense unmasked*: all logits and their log-softmax, masks off;
- *chunked*: `score_full`, masks off.

At T of 32,768 only *kept* runs; what *dense masked* would take there is worked out from its measured bytes per logit.
How common a listed id must be to pay for a matrix product with all rows is measured, too.

They run in turns. A speed-up is the median over turns, by CPU time of the process: one thread that never waits takes as
much wall time on an idle machine. Peak memory counts tensors made by the pass; the head's gradient, which all make, is
listed apart. Needs 12 GB of memory and takes about eight minutes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import numpy as np
import torch
from _kept import NUM_VOCAB, KeptCase
from _memory import Pass, measure_pass
from _report import Result, command_line, json_argument, report
from torch import Tensor

from moerl.kernels import pairs
from moerl.kernels.head import Head, HeadInputs, VocabShard
from moerl.kernels.pairs import SortedPairs
from moerl.kernels.plan import Rows, plan_rows
from moerl.kernels.scores import score_full, score_kept

WIDTH = 2048
TURNS_BY_ROWS = {512: 3, 2048: 1}
LONG_ROWS = 32768
GOAL_ROWS = 512
SHARD = VocabShard.from_group(NUM_VOCAB, NUM_VOCAB, None)
MIB = 2**20


@dataclass
class Inputs:
    """Inputs that all contestants score. cases, targets: by the name of the sets' sizes."""

    hidden_TH: Tensor
    weight_VH: Tensor
    temperatures_T: Tensor
    cases: dict[str, KeptCase]
    targets: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.targets = {name: torch.from_numpy(case.target_ids_T) for name, case in self.cases.items()}

    @classmethod
    def draw(cls, num_rows: int, weight_VH: Tensor) -> Inputs:
        generator = torch.Generator().manual_seed(num_rows)
        hidden_TH = torch.randn(num_rows, WIDTH, generator=generator).requires_grad_()
        temperatures_T = 0.7 + 0.6 * torch.rand(num_rows, generator=generator)
        return cls(
            hidden_TH,
            weight_VH,
            temperatures_T,
            {name: KeptCase.draw(name, num_rows) for name in ("realistic", "flat")},
        )

    def gradients(self, logprobs_T: Tensor) -> tuple[Tensor, ...]:
        """Returns the log-probs, and gradients of hidden states and head for a loss that weighs rows differently."""
        weights_T = torch.linspace(-1.0, 2.0, len(logprobs_T))
        return (
            logprobs_T.detach(),
            *torch.autograd.grad((logprobs_T * weights_T).sum(), (self.hidden_TH, self.weight_VH)),
        )


Contestant = Callable[[], tuple[Tensor, ...]]
HEAD_GRADIENT = 2
"""Place of the head's gradient in what a contestant returns: log-probs, gradients of hidden states and head."""


def kept(inputs: Inputs, sizes: str) -> tuple[Tensor, ...]:
    case = inputs.cases[sizes]
    entered = Head(inputs.weight_VH, SHARD).enter(inputs.hidden_TH)
    rows = Rows(case.target_ids_T, inputs.temperatures_T.numpy(), case.kept, case.kept.sizes > 0)
    return inputs.gradients(score_kept(entered, plan_rows(rows, entered)).logprobs_T)


def dense_masked(inputs: Inputs, sizes: str) -> tuple[Tensor, ...]:
    sets = inputs.cases[sizes].kept
    mask_TV = torch.zeros(len(inputs.hidden_TH), NUM_VOCAB, dtype=torch.bool)
    for row, (start, end) in enumerate(zip(sets.offsets[:-1], sets.offsets[1:], strict=True)):
        mask_TV[row, torch.from_numpy(sets.ids[start:end].astype(np.int64))] = True
    logits_TV = inputs.hidden_TH @ inputs.weight_VH.t()
    masked_TV = logits_TV.float().masked_fill(~mask_TV, float("-inf")) / inputs.temperatures_T[:, None]
    logprobs_T = masked_TV.log_softmax(-1).gather(1, inputs.targets[sizes][:, None])[:, 0]
    del logits_TV, masked_TV
    return inputs.gradients(logprobs_T)


def dense_unmasked(inputs: Inputs) -> tuple[Tensor, ...]:
    logits_TV = inputs.hidden_TH @ inputs.weight_VH.t() / inputs.temperatures_T[:, None]
    logprobs_T = logits_TV.log_softmax(-1).gather(1, inputs.targets["realistic"][:, None])[:, 0]
    del logits_TV
    return inputs.gradients(logprobs_T)


def chunked(inputs: Inputs) -> tuple[Tensor, ...]:
    entered = Head(inputs.weight_VH, SHARD).enter(inputs.hidden_TH)
    rows = Rows.open(inputs.cases["realistic"].target_ids_T, inputs.temperatures_T.numpy())
    return inputs.gradients(score_full(entered, plan_rows(rows, entered)).logprobs_T)


def largest_difference(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> float:
    """Relative to the largest value, over log-probs and gradients."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(first, second, strict=True))


def measure(num_rows: int, weight_VH: Tensor) -> list[Result]:
    inputs = Inputs.draw(num_rows, weight_VH)
    contestants: dict[str, Contestant] = {
        "kept, realistic": partial(kept, inputs, "realistic"),
        "kept, flat": partial(kept, inputs, "flat"),
        "dense masked": partial(dense_masked, inputs, "realistic"),
        "dense unmasked": partial(dense_unmasked, inputs),
        "chunked": partial(chunked, inputs),
    }
    results = []
    if num_rows == GOAL_ROWS:
        difference = largest_difference(contestants["kept, realistic"](), contestants["dense masked"]())
        results.append(
            Result("kept against dense masked: largest difference", difference, "<= 1e-05", difference <= 1e-5)
        )
    # Each loads its code with its first pass; that of the dense ones is small next to their work.
    contestants["kept, realistic"]()
    passes: dict[str, list[Pass]] = {name: [] for name in contestants}
    for _ in range(TURNS_BY_ROWS[num_rows]):
        for name, contestant in contestants.items():
            passes[name].append(measure_pass(contestant, HEAD_GRADIENT))
    for sizes, case in inputs.cases.items():
        results.append(Result(f"listed ids, {sizes}: {case.summary}", len(case.kept.ids), unit="ids"))
    results += _table(passes) + _claims(passes, with_goals=num_rows == GOAL_ROWS)
    for result in results:
        print(f"T={num_rows}: {result}", flush=True)
    return [
        Result(f"T={num_rows}: {each.name}", each.value, each.goal, each.holds, each.unit, each.spread)
        for each in results
    ]


def _table(passes: dict[str, list[Pass]]) -> list[Result]:
    results = []
    for name, own in passes.items():
        for clock in ("cpu", "wall"):
            seconds = [getattr(each, f"{clock}_seconds") for each in own]
            spread = max(seconds) - min(seconds)
            results.append(Result(f"{name}: {clock} time", statistics.median(seconds), unit="s", spread=spread))
        results.append(Result(f"{name}: peak extra memory", max(each.peak_bytes for each in own) / MIB, unit="MiB"))
    return results


def _claims(passes: dict[str, list[Pass]], *, with_goals: bool) -> list[Result]:
    results = []
    for mine in ("kept, realistic", "kept, flat"):
        for theirs in ("dense masked", "dense unmasked", "chunked"):
            by_20 = with_goals and (mine, theirs) == ("kept, realistic", "dense masked")
            results += _speed_up(mine, theirs, passes, 20.0 if by_20 else 1.0)
    peaks = {name: max(each.peak_bytes for each in own) for name, own in passes.items()}
    share = peaks["kept, realistic"] / peaks["dense masked"]
    goal = "<= 0.05" if with_goals else ""
    results.append(Result("extra memory of kept, realistic / dense masked", share, goal, share <= 0.05 or not goal))
    results.append(Result("extra memory of kept, flat / dense masked", peaks["kept, flat"] / peaks["dense masked"]))
    return results


def _speed_up(mine: str, theirs: str, passes: dict[str, list[Pass]], goal: float) -> list[Result]:
    """By CPU time, which decides, and by wall time."""
    results = []
    for clock in ("cpu", "wall"):
        pairs = zip(passes[theirs], passes[mine], strict=True)
        ratios = [getattr(a, f"{clock}_seconds") / getattr(b, f"{clock}_seconds") for a, b in pairs]
        value, spread = statistics.median(ratios), max(ratios) - min(ratios)
        name = f"speed-up of {mine} over {theirs}, {clock} time"
        if clock == "cpu":
            results.append(Result(name, value, f">= {goal:g}", value >= goal, "x", spread))
        else:
            results.append(Result(name, value, unit="x", spread=spread))
    return results


def measure_long(weight_VH: Tensor, short: list[Result]) -> list[Result]:
    """Memory of a long microbatch: ours measured, the dense way from its bytes per logit at two lengths."""
    name = "dense masked: peak extra memory"
    by_rows = {rows: next(r.value for r in short if r.name == f"T={rows}: {name}") for rows in TURNS_BY_ROWS}
    per_logit = [peak * MIB / (rows * NUM_VOCAB) for rows, peak in by_rows.items()]
    apart = max(per_logit) / min(per_logit) - 1
    results = [
        Result("dense masked: bytes per logit", per_logit[-1], unit="bytes"),
        Result("dense masked: bytes per logit, lengths apart", apart, "<= 0.02", apart <= 0.02),
        Result(f"T={LONG_ROWS}: {name}, worked out", per_logit[-1] * LONG_ROWS * NUM_VOCAB / MIB, unit="MiB"),
    ]
    inputs = Inputs.draw(LONG_ROWS, weight_VH)
    for sizes in inputs.cases:
        taken = measure_pass(partial(kept, inputs, sizes), HEAD_GRADIENT)
        results.append(Result(f"T={LONG_ROWS}: kept, {sizes}: peak extra memory", taken.peak_bytes / MIB, unit="MiB"))
        results.append(Result(f"T={LONG_ROWS}: kept, {sizes}: cpu time", taken.cpu_seconds, unit="s"))
    return results


def measure_crossover(weight_VH: Tensor) -> list[Result]:
    """CPU time of ids as sparse products over that as columns of a matrix product, by how many rows list them."""
    num_rows, num_ids, results = 2048, 128, []
    inputs = Head(weight_VH, SHARD).enter(torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(1)))
    for part in (64, 32, 16, 8, 4):
        rows_N = np.arange(0, num_rows, part).repeat(num_ids)
        sorted_pairs = SortedPairs.of(rows_N, np.tile(np.arange(num_ids), num_rows // part), SHARD)
        seconds = []
        for advantage in (0.0, float(num_rows)):
            with mock.patch.object(pairs, "DENSE_ADVANTAGE", advantage):
                plan = pairs.plan_pairs(sorted_pairs, num_rows)
            seconds.append(min(_pair_seconds(inputs, plan) for _ in range(5)))
        name = f"crossover: ids listed by 1/{part} of the rows: sparse over matrix product, cpu time"
        results.append(Result(name, seconds[0] / seconds[1], unit="x"))
    return results


def _pair_seconds(inputs: HeadInputs, plan: pairs.Pairs) -> float:
    """CPU time of logits and gradients of listed pairs."""
    grad_TH, grad_VH = torch.zeros_like(inputs.hidden_TH), torch.zeros_like(inputs.weight_VpH)
    start = time.process_time()
    with torch.no_grad():
        pairs.add_pair_gradients(inputs, plan, pairs.pair_logits(inputs, plan), grad_TH, grad_VH)
    return time.process_time() - start


def head_gradient(weight_VH: Tensor) -> list[Result]:
    """Measures the gradient of the head, [V, H], which every contestant makes: its size, and the CPU time of filling it
    with zeros."""
    with torch.no_grad():
        taken = measure_pass(lambda: [torch.zeros_like(weight_VH)], excluded=0)
    name = "the head's own gradient, made by all"
    return [
        Result(f"{name}: memory, counted apart", weight_VH.nbytes / MIB, unit="MiB"),
        Result(f"{name}: zeros, cpu time, part of all times", taken.cpu_seconds, unit="s"),
    ]


def main() -> None:
    json_path = json_argument(__doc__)
    results = [command_line()]
    torch.set_num_threads(1)
    weight_VH = (0.02 * torch.randn(NUM_VOCAB, WIDTH, generator=torch.Generator().manual_seed(0))).requires_grad_()
    results += head_gradient(weight_VH)
    for num_rows in TURNS_BY_ROWS:
        results += measure(num_rows, weight_VH)
    results += measure_long(weight_VH, results) + measure_crossover(weight_VH)
    report(results, json_path)


if __name__ == "__main__":
    main()
