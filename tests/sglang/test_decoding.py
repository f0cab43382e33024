"""Attention of CPU servers: sequences decoded together. In the servers' own environment, without a server."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang

SCRIPT = """
import torch
from sglang.srt.layers.attention import torch_native_backend as native

torch.set_num_threads(1)

def attend(num_seqs, groups, heads, size, value_size, longest, window, gathered):
    torch.manual_seed(num_seqs)
    places = num_seqs * longest + 1
    keys, values = torch.randn(places, groups, size), torch.randn(places, groups, value_size)
    if value_size < size:  # latents: values are a part of the keys
        values = keys[..., :value_size]
    lengths = torch.randint(1, longest + 1, (num_seqs,))
    lengths[-1], lengths[0] = 1, longest
    tokens = torch.randperm(places - 1)[: num_seqs * longest].view(num_seqs, longest)
    # What lies behind the end of a sequence is another one's, or broken.
    tokens[torch.arange(longest) >= lengths[:, None]] = places - 1
    keys[-1] = values[-1] = float("nan")
    query = torch.randn(num_seqs, groups * heads, size)
    backend = native.TorchNativeAttnBackend.__new__(native.TorchNativeAttnBackend)
    arguments = (query, keys, values, tokens.flip(0), torch.arange(num_seqs).flip(0), lengths)
    calls, once = [], native.scaled_dot_product_attention
    native.scaled_dot_product_attention = lambda *a, **k: calls.append(1) or once(*a, **k)
    native._GATHERED_TOKENS = gathered

    def run(window):
        calls.clear()
        output = torch.full((num_seqs, groups * heads, value_size), float("nan"))
        q, k, v, table, rows, seqs = arguments
        found = backend._run_sdpa_forward_decode(
            q, output, k, v, table, rows, seqs, scaling=0.3, enable_gqa=heads > 1, sliding_window_size=window
        )
        return found, len(calls)

    # A window as long as the longest hides nothing, and is taken one sequence at a time.
    one_by_one, num_calls = run(longest)
    assert num_calls == num_seqs
    together, num_calls = run(window)
    native.scaled_dot_product_attention = once
    assert torch.isfinite(together).all()
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-6)
    return num_calls

for shape in ((7, 2, 2, 16, 16, 9), (5, 1, 4, 24, 16, 12), (6, 4, 1, 8, 8, 1), (1, 2, 2, 16, 16, 30)):
    for window in (None, -1):
        assert attend(*shape, window, 1 << 16) == 1
# Pieces of what is gathered are bounded, however long a sequence is.
assert attend(7, 2, 2, 16, 16, 9, None, 1) == 7
assert 1 < attend(20, 2, 2, 16, 16, 30, None, 64) < 20

# Whoever is beside it, however long that one is: bit for bit.
torch.manual_seed(1)
places, width = 1000, 200
keys, values, query = torch.randn(places, 2, 16), torch.randn(places, 2, 16), torch.randn(9, 4, 16)
lengths = torch.tensor([1, 5, 16, 17, 31, 32, 33, 60, 7])
table = torch.stack([torch.randperm(places)[:width] for _ in range(9)])
backend = native.TorchNativeAttnBackend.__new__(native.TorchNativeAttnBackend)
native._GATHERED_TOKENS = 1 << 16

def beside(longest):
    output = torch.empty(9, 4, 16)
    seqs = lengths.clone()
    seqs[8] = longest
    return backend._run_sdpa_forward_decode(
        query, output, keys, values, table, torch.arange(9), seqs, scaling=0.3, enable_gqa=True
    )[:8]

alone = beside(7)
for longest in (61, 64, 65, 81, 130, 167, 191):
    assert torch.equal(beside(longest), alone), longest
print("alike")
"""


def test_sequences_are_decoded_together_as_each_by_itself(environment: Path):
    done = subprocess.run([environment / "bin" / "python", "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("alike"), done.stderr[-3000:]
