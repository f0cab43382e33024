"""Results of CPU servers for many sequences in one call, against one by one. In their environment, without a server."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang

ATTENTION = """
import torch
from sglang.srt.layers.attention import torch_native_backend as native

torch.set_num_threads(1)

once, last = native.scaled_dot_product_attention, native._attend_last

def counted():
    calls = []
    native.scaled_dot_product_attention = lambda *a, **k: calls.append(1) or once(*a, **k)
    native._attend_last = lambda *a: calls.append(1) or last(*a)
    return calls

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
    calls = counted()
    native._GATHERED_TOKENS = gathered

    def run(window):
        calls.clear()
        backend.forward_metadata = None
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
    backend.forward_metadata = None
    output = torch.empty(9, 4, 16)
    seqs = lengths.clone()
    seqs[8] = longest
    return backend._run_sdpa_forward_decode(
        query, output, keys, values, table, torch.arange(9), seqs, scaling=0.3, enable_gqa=True
    )[:8]

alone = beside(7)
for longest in (61, 64, 65, 81, 130, 167, 191):
    assert torch.equal(beside(longest), alone), longest

# Prompts, and what follows a prefix in the cache: each as by itself, with those that have more or fewer tokens.
def extend(prefixes, asked, pairs, gathered, heads=2, groups=2):
    prefixes, asked = torch.tensor(prefixes), torch.tensor(asked)
    seqs, rows = prefixes + asked, torch.arange(len(asked)).flip(0)
    query = torch.randn(int(asked.sum()), groups * heads, 16)
    calls = counted()
    native._GATHERED_TOKENS = gathered

    def run(pairs):
        calls.clear()
        backend.forward_metadata, native._PADDED_PAIRS, native._TOGETHER_PAIRS = None, pairs, pairs
        for _ in range(2):  # layers
            output = torch.full_like(query, float("nan"))
            backend._run_sdpa_forward_extend(
                query, output, keys, values, table, rows, seqs, prefixes, asked,
                scaling=0.3, enable_gqa=heads > 1, causal=True,
            )
        return output, len(calls) // 2

    one_by_one, num_calls = run(0)
    assert num_calls == len(asked)
    together, num_calls = run(pairs)
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-6)
    return num_calls

assert extend([0, 0, 0], [7, 30, 19], 1 << 18, 1 << 16) == 1
assert extend([20, 3, 40], [1, 1, 1], 1 << 18, 1 << 16) == 1
assert extend([0, 31, 5, 64, 0], [9, 1, 40, 2, 33], 1 << 18, 1 << 16) == 1
assert extend([12], [5], 1 << 18, 1 << 16, heads=1, groups=2) == 1
# Pieces are bounded; a sequence that is longer is taken, and all that come with it, one by one.
assert extend([0] * 8, [20] * 8, 20 * 32 * 3, 1 << 16) == 3
assert extend([0] * 8, [20] * 8, 1 << 18, 32 * 4) == 2
assert extend([0, 0], [20, 3], 20 * 20 - 1, 1 << 16) == 2
print("alike")
"""

EXPERTS = """
import types
import torch
from sglang.srt.layers.moe import fused_moe_native as native

torch.set_num_threads(1)
torch.manual_seed(0)
linears, linear = [], native.F.linear
native.F.linear = lambda *a, **k: linears.append(1) or linear(*a, **k)
layer = types.SimpleNamespace(
    num_experts=6, moe_ep_size=1, w13_weight=torch.randn(6, 2 * 24, 16), w2_weight=torch.randn(6, 16, 24)
)
config = types.SimpleNamespace(apply_router_weight_on_input=False, activation="silu", gemm1_alpha=None)

def run(rows, ids, weights, products):
    linears.clear()
    native._PADDED_PRODUCTS = products
    found = native.moe_forward_native(layer, rows, (weights, ids, None), config)
    return found, len(linears)

def alike(ids):
    ids = torch.tensor(ids, dtype=torch.int32)
    rows, weights = torch.randn(len(ids), 16), torch.rand(ids.shape)
    loop, num_linears = run(rows, ids, weights, 0)
    assert num_linears == 2 * len(ids.unique())
    most = int(torch.bincount(ids.flatten()).max())
    together, num_linears = run(rows, ids, weights, 6 * most * 48 * 16)
    assert num_linears == 0
    torch.testing.assert_close(together, loop, rtol=1e-5, atol=1e-5)
    # One row more than is worth it.
    assert run(rows, ids, weights, 6 * most * 48 * 16 - 1)[1] > 0

alike([[4, 1]])
alike([[0, 5], [5, 2], [2, 0], [1, 5]])
alike([[3], [3], [3]])
alike(torch.stack([torch.randperm(6)[:3] for _ in range(40)]).tolist())

# Biases and other activations are for the code that knows them.
rows, ids, weights = torch.randn(2, 16), torch.tensor([[0, 1], [1, 2]]), torch.rand(2, 2)
layer.w2_weight_bias = torch.randn(6, 16)
assert run(rows, ids, weights, 1 << 40)[1] > 0
del layer.w2_weight_bias
config.activation = "gelu"
assert run(rows, ids, weights, 1 << 40)[1] > 0
print("alike")
"""


@pytest.mark.parametrize("script", [pytest.param(ATTENTION, id="attention"), pytest.param(EXPERTS, id="experts")])
def test_sequences_are_computed_together_as_each_by_itself(script: str, environment: Path):
    done = subprocess.run([environment / "bin" / "python", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("alike"), done.stderr[-3000:]
