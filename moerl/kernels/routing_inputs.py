"""Rows and choices of a router call: inputs of the sums over them. Runs in trainer processes.

Shape legend: `moerl/kernels/routing.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRows:
    """The rows of a routing map."""

    keys_T: Tensor
    """int64; salts of the rows."""
    counted_T: Tensor
    """bool; True on rows that a checksum is over."""
    real_T: Tensor
    """bool; True on rows that are no padding."""


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Choices of a router call: its own and the recorded one."""

    scores_TE: Tensor
    """Numbers that the router ranks experts by."""
    own_TK: Tensor
    """int64 ids of the experts that the router would have chosen."""
    recorded_TK: Tensor
    """int64 ids of the experts that it was to choose."""
    routed_T: Tensor
    """bool; True on rows with a recorded choice."""
    counted_T: Tensor
    """bool; True on rows that statistics are over."""
