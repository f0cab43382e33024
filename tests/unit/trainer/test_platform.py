"""Stand-ins for CUDA-only parts of Megatron, which compute the same. In a rank: the stand-ins are process-wide."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES
from ranks import Ranks
from torch import Tensor

from moerl.contract.parallel import ParallelDims
from moerl.contract.trainer import DeviceUse
from moerl.models.description import describe
from moerl.trainer import platform

LENGTHS = (1, 7, 2, 33, 8, 64, 3)


def cu_seqlens_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def described(lengths: tuple[int, ...], prefix_of: tuple[int, ...] | None, rows: tuple[int, ...] = ()) -> Any:
    """The part of a microbatch that attention looks at. rows: of prefixes; all that they have where not given."""
    if prefix_of is None:
        before = (0,) * len(lengths)
    else:
        before = rows or [0 if prefix < 0 else lengths[prefix] for prefix in prefix_of]
    return SimpleNamespace(
        cu_seqlens=cu_seqlens_of(lengths).numpy(),
        prefix_of=None if prefix_of is None else np.array(prefix_of, np.int32),
        rows_before=np.array(before, np.int64),
    )


def attend(
    layout: Any, num_kv_heads: int, prefix_of: tuple[int, ...] | None, rows: tuple[int, ...]
) -> tuple[float, float]:
    """Largest difference, in values and in gradients, between packed attention and a masked softmax per sequence."""
    from moerl.trainer import attention, groups

    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    query = torch.randn(total, 4, 16, generator=generator, requires_grad=True)
    key, value = (torch.randn(total, num_kv_heads, 16, generator=generator, requires_grad=True) for _ in range(2))
    packed = SimpleNamespace(cu_seqlens_q=cu_seqlens_of(LENGTHS))
    batch = described(LENGTHS, prefix_of, rows)
    attention.describe(packed.cu_seqlens_q, batch, size=1, rank=0)
    groups = SimpleNamespace(cp=groups.context_group())
    core = attention.PackedAttention(None, softmax_scale=0.3, pg_collection=groups)
    ours = core(query, key, value, packed_seq_params=packed)
    parts, sequences = [], [tensor.split(LENGTHS) for tensor in (query, key, value)]
    for number, (q, k, v) in enumerate(zip(*sequences, strict=True)):
        if before := int(batch.rows_before[number]):
            prefix = int(batch.prefix_of[number])
            k, v = (torch.cat([each[prefix][:before], own]) for each, own in zip(sequences[1:], (k, v), strict=True))
        k, v = (tensor.repeat_interleave(4 // num_kv_heads, dim=1) for tensor in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k).mul(0.3)
        future = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v).flatten(1))
    expected = torch.cat(parts)
    weights = torch.randn(expected.shape, generator=generator)
    gradients = [torch.autograd.grad((out * weights).sum(), (query, key, value)) for out in (ours, expected)]
    differences = [(a - b).abs().max() for a, b in zip(*gradients, strict=True)]
    return float((ours - expected).abs().max()), float(torch.stack(differences).max())


@pytest.mark.slow
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("prefix_of", "rows"),
    [(None, ()), ((-1, -1, 1, 1, -1, 1, 4), ()), ((-1, -1, -1, -1, 3, 3, 3), (0, 0, 0, 0, 1, 20, 33))],
)
def test_packed_attention_equals_attention_per_sequence(
    prefix_of: tuple[int, ...] | None, rows: tuple[int, ...], num_kv_heads: int, one_process: Ranks
) -> None:
    ((values, gradients),) = one_process.run(attend, num_kv_heads, prefix_of, rows)
    assert values < 1e-5
    assert gradients < 1e-5


def rotate(layout: Any) -> list[float]:
    """How far the replaced RoPE and its gradient are from those of an untouched copy of Megatron's module: of sequences
    alone, and of one that goes on from the first."""
    from megatron.core import parallel_state as mpu
    from megatron.core.models.common.embeddings import rope_utils

    from moerl.trainer import attention

    spec = importlib.util.spec_from_file_location("untouched_rope_utils", rope_utils.__file__)
    assert spec is not None
    assert spec.loader is not None
    untouched = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(untouched)
    assert rope_utils._apply_rotary_pos_emb_thd.__module__ == "moerl.trainer.attention"
    t, upstream = torch.randn(2, sum(LENGTHS), 4, 16, generator=torch.Generator().manual_seed(1))
    freqs = torch.outer(torch.arange(80.0), torch.arange(1, 9).float().reciprocal()).repeat(1, 2)[:, None, None, :]
    options = {"rotary_interleaved": False, "cp_group": mpu.get_context_parallel_group()}
    together, alone, whole = cu_seqlens_of(LENGTHS), cu_seqlens_of(LENGTHS), cu_seqlens_of((sum(LENGTHS[:2]),))
    attention.describe(together, described(LENGTHS, None), size=1, rank=0)

    def both(module: Any, num_rows: int, cu_seqlens: torch.Tensor) -> torch.Tensor:
        of = t[:num_rows].requires_grad_()
        turned = module._apply_rotary_pos_emb_thd(of, cu_seqlens, freqs, **options)
        return torch.stack([turned.detach(), *torch.autograd.grad(turned, of, upstream[:num_rows])])

    ours, theirs = both(rope_utils, len(t), together), both(untouched, len(t), alone)
    first, second = LENGTHS[:2]
    shared = cu_seqlens_of((first, second))
    attention.describe(shared, described((first, second), (-1, 0)), size=1, rank=0)
    goes_on, as_one = both(rope_utils, first + second, shared), both(untouched, first + second, whole)
    assert (ours[0] - t).abs().max() > 1.0
    return [(ours - theirs).abs().max().item(), (goes_on - as_one).abs().max().item()]


def test_packed_rope_equals_megatrons_loop(one_process: Ranks) -> None:
    (errors,) = one_process.run(rotate)
    assert max(errors) < 1e-6


def import_the_bridge(layout: Any) -> dict[str, Any]:
    from moerl.trainer.bridge import import_bridge

    return {
        "same": import_bridge() is import_bridge(),
        "stubs": [name for name in sys.modules if name.split(".")[0] == "transformer_engine"],
        "believers": [
            name
            for name, module in list(sys.modules.items())
            if name.startswith("megatron.") and getattr(module, "HAVE_TE", False) is True
        ],
        "cuda_types": torch.zeros(1).type(),
        "compiler": "torch._inductor.compile_fx" in sys.modules,
    }


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is there")
def test_importing_the_bridge_leaves_no_stand_in_for_transformer_engine(one_process: Ranks) -> None:
    (result,) = one_process.run(import_the_bridge)
    assert result == {"same": True, "stubs": [], "believers": [], "cuda_types": "torch.FloatTensor", "compiler": False}


def compile_a_function(layout: Any) -> list[bool]:
    platform.prepare()

    def plain(tensor: Tensor) -> Tensor:
        return tensor + 1

    return [torch.compile(plain) is plain, torch.compile(dynamic=True)(plain) is plain]


def test_on_a_cpu_functions_stay_as_they_are(one_process: Ranks) -> None:
    assert one_process.run(compile_a_function) == [[True, True]]


COMPILED_BEFORE = """
import torch
compilations = []
plus_one = torch.compile(lambda tensor: tensor + 1, backend=lambda graph, inputs: compilations.append(graph) or graph)
from moerl.trainer import platform
platform.prepare()
print(plus_one(torch.ones(1)).item(), len(compilations))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs compile")
@pytest.mark.slow
def test_a_function_that_was_decorated_before_is_not_compiled_either() -> None:
    """A loss of the user, whose module the configuration has looked at."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILED_BEFORE], capture_output=True, text=True)
    assert done.stdout == "2.0 0\n", done.stderr


# --- on a GPU --------------------------------------------------------------------------------------------------------


def test_on_a_gpu_megatrons_own_layers_are_built_without_the_kernel_of_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    from moerl.trainer import platform

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert platform.model_overrides(ParallelDims()) == {"gradient_accumulation_fusion": False}


@pytest.mark.parametrize("has_cuda", [False, True])
def test_torch_takes_deterministic_kernels_on_a_gpu_alone(has_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    try:
        platform.use_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled() == has_cuda
        assert torch.is_deterministic_algorithms_warn_only_enabled() == has_cuda
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_checkpoint_on_a_gpu_puts_moments_together_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from moerl.trainer import sharded_state

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sharded_state._metadata()["distrib_optim_fully_reshardable_mem_efficient"]


@pytest.mark.parametrize("has_cuda", [False, True])
def test_layers_are_made_by_this_projects_spec_on_every_device(has_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from moerl.trainer import platform
    from moerl.trainer.provider import provider_settings

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    for name in ("local_layer_spec", "gpu_layer_spec"):
        monkeypatch.setattr(platform, name, lambda config, vp_stage, name=name: (name, config, vp_stage))
    model = describe(FAMILIES["qwen3_moe-dense"].config().to_dict(), "model")
    spec = provider_settings(model, moe_aux_loss_coef=0.0, tensor=1)["transformer_layer_spec"]
    assert spec("config", vp_stage=1) == ("gpu_layer_spec" if has_cuda else "local_layer_spec", "config", 1)


@pytest.mark.parametrize(
    ("dims", "dispatcher"),
    [
        (ParallelDims(), "allgather"),
        (ParallelDims(tensor=2, context=2), "allgather"),
        (ParallelDims(expert=2), "alltoall"),
        (ParallelDims(tensor=2, expert_tensor=2), "alltoall"),
        (ParallelDims(pipeline=2), "alltoall"),
    ],
    ids=str,
)
def test_tokens_are_sorted_once_where_a_rank_has_all_experts(dims: ParallelDims, dispatcher: str) -> None:
    from moerl.trainer import platform

    assert platform.model_overrides(dims)["moe_token_dispatcher_type"] == dispatcher


def test_a_cpu_has_no_use_of_a_device() -> None:
    assert platform.device_use() is None


def test_peaks_of_a_gpu_begin_anew_once_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = [7, 9]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks[0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: peaks[1])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.__setitem__(slice(None), [1, 2]))
    assert platform.device_use() == DeviceUse("NVIDIA H200", 7, 9)
    assert platform.device_use() == DeviceUse("NVIDIA H200", 1, 2)
