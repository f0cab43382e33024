"""Products of half precision as a GPU is asked for them: on fake CUDA tensors, which have no numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moerl.kernels import products


class Calls(TorchDispatchMode):
    """Names of operations, and whether torch may add parts of a product in half precision meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        settings = torch.backends.cuda.matmul
        loose = settings.allow_bf16_reduced_precision_reduction or settings.allow_fp16_reduced_precision_reduction
        self.seen.append((str(func.overloadpacket).removeprefix("aten."), bool(loose)))
        if func is torch.ops.aten.baddbmm.dtype_out:
            return args[0]  # fake tensors do not know it
        return func(*args, **(kwargs or {}))


def product_calls(run: Callable[[], object]) -> list[tuple[str, bool]]:
    with Calls() as calls:
        run()
    return [call for call in calls.seen if call[0] in ("mm", "addmm", "baddbmm", "_to_copy", "add_", "copy_")]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_product_of_half_precision_is_one_call_with_float32_sums(half: torch.dtype) -> None:
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    with FakeTensorMode():
        a, b = torch.empty(8, 4, dtype=half, device="cuda"), torch.empty(4, 6, dtype=half, device="cuda")
        sums, rounded = torch.empty(8, 6, device="cuda"), torch.empty(8, 6, dtype=half, device="cuda")
        out: list[torch.Tensor] = []
        assert product_calls(lambda: out.append(products.matmul(a, b))) == [("mm", False)]
        assert out[0].dtype == torch.float32
        assert product_calls(lambda: products.add_product(sums, a, b)) == [("baddbmm", False)]
        for add in (False, True):
            assert product_calls(lambda add=add: products.write_product(rounded, a, b, add=add)) == [("addmm", False)]
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize("split", [True, False])
def test_a_product_leaves_the_settings_of_the_process_as_they_were(split: bool) -> None:
    settings = torch.backends.cuda.matmul

    def pair() -> tuple[bool, bool]:
        names = ("allow_bf16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction_split_k")
        half, of_split = (bool(getattr(settings, name)) for name in names)
        return half, of_split

    before = pair()
    try:
        settings.allow_bf16_reduced_precision_reduction = (False, split)
        with FakeTensorMode():
            a, b = (torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in ((8, 4), (4, 6)))
            products.matmul(a, b)
        assert pair() == (False, split)
    finally:
        settings.allow_bf16_reduced_precision_reduction = before


def test_products_on_a_cpu_are_float32_and_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=generator).bfloat16() for size in ((8, 4), (4, 6)))
    exact = a.double() @ b.double()
    assert torch.allclose(products.matmul(a, b).double(), exact, rtol=1e-6, atol=1e-6)
    sums, rounded = torch.ones(8, 6), torch.empty(8, 6, dtype=torch.bfloat16)
    products.add_product(sums, a, b)
    assert torch.allclose(sums.double(), 1 + exact, rtol=1e-6, atol=1e-6)
    products.write_product(rounded, a, b, add=False)
    assert torch.equal(rounded, products.matmul(a, b).bfloat16())
    products.write_product(rounded, a, b, add=True)
    assert torch.allclose(rounded.double(), 2 * exact, rtol=2**-6)
