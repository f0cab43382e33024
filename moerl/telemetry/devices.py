"""Peak speed of GPUs, by the name that their driver gives. Pure; any process."""

from __future__ import annotations

import re

PEAK_FLOPS = {
    r"A100|A800": 312e12,
    r"H100 PCIe|H800 PCIe": 756e12,
    r"H100 NVL|H200 NVL": 835e12,
    r"H100 80GB HBM3|H800|H200|GH200": 989e12,
    r"H20": 148e12,
    r"B200": 2250e12,
}
"""Operations per second in bfloat16, dense, as NVIDIA's data sheets say, by patterns of names of GPUs."""


def peak_flops(device: str) -> float | None:
    """Returns operations per second in bfloat16 of a whole GPU; None for an unknown GPU, or a part of one."""
    if "MIG" in device:
        return None
    return next((peak for names, peak in PEAK_FLOPS.items() if re.search(rf"\b({names})\b", device)), None)
