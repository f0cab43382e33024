"""The hash of routing checksums on tensors, written independently of `moerl.contract.routing`. Any process; CPU and
GPU."""

from __future__ import annotations

from torch import Tensor

from moerl.contract.routing import MIX_1, MIX_2


def signed(value: int) -> int:
    """Returns a uint64 constant as the int64 with the same bits: torch has no uint64 arithmetic, int64 wraps alike."""
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts int64 right logically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Applies the splitmix64 finaliser to int64 bit patterns."""
    x = (x ^ _shift_right(x, 30)) * signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed(MIX_2)
    return x ^ _shift_right(x, 31)
