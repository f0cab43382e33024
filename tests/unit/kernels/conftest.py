"""How kernels run in their tests."""

from __future__ import annotations

import pytest
from kernel_cases import INTERPRETED, WIDTH

from moerl.kernels import products


@pytest.fixture(autouse=True)
def implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small slabs, so that every loop runs more than once; Triton where it is interpreted."""
    monkeypatch.setattr(products, "SLAB_ELEMENTS", 5 * WIDTH)
    if INTERPRETED:
        from moerl.kernels import device_pairs, slabs_triton, sparse_triton

        monkeypatch.setattr(products, "on_device", lambda device: True)
        monkeypatch.setattr(device_pairs, "LONGEST", 3)
        for name, value in {"DOT_WIDTH": 16, "DOT_PAIRS": 4, "SUM_WIDTH": 16, "SUM_PAIRS": 2, "SET_BLOCK": 8}.items():
            monkeypatch.setattr(sparse_triton, name, value)
        monkeypatch.setattr(slabs_triton, "BLOCK_COLUMNS", 4)
