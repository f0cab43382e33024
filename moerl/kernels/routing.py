"""Sums over routing maps: salted checksums, tokens of each expert, and the router's own choice and the recorded one.

Runs in trainer processes, once per router call, and never waits for the device: results are added to tensors that stay
there. On a GPU each function is one kernel (`moerl.kernels.routing_triton`). Integer sums are the same digits on every
device and in every order. Shape legend: T = routing rows of a rank, E experts, K experts per token, C = columns of the
caller's partial sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.contract.routing import EXPERT_PRIME, LAYER_PRIME
from moerl.contract.trainer import STATISTICS
from moerl.kernels.mixing import mix, signed
from moerl.kernels.routing_inputs import Choices, RoutedRows


def add_map_sums(
    routing_map_TE: Tensor, rows: RoutedRows, moe_layer: int, checksum: Tensor | None, load_E: Tensor | None
) -> None:
    """Adds one layer's checksum over the counted rows to `checksum`, and the real rows that each expert gets to
    `load_E`.

    Args:
        routing_map_TE: bool, as the dispatcher receives it. moe_layer: index among the model's MoE layers, from 0.
        checksum: int64 scalar. load_E: int64. Either may be None.
    """
    if routing_map_TE.is_cuda:
        from moerl.kernels import routing_triton

        return routing_triton.add_map_sums(routing_map_TE, rows, moe_layer, checksum, load_E)
    if load_E is not None:
        load_E += (routing_map_TE & rows.real_T[:, None]).sum(0)
    if checksum is not None:
        checksum += _terms(routing_map_TE & rows.counted_T[:, None], rows.keys_T, moe_layer)[1].sum()


def row_checksums(routing_map_TE: Tensor, keys_T: Tensor, moe_layer: int) -> Tensor:
    """Returns the share of every row in the checksum of its layer: int64 [T]."""
    if routing_map_TE.is_cuda:
        from moerl.kernels import routing_triton

        return routing_triton.row_checksums(routing_map_TE, keys_T, moe_layer)
    rows, terms = _terms(routing_map_TE, keys_T, moe_layer)
    return torch.zeros_like(keys_T).index_add_(0, rows, terms)


def _terms(routing_map_TE: Tensor, keys_T: Tensor, moe_layer: int) -> tuple[Tensor, Tensor]:
    """Returns of each routed pair its row, and its term of the checksum."""
    rows, experts = routing_map_TE.nonzero(as_tuple=True)
    slots = (experts + (moe_layer * LAYER_PRIME + 1)) * signed(EXPERT_PRIME)
    return rows, mix(keys_T[rows] + slots)


def partial_statistics(num_layers: int, device: torch.device) -> Tensor:
    """Returns zeros that `add_choices` adds to, float64 [layers, C, statistics]; the statistics are the sums over C."""
    columns = 1
    if device.type == "cuda":
        from moerl.kernels import routing_triton

        columns = routing_triton.PROGRAMS
    return torch.zeros(num_layers, columns, len(STATISTICS), dtype=torch.float64, device=device)


def add_choices(choices: Choices, differing_T: Tensor, statistics_CS: Tensor) -> None:
    """Adds 1 to `differing_T` (int32) for each routed row whose two choices are not the same set of experts, and the
    sums of `moerl.contract.trainer.STATISTICS` over the counted rows to a layer of `partial_statistics`.

    The router would have chosen its own experts without the recorded ones; scores are at hand, so this takes no second
    forward pass. The margin is the score of the last expert of its own less that of the best one left out: how much
    rounding it takes to flip the choice. It is in the units in which the family's router ranks (logits, or biased
    sigmoid scores), and may be negative if groups of experts are chosen first.
    """
    if choices.scores_TE.is_cuda:
        from moerl.kernels import routing_triton

        return routing_triton.add_choices(choices, differing_T, statistics_CS)
    own_TK, recorded_TK = choices.own_TK, choices.recorded_TK
    num_chosen = own_TK.shape[1]
    chosen_TE = torch.zeros_like(choices.scores_TE, dtype=torch.bool).scatter_(1, own_TK, True)
    shared_T = chosen_TE.gather(1, recorded_TK).sum(1)
    differs_T, counted_T = shared_T < num_chosen, choices.counted_T
    differing_T += differs_T & choices.routed_T
    margin_T = torch.zeros(len(own_TK), dtype=torch.float64, device=own_TK.device)
    if num_chosen < choices.scores_TE.shape[1]:
        best_left_out_T = choices.scores_TE.masked_fill(chosen_TE, -torch.inf).amax(1)
        margin_T = (choices.scores_TE.gather(1, own_TK).amin(1) - best_left_out_T).double()
    jaccard_T = shared_T / (2 * num_chosen - shared_T)
    statistics_CS[0] += torch.stack(
        [
            counted_T.sum().double(),
            (differs_T & counted_T).sum().double(),
            torch.where(counted_T, jaccard_T.double(), 0.0).sum(),
            torch.where(differs_T & counted_T, margin_T, 0.0).sum(),
            torch.where(~differs_T & counted_T, margin_T, 0.0).sum(),
        ]
    )
