"""Statistics of natural routing: what the trainer's own routers would have chosen while recorded experts are enforced.

Runs in every trainer rank, in the router hook, on scores that the hook has anyway: no second forward pass. Shape
legend: t rows of a router call, E experts, K experts per token.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@torch.no_grad()
def choice_statistics(scores_tE: Tensor, own_tK: Tensor, recorded_tK: Tensor, counted_t: Tensor) -> Tensor:
    """Returns the sums of `moerl.contract.trainer.STATISTICS`, float64 [5], of one router call.

    The margin is the score of the last natural expert less that of the best one left out: how much rounding it takes
    to flip the choice. It is in the units in which the family's router ranks (logits, or biased sigmoid scores), and
    may be negative if groups of experts are chosen first.

    Args:
        scores_tE: what the router ranks. own_tK, recorded_tK: int64 ids. counted_t: bool, rows to count.
    """
    num_chosen = own_tK.shape[1]
    chosen_tE = torch.zeros_like(scores_tE, dtype=torch.bool).scatter_(1, own_tK, True)
    shared_t = chosen_tE.gather(1, recorded_tK).sum(1)
    flips_t = (shared_t < num_chosen) & counted_t
    stays_t = ~flips_t & counted_t
    jaccard_t = shared_t / (2 * num_chosen - shared_t)
    if num_chosen < scores_tE.shape[1]:
        best_left_out_t = scores_tE.masked_fill(chosen_tE, -torch.inf).amax(1)
        margin_t = (scores_tE.gather(1, own_tK).amin(1) - best_left_out_t).double()
    else:
        margin_t = torch.zeros(len(scores_tE), dtype=torch.float64, device=scores_tE.device)
    return torch.stack(
        [
            counted_t.sum().double(),
            flips_t.sum().double(),
            torch.where(counted_t, jaccard_t.double(), 0.0).sum(),
            torch.where(flips_t, margin_t, 0.0).sum(),
            torch.where(stays_t, margin_t, 0.0).sum(),
        ]
    )


@torch.no_grad()
def differs(own_tK: Tensor, recorded_tK: Tensor, num_experts: int) -> Tensor:
    """Returns bool [t]: True where the two sets of experts are not the same."""
    chosen_tE = torch.zeros(len(own_tK), num_experts, dtype=torch.bool, device=own_tK.device)
    return ~chosen_tE.scatter_(1, own_tK, True).gather(1, recorded_tK).all(1)


def summarize(sums_LS: NDArray[np.float64], *, over_layers: bool = False) -> dict[str, list[float]]:
    """Returns the share of flips, mean Jaccard similarity and mean margins, from sums over all ranks [L, 5]: a number
    for each layer, or one for all layers together. A mean over nothing is 0."""
    sums = torch.from_numpy(sums_LS)
    rows_L, flips_L, jaccard_L, at_flips_L, elsewhere_L = (sums.sum(0, keepdim=True) if over_layers else sums).unbind(1)
    return {
        "disagreement": (flips_L / rows_L.clamp(min=1)).tolist(),
        "jaccard": (jaccard_L / rows_L.clamp(min=1)).tolist(),
        "margin_at_flips": (at_flips_L / flips_L.clamp(min=1)).tolist(),
        "margin_elsewhere": (elsewhere_L / (rows_L - flips_L).clamp(min=1)).tolist(),
    }
