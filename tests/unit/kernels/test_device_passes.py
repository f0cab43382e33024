"""Work of a pass on a GPU, at the size of a real head: tensors on `meta`, which fail if somebody asks for a value.

Kernels are counted instead of launched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moerl.contract.trajectory import KeptSets
from moerl.kernels import products
from moerl.kernels.full_kl import kl_full
from moerl.kernels.head import Head, HeadInputs, VocabShard
from moerl.kernels.kept import kl_kept
from moerl.kernels.plan import Rows, plan_full, plan_rows
from moerl.kernels.scores import listed_logprobs, score_full, score_kept

triton = pytest.importorskip("triton")

from moerl.kernels import slabs_triton, sparse_triton  # noqa: E402

ROWS, VOCAB, WIDTH = 4096, 151_936, 2048
NO_LAUNCH = {
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
    *("view", "_unsafe_view", "t", "transpose", "slice", "select", "detach", "expand", "unsqueeze", "alias"),
    *("as_strided", "unbind"),
}
"""Operations that make or view memory alone."""


class Launches(TorchDispatchMode):
    """Counts what would start on a device, by name; bytes of what is filled with zeros, and of the largest tensor that
    is made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.zeroed_bytes = self.largest_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).removeprefix("aten.")
        if name not in NO_LAUNCH:
            self.names[name] += 1
        if name in ("zeros_like", "new_zeros", "zero_", "zeros"):
            self.zeroed_bytes += out.nbytes
        if isinstance(out, Tensor) and not any(each.alias_info for each in func._schema.returns):
            self.largest_bytes = max(self.largest_bytes, out.nbytes)
        return out

    def total(self) -> int:
        return sum(self.names.values())


class Recorder:
    """Stands in for a Triton kernel."""

    launches: ClassVar[list[tuple[Any, ...]]] = []
    """Launches of the running test: name of the kernel, sizes that it is compiled anew for (by whether 16 divides
    them), and constants."""

    def __init__(self, name: str, seen: list[str], kernel: Any) -> None:
        self._name, self._seen, self._kernel = name, seen, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < size < 2**31 for size in grid)
        assert all(size < 2**16 for size in grid[1:])
        return self._launch

    def _launch(self, *args: Any, **constants: Any) -> None:
        self._seen.append(self._name)
        sizes = [
            (parameter.name, value == 1, value % 16 == 0)
            for parameter, value in zip(self._kernel.params, args, strict=False)
            if isinstance(value, int) and not parameter.do_not_specialize
        ]
        self.launches.append((self._name, *sizes, *constants.items()))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch, implementation: None) -> list[str]:
    """Names of the kernels started so far."""
    seen: list[str] = []
    for module in (sparse_triton, slabs_triton):
        for name in vars(module):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Recorder(name, seen, getattr(module, name)))
    Recorder.launches.clear()
    monkeypatch.setattr(products, "on_device", lambda device: device.type == "meta")
    monkeypatch.setattr(products, "SLAB_ELEMENTS", 2**21)
    return seen


def leaves(num_rows: int = ROWS) -> tuple[Tensor, Tensor]:
    hidden_TH, weight_VH = (torch.empty(size, WIDTH, dtype=torch.bfloat16, device="meta") for size in (num_rows, VOCAB))
    return hidden_TH.requires_grad_(), weight_VH.requires_grad_()


def head_inputs(hidden_TH: Tensor, weight_VH: Tensor, main_grad_VH: Tensor | None = None) -> HeadInputs:
    shard = VocabShard.from_group(VOCAB, VOCAB, None)
    return Head(weight_VH, shard, main_grad_VpH=main_grad_VH).enter(hidden_TH)


def drawn_rows(mean_size: int, shared: int = 0) -> Rows:
    """Sets of uniform ids; the first `shared` ids are in all of them."""
    rng = np.random.default_rng(0)
    listed = [
        np.unique(np.concatenate([np.arange(shared), rng.integers(shared, VOCAB, size)]))
        for size in rng.integers(1, 2 * mean_size, ROWS)
    ]
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in listed])]).astype(np.int64)
    sets = KeptSets(offsets, np.concatenate(listed).astype(np.int32))
    targets_T = np.array([ids[0] for ids in listed], np.int64)
    return Rows(targets_T, np.ones(ROWS, np.float32), sets, np.ones(ROWS, np.bool_))


@pytest.mark.parametrize(
    "ask", [Tensor.item, Tensor.tolist, Tensor.nonzero, Tensor.unique, Tensor.cpu, lambda x: x[x > 0]]
)
def test_a_question_to_the_device_fails_in_these_tests(ask: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        ask(torch.zeros(1, device="meta"))


def test_a_pass_in_kept_sets_is_five_kernels_and_waits_for_nothing(kernels: list[str]) -> None:
    hidden_TH, weight_VH = leaves()
    plan = plan_rows(drawn_rows(8), head_inputs(hidden_TH, weight_VH))
    with Launches() as launches:
        scores = score_kept(head_inputs(hidden_TH, weight_VH), plan)
        torch.autograd.backward([scores.logprobs_T, scores.entropy_T], [torch.empty_like(scores.logprobs_T)] * 2)
    assert kernels == ["dots_kernel", "sets_kernel", "sets_gradient_kernel", "sums_kernel", "sums_kernel"]
    assert launches.total() + len(kernels) <= 12, launches.names
    assert launches.zeroed_bytes == 0, "every row of both gradients is written by a kernel, once"


def test_ids_that_all_rows_list_add_a_few_products(kernels: list[str]) -> None:
    hidden_TH, weight_VH = leaves()
    plan = plan_rows(drawn_rows(8, shared=50), head_inputs(hidden_TH, weight_VH))
    with Launches() as launches:
        score_kept(head_inputs(hidden_TH, weight_VH), plan).logprobs_T.sum().backward()
    assert len(kernels) == 5
    assert launches.names["mm"] == 3
    assert launches.total() <= 40, launches.names


def test_a_row_that_lists_a_thousand_times_more_than_others_is_summed_in_parts(kernels: list[str]) -> None:
    hidden_TH, weight_VH = leaves()
    rows = drawn_rows(8)
    everything = np.arange(VOCAB, dtype=np.int32)
    offsets = rows.kept.offsets.copy()
    sets = KeptSets(
        np.concatenate([[0], offsets[1:] + VOCAB - offsets[1]]),
        np.concatenate([everything, rows.kept.ids[offsets[1] :]]),
    )
    plan = plan_rows(replace(rows, kept=sets), head_inputs(hidden_TH, weight_VH))
    score_kept(head_inputs(hidden_TH, weight_VH), plan).logprobs_T.sum().backward()
    assert kernels[3:] == ["sums_kernel", "sums_kernel", "parts_kernel", "sums_kernel"]


def test_a_pass_over_the_full_vocabulary_is_two_launches_a_slab_and_four_back(kernels: list[str]) -> None:
    hidden_TH, weight_VH = leaves()
    num_slabs = -(-VOCAB // products.slab_columns(ROWS, WIDTH))
    assert num_slabs == 75
    plan = plan_rows(Rows.open(np.zeros(ROWS, np.int64), np.ones(ROWS, np.float32)), head_inputs(hidden_TH, weight_VH))
    with Launches() as launches:
        scores = score_full(head_inputs(hidden_TH, weight_VH), plan)
        forward = Counter(launches.names)
        scores.logprobs_T.sum().backward()
    assert kernels == ["add_kernel"] * num_slabs + ["gradient_kernel"] * num_slabs
    assert forward["mm"] == num_slabs
    assert launches.names["mm"] == 4 * num_slabs
    assert launches.zeroed_bytes <= ROWS * WIDTH * 4 + ROWS * 64, "no zeros before the head's gradient"


def test_kernels_over_the_full_vocabulary_are_compiled_twice_however_many_rows_a_microbatch_has() -> None:
    for num_rows in (1, 64, 300, 1000, 1501, 2047, 4096, 8191):
        hidden_TH, weight_VH = leaves(num_rows)
        inputs = head_inputs(hidden_TH, weight_VH)
        rows = Rows.open(np.zeros(num_rows, np.int64), np.ones(num_rows, np.float32))
        score_full(inputs, plan_rows(rows, inputs)).logprobs_T.sum().backward()
        chosen_T = np.ones(num_rows, np.bool_)
        kl_full(inputs, head_inputs(*leaves(num_rows)), plan_full(rows, chosen_T, inputs)).sum().backward()
    compiled = Counter(name for name, *_ in set(Recorder.launches))
    # Once for columns that 16 divides, once for the last ones of a vocabulary.
    assert compiled.keys() == {"add_kernel", "gradient_kernel", "add_kl_kernel", "kl_gradient_kernel"}
    assert max(compiled.values()) <= 2, sorted(set(map(str, Recorder.launches)))


@pytest.mark.parametrize("scored", ["in sets", "over the full vocabulary", "with a KL"])
def test_with_the_optimizers_sum_no_gradient_of_the_head_is_made(scored: str, kernels: list[str]) -> None:
    hidden_TH, weight_VH = leaves()
    inputs = head_inputs(hidden_TH, weight_VH, torch.empty(VOCAB, WIDTH, device="meta"))
    reference = head_inputs(*leaves())
    rows = Rows.open(np.zeros(ROWS, np.int64), np.ones(ROWS, np.float32))
    plan = plan_rows(drawn_rows(8, shared=50) if scored == "in sets" else rows, inputs)
    with Launches() as launches:
        if scored == "with a KL":
            kl_full(inputs, reference, plan_full(rows, np.ones(ROWS, np.bool_), inputs)).sum().backward()
        else:
            score_kept(inputs, plan).logprobs_T.sum().backward()
    assert weight_VH.grad is None
    assert launches.largest_bytes <= 4 * max(ROWS * WIDTH, 2**21), "a slab, or the sums of hidden states"


def test_a_kl_over_the_full_vocabulary_waits_for_nothing(kernels: list[str]) -> None:
    hidden_TH, weight_VH = leaves()
    inputs = head_inputs(hidden_TH, weight_VH)
    rows = Rows.open(np.zeros(ROWS, np.int64), np.ones(ROWS, np.float32))
    chosen_T = np.arange(ROWS) % 3 > 0
    with Launches() as launches:
        kl_full(inputs, head_inputs(*leaves()), plan_full(rows, chosen_T, inputs)).sum().backward()
    assert Counter(kernels) == {"add_kl_kernel": 75, "kl_gradient_kernel": 75}
    assert launches.zeroed_bytes <= 2 * ROWS * WIDTH * 4 + ROWS * 64, "no zeros before the head's gradient"


def test_a_kl_in_kept_sets_waits_for_nothing(kernels: list[str]) -> None:
    hidden_TH, weight_VH = leaves()
    inputs = head_inputs(hidden_TH, weight_VH)
    plan = plan_rows(drawn_rows(8), inputs)
    scores = score_kept(inputs, plan)
    kl_kept(scores.kept_logprobs_N, listed_logprobs(head_inputs(*leaves()), plan), plan.kept).sum().backward()
    assert Counter(kernels) == {"dots_kernel": 2, "sets_kernel": 2, "sets_gradient_kernel": 1, "sums_kernel": 2}


def test_rows_of_both_kinds_and_tokens_that_are_not_selected_wait_for_nothing(kernels: list[str]) -> None:
    hidden_TH, weight_VH = leaves()
    rows, every_third_T = drawn_rows(8), np.arange(ROWS) % 3 == 0
    rows = replace(rows, select_T=every_third_T, full_T=every_third_T & (np.arange(ROWS) % 2 == 0))
    plan = plan_rows(rows, head_inputs(hidden_TH, weight_VH))
    with Launches() as launches:
        scores = score_kept(head_inputs(hidden_TH, weight_VH), plan)
        assert scores.full is not None
        (scores.logprobs_T + scores.full.logprobs_T).sum().backward()
    assert Counter(kernels)["gradient_kernel"] > 0
    assert launches.zeroed_bytes <= 2 * ROWS * WIDTH * 4 + ROWS * 64, "no zeros before the head's gradient"
