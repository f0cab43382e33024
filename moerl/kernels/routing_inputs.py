"""Rows and choices of a router call, as the sums over them read them. Runs in trainer processes.

Shape legend: `moerl/kernels/routing.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRows:
    """The rows that a routing map is about. keys_T: int64, their salts. counted_T: bool, rows that a checksum speaks
    of. real_T: bool, rows that are no padding."""

    keys_T: Tensor
    counted_T: Tensor
    real_T: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Choices of a router call: scores_TE, and int64 ids of what it chose and was to choose, own_TK and recorded_TK.

    routed_T: bool, rows with a recorded choice. counted_T: bool, those that statistics are of.
    """

    scores_TE: Tensor
    own_TK: Tensor
    recorded_TK: Tensor
    routed_T: Tensor
    counted_T: Tensor
