"""How kernels run in their tests."""

from __future__ import annotations

import pytest
from kernel_cases import INTERPRETED, WIDTH

from moerl.kernels import pairs, products


@pytest.fixture(autouse=True)
def implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small slabs, so that every loop runs more than once; Triton where it is interpreted."""
    monkeypatch.setattr(products, "SLAB_ELEMENTS", 5 * WIDTH)
    if INTERPRETED:
        from moerl.kernels import sparse_triton

        monkeypatch.setattr(sparse_triton, "BLOCK_WIDTH", 16)
        monkeypatch.setattr(pairs, "sparse_products", lambda inputs: sparse_triton)
