"""Kept sets on the device and sums over them."""

from __future__ import annotations

import numpy as np
import torch
from kernel_cases import kept_rows

from moerl.contract.trajectory import KeptSets
from moerl.kernels.kept import kl_kept, segment_log_softmax, segment_sum


def sets() -> KeptSets:
    return KeptSets(np.array([0, 0, 2, 5, 5], np.int64), np.array([4, 9, 1, 2, 30], np.int32))


FLAGS = np.array([False, True, True, False])


def test_csr_sets_become_flat_rows_and_ids() -> None:
    kept = kept_rows(sets(), FLAGS)
    assert kept.num_rows == 4
    assert kept.rows.tolist() == [1, 1, 2, 2, 2]
    assert kept.ids.tolist() == [4, 9, 1, 2, 30]
    assert kept.offsets.tolist() == [0, 0, 2, 5, 5]
    assert kept.truncated.tolist() == FLAGS.tolist()
    assert kept.rows.dtype == kept.ids.dtype == kept.offsets.dtype == torch.int64


def test_a_microbatch_without_any_list_is_fine() -> None:
    kept = kept_rows(KeptSets.empty(3), np.zeros(3, np.bool_))
    assert kept.rows.shape == kept.ids.shape == (0,)
    assert segment_sum(torch.zeros(0), kept.rows, 3).tolist() == [0.0, 0.0, 0.0]


def test_sums_over_large_sets_are_accumulated_in_float64() -> None:
    values = torch.full((200_000,), 0.1)
    total = segment_sum(values, torch.zeros(200_000, dtype=torch.int64), 1)
    torch.testing.assert_close(total, torch.tensor([20_000.0]), rtol=1e-7, atol=0.0)


def test_the_segment_log_softmax_passes_a_float64_gradcheck() -> None:
    rows = torch.tensor([0, 0, 2, 2, 2])
    z = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: segment_log_softmax(x, rows, 3), (z,))


def test_the_kept_kl_is_the_exact_sum_over_kept_ids_with_its_gradient() -> None:
    kept = kept_rows(sets(), FLAGS)
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(5, dtype=torch.float64, generator=generator, requires_grad=True)
    reference = segment_log_softmax(torch.randn(5, dtype=torch.float64, generator=generator), kept.rows, 4)
    kl = kl_kept(segment_log_softmax(z, kept.rows, 4), reference, kept)
    expected = [0.0, 0.0, 0.0, 0.0]
    for row, span in ((1, slice(0, 2)), (2, slice(2, 5))):
        p = torch.log_softmax(z[span], 0)
        expected[row] = float((p.exp() * (p - reference[span])).sum().detach())
    torch.testing.assert_close(kl.detach(), torch.tensor(expected, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: kl_kept(segment_log_softmax(x, kept.rows, 4), reference, kept), (z,))
