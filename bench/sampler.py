"""The cost of capturing kept sets: the embedded engine's sampler with and without listing them.

`python bench/sampler.py [--json FILE]`. Batch 64, vocabulary 151,936, two threads. The baseline of the claim is the
same sampler without capture (identical draws), in alternating turns. For context, a sampler that sorts the whole
vocabulary and captures nothing. A ratio is the median over pairs of turns, its spread the distance of the quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from _report import Result, json_argument, report
from torch import Tensor

from moerl.contract.trajectory import SamplingParams
from moerl.rollout.sampler import RowParams, sample, seeded_uniforms
from moerl.rollout.sampler_kernel import Cuts

NUM_ROWS, NUM_VOCAB, NUM_THREADS, REPEATS = 64, 151_936, 2, 25
GOAL = 1.05


def peaked_logits() -> Tensor:
    """bfloat16 [NUM_ROWS, NUM_VOCAB]: a long tail and, per row, a few hundred likely tokens; what a model says."""
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(NUM_ROWS, NUM_VOCAB, generator=generator)
    likely = torch.randint(NUM_VOCAB, (NUM_ROWS, 300), generator=generator)
    peaks = 8.0 + 3.0 * torch.randn(NUM_ROWS, 300, generator=generator)
    return logits.scatter_(1, likely, peaks).bfloat16()


def flat_logits() -> Tensor:
    """bfloat16 [NUM_ROWS, NUM_VOCAB]: so flat that every kept set is as large as it may be; the worst case."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_ROWS, NUM_VOCAB, generator=generator).bfloat16()


def sort_all(logits_NV: Tensor, params: RowParams) -> Tensor:
    """The plain sampler: sort, cut jointly, renormalise, draw by multinomial; float32, no kept sets."""
    cuts = Cuts(*(torch.from_numpy(each) for each in params.cuts))
    probs_NV = (logits_NV.float() / cuts.temperature[:, None]).softmax(-1)
    sorted_NV, ids_NV = probs_NV.sort(dim=-1, descending=True)
    before_NV = sorted_NV.cumsum(-1) - sorted_NV
    sorted_NV[before_NV > cuts.top_p[:, None]] = 0.0
    if params.max_top_k:
        sorted_NV[torch.arange(NUM_VOCAB) >= cuts.top_k[:, None]] = 0.0
    return ids_NV.gather(1, torch.multinomial(sorted_NV, 1))


def seconds_in_turns(functions: list[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Seconds of every turn of every function, run one after the other again and again; one turn each to warm up."""
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, own in zip(functions, taken, strict=True):
            start = time.perf_counter()
            function()
            own.append(time.perf_counter() - start)
    return [own[1:] for own in taken]


@torch.inference_mode()
def measure(name: str, params: SamplingParams, logits: Tensor) -> list[Result]:
    rows = RowParams.of([params] * NUM_ROWS)
    u = seeded_uniforms(np.arange(NUM_ROWS, dtype=np.uint64), np.arange(NUM_ROWS))
    kept = float(sample(logits, rows, u).kept_sizes.mean())
    captured, plain = seconds_in_turns(
        [lambda: sample(logits, rows, u), lambda: sample(logits, rows, u, capture=False)], REPEATS
    )
    (sorting,) = seconds_in_turns([lambda: sort_all(logits, rows)], repeats=3)
    ratios = [with_it / without for with_it, without in zip(captured, plain, strict=True)]
    ratio = statistics.median(ratios)
    lower, _, upper = statistics.quantiles(ratios, n=4)

    def shown(what: str, seconds: list[float]) -> Result:
        spread = max(seconds) - min(seconds)
        return Result(f"{name}: {what}", 1e3 * statistics.median(seconds), unit="ms", spread=1e3 * spread)

    return [
        Result(f"{name}: capture / none", ratio, f"<= {GOAL}", ratio <= GOAL, "x", spread=upper - lower),
        shown("capture", captured),
        shown("none", plain),
        shown("full sort", sorting),
        Result(f"{name}: kept per token", kept, unit="ids"),
    ]


def main() -> None:
    json_path = json_argument(__doc__)
    torch.set_num_threads(NUM_THREADS)
    peaked = peaked_logits()
    results = [
        *measure("top_p, top_k 50", SamplingParams(top_p=0.95, top_k=50), peaked),
        *measure("top_p", SamplingParams(top_p=0.95), peaked),
        *measure("top_p, flat", SamplingParams(top_p=0.95), flat_logits()),
    ]
    report(results, json_path)


if __name__ == "__main__":
    main()
