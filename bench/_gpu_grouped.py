"""Grouped products of experts by several ways: time of the host and of the device. A check of `gpu_check.py`.

Each way computes both layers of all local experts for the rows of a microbatch, half of the first layer's output being
the second's input, forward and backward: 65,536 rows in groups (8,192 tokens, 8 experts each), 128 groups and 16. Ways:

- *Transformer Engine*: its `GroupedLinear` with one weight per expert, as Megatron builds it; gradients are left to
  autograd and added to ``main_grad`` afterwards, or are added up inside of the product (*fused*). *Native* is one call
  of cuBLASLt for all groups, whose sizes stay on the device; on Hopper it needs cuBLASLt 13.4, which is newer than the
  one of the locked torch. A single grouped weight would need that, too;
- *grouped_mm*: `torch.nn.functional.grouped_mm` over one stacked weight, its gradient added to ``main_grad`` at once;
- *loop*: a product per expert over views of one stacked weight, each gradient added to ``main_grad`` by itself.

Time of the host is from the first call until the last returns, without waiting for the device: the device may not be
slower than that for a step to be limited by it. All ways have equal outputs and gradients within rounding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _gpu_checks import Findings, keep
from _report import Result
from torch import Tensor, nn
from torch.nn import functional

NATIVE = "Transformer Engine, fused, native"
TOLERANCE = 2**-6
"""Relative to the largest value; sums of bfloat16 products, rounded to bfloat16."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes: rows of all groups, hidden width, width of an expert; and timed turns."""

    num_rows: int
    hidden: int
    width: int
    turns: int


SETTINGS = {"cuda": Setting(65_536, 2048, 768, 10), "cpu": Setting(64, 32, 16, 2)}
GROUPS = {"cuda": (128, 16), "cpu": (8, 2)}


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One of the two layers: stacked weights [E, in, out], and the gradient that is kept, float32 [E, in, out]."""

    weights_EIO: Tensor
    main_grad_EIO: Tensor


Product = Callable[[Tensor, int], Tensor]
"""Multiplies rows, [N, in], with the weights of their groups in layer 0 or 1; differentiable by the rows, and adds the
gradient of the weights to ``main_grad`` in the backward pass or in `Way.finish`."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute grouped products."""

    product: Product
    finish: Callable[[], None]
    """Adds gradients that autograd has left to ``main_grad``."""
    main_grads: Callable[[], list[Tensor]]
    """Function that returns ``main_grad`` of both layers, [E, in, out] each."""


def draw(setting: Setting, num_groups: int, device: str) -> tuple[Tensor, list[int], list[Tensor]]:
    """Rows [N, hidden] bfloat16, the sizes of the uneven groups, and the weights of both layers, [E, in, out]."""
    generator = torch.Generator(device).manual_seed(0)
    shares = torch.rand(num_groups, generator=generator, device=device) + 0.5
    sizes = (shares / shares.sum() * setting.num_rows).int().tolist()
    sizes[0] += setting.num_rows - sum(sizes)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    shapes = ((setting.hidden, 2 * setting.width), (setting.width, setting.hidden))
    weights = [(normal(num_groups, *shape) * shape[0] ** -0.5).bfloat16() for shape in shapes]
    return normal(setting.num_rows, setting.hidden).bfloat16(), sizes, weights


def layers_of(weights: Sequence[Tensor]) -> list[Layer]:
    return [Layer(each.clone().requires_grad_(), torch.zeros_like(each, dtype=torch.float32)) for each in weights]


def grouped_mm(sizes: Sequence[int], weights: Sequence[Tensor]) -> Way:
    layers = layers_of(weights)
    ends_E = torch.tensor(sizes).cumsum(0).int().to(weights[0].device)

    def finish() -> None:
        for layer in layers:
            assert layer.weights_EIO.grad is not None
            layer.main_grad_EIO.add_(layer.weights_EIO.grad)
            layer.weights_EIO.grad = None

    def product(rows_NI: Tensor, index: int) -> Tensor:
        return functional.grouped_mm(rows_NI, layers[index].weights_EIO, offs=ends_E)

    return Way(product, finish, lambda: [layer.main_grad_EIO for layer in layers])


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NI: Tensor, weights_EIO: Tensor, main_grad_EIO: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.save_for_backward(rows_NI, weights_EIO)
        ctx.main_grad_EIO, ctx.sizes = main_grad_EIO, sizes
        out_NO = rows_NI.new_empty(len(rows_NI), weights_EIO.shape[2])
        for rows, weight, out in zip(rows_NI.split(sizes), weights_EIO, out_NO.split(sizes), strict=True):
            torch.mm(rows, weight, out=out)
        return out_NO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NO,) = grads
        rows_NI, weights_EIO = ctx.saved_tensors
        grad_NI = torch.empty_like(rows_NI)
        parts = (rows_NI.split(ctx.sizes), grad_NO.split(ctx.sizes), grad_NI.split(ctx.sizes))
        for rows, grad, into, weight, kept in zip(*parts, weights_EIO, ctx.main_grad_EIO, strict=True):
            torch.mm(grad, weight.t(), out=into)
            kept.add_(rows.t() @ grad)
        return grad_NI, None, None, None


def loop(sizes: Sequence[int], weights: Sequence[Tensor]) -> Way:
    layers = layers_of(weights)

    def product(rows_NI: Tensor, index: int) -> Tensor:
        layer = layers[index]
        found = _Loop.apply(rows_NI, layer.weights_EIO, layer.main_grad_EIO, list(sizes))
        assert isinstance(found, Tensor)
        return found

    return Way(product, lambda: None, lambda: [layer.main_grad_EIO for layer in layers])


def transformer_engine(sizes: Sequence[int], weights: Sequence[Tensor], *, fused: bool, native: bool = False) -> Way:
    """Its layers take a weight per group, [out, in] each, and the sizes of groups on the host, or natively on the
    device."""
    import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports] - for GPUs alone

    def weights_of(module: nn.Module) -> list[Any]:
        """Returns the weight of each group; each has a ``main_grad``."""
        return list(module.parameters())

    modules: list[nn.Module] = []
    for stacked_EIO in weights:
        num_groups, wide, out = stacked_EIO.shape
        module = te.GroupedLinear(
            num_groups,
            wide,
            out,
            bias=False,
            params_dtype=torch.bfloat16,
            fuse_wgrad_accumulation=fused,
            use_grouped_tensor=native,
        )
        for index in range(num_groups):
            weight: Any = getattr(module, f"weight{index}")
            weight.data.copy_(stacked_EIO[index].t())
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            weight.grad_added_to_main_grad = False
        modules.append(module)

    def finish() -> None:
        for module in modules:
            for weight in weights_of(module):
                if not fused:
                    weight.main_grad.add_(weight.grad)
                weight.grad = None

    def main_grads() -> list[Tensor]:
        return [torch.stack([weight.main_grad.t() for weight in weights_of(module)]) for module in modules]

    splits_E = torch.tensor(sizes, dtype=torch.int64, device="cuda" if native else "cpu")
    return Way(lambda rows_NI, index: modules[index](rows_NI, splits_E), finish, main_grads)


def has_native_groups() -> bool:
    """Tells whether this device and its cuBLASLt have Transformer Engine's native grouped products."""
    from transformer_engine.pytorch.module import grouped_linear  # pyright: ignore[reportMissingImports] - for GPUs alone

    return grouped_linear.is_module_grouped_tensor_path_supported(None, torch.bfloat16)


def ways(device: str) -> dict[str, Callable[[Sequence[int], Sequence[Tensor]], Way]]:
    found: dict[str, Callable[[Sequence[int], Sequence[Tensor]], Way]] = {"loop": loop, "grouped_mm": grouped_mm}
    if device == "cuda":
        found["Transformer Engine"] = lambda sizes, weights: transformer_engine(sizes, weights, fused=False)
        found["Transformer Engine, fused"] = lambda sizes, weights: transformer_engine(sizes, weights, fused=True)
        if has_native_groups():
            found[NATIVE] = lambda sizes, weights: transformer_engine(sizes, weights, fused=True, native=True)
    return found


def check(device: str) -> Findings:
    setting = SETTINGS[device]
    found_ways = ways(device)
    results: list[Result] = []
    left_out: list[str] = []
    if device == "cpu":
        left_out.append("Transformer Engine and times of the device: need a GPU")
    elif NATIVE not in found_ways:
        left_out.append(f"{NATIVE}: needs cuBLASLt 13.4 on Hopper, 13.3 on Blackwell")
    for num_groups in GROUPS[device]:
        rows, sizes, weights = draw(setting, num_groups, device)
        expected: list[Tensor] | None = None
        for name, make in found_ways.items():
            way = make(sizes, weights)
            found = compute(way, rows)
            expected = expected or found
            title = f"{num_groups} groups, {name}"
            results.append(at_most(title, max(map(difference, found, expected))))
            results += times(title, way, rows, setting.turns, device)
            keep(Findings(results, left_out))
    return Findings(results, left_out)


def step(way: Way, rows_NH: Tensor) -> tuple[Tensor, Tensor]:
    """Both layers forward and backward; the output and the gradient of the rows, [N, hidden] each."""
    rows_NH = rows_NH.detach().requires_grad_()
    first_N2W = way.product(rows_NH, 0)
    out_NH = way.product(first_N2W.chunk(2, dim=1)[0].contiguous(), 1)
    out_NH.backward(rows_NH.detach())
    way.finish()
    assert rows_NH.grad is not None
    return out_NH.detach(), rows_NH.grad


def compute(way: Way, rows_NH: Tensor) -> list[Tensor]:
    """Output, gradient of the rows, and gradients of both layers, of a first step."""
    return [*step(way, rows_NH), *(each.clone() for each in way.main_grads())]


def difference(mine: Tensor, other: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((mine.float() - other.float()).abs().max() / other.float().abs().max())


def at_most(title: str, largest: float) -> Result:
    holds = largest <= TOLERANCE
    return Result(f"{title}: outputs and gradients against the loop", largest, f"<= {TOLERANCE:g}", holds, "relative")


def times(title: str, way: Way, rows_NH: Tensor, turns: int, device: str) -> list[Result]:
    """Medians of a step: of the host, and of the device from the first kernel to the last if it never waits."""
    on_host, on_device = [], []
    for _ in range(turns):
        if device == "cuda":
            on_device.append(_device_seconds(way, rows_NH))
            torch.cuda.synchronize()
        start = time.perf_counter()
        step(way, rows_NH)
        on_host.append(time.perf_counter() - start)
    results = [Result(f"{title}: host", statistics.median(on_host), unit="s", spread=max(on_host) - min(on_host))]
    if on_device:
        spread = max(on_device) - min(on_device)
        results.append(Result(f"{title}: device", statistics.median(on_device), unit="s", spread=spread))
    return results


def _device_seconds(way: Way, rows_NH: Tensor) -> float:
    """The device is kept busy for about 0.1 s first, longer than the host takes to launch everything."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    square = torch.zeros(8192, 8192, device=rows_NH.device, dtype=torch.bfloat16)
    product = torch.empty_like(square)
    torch.cuda.synchronize()
    for _ in range(64):
        torch.mm(square, square, out=product)
    start.record()
    step(way, rows_NH)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
