"""Everything that lets Megatron-Core run without CUDA, in one place (the bridge: `moerl.trainer.bridge`).

Runs in every trainer rank, before anything else of Megatron is imported. With a CUDA device `prepare` changes
nothing. Without one, five things have to give way (megatron-core 0.19.2):

1. `torch.cuda` functions that Megatron calls unconditionally (current device, streams, RNG state);
2. modules that hold a literal ``device="cuda"``;
3. optimizers that compare ``tensor.type()`` with ``"torch.cuda.FloatTensor"``;
4. the local layer spec's norm (refuses sequence parallelism) and core attention (refuses packed sequences);
5. collectives of uneven slices, which gloo does not have (`moerl.trainer.uneven`).

Goes when Megatron-Core takes its device from the accelerator API throughout.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moerl.contract.shares import context_rows
from moerl.trainer import uneven

CPU = torch.device("cpu")


def prepare() -> None:
    """Makes Megatron importable and runnable on this machine; idempotent, nothing to do where CUDA is present."""
    if torch.cuda.is_available() or getattr(prepare, "done", False):
        return
    # Looked for by torch's extension builder when Megatron is imported; on this machine its absence is no news.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # Megatron's jit_fuser is torch.compile, which would call a C++ compiler at run time for very small kernels.
    torch.compiler.set_stance("force_eager")
    _replace_cuda_functions()
    _replace_rng_state()
    _replace_cuda_literals()
    _replace_type_comparisons()
    _replace_packed_rope()
    uneven.replace_collectives()
    prepare.done = True  # type: ignore[attr-defined]


def device() -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def collective_backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def model_overrides() -> dict[str, Any]:
    """Provider settings for this machine: local modules and no CUDA-only fusion on a CPU, nothing on a GPU."""
    if torch.cuda.is_available():
        return {}
    return {
        "transformer_layer_spec": local_layer_spec,
        "use_cpu_initialization": True,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": False,
        "moe_shared_expert_overlap": False,
        # gloo has no batched point-to-point operations that overlap, and its sends still read what would be freed.
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": False,
    }


# --- 1: torch.cuda ---------------------------------------------------------------------------------------------------


class _NoStream:
    """A CUDA stream or event on a machine where everything is already in order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> object:
        return event or _NoStream()

    def record(self, *args: object) -> None: ...

    def wait(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *args: object) -> None: ...


def _replace_cuda_functions() -> None:
    cuda: Any = torch.cuda
    stream = _NoStream()
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.empty_cache = lambda: None
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()


def _replace_rng_state() -> None:
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    # The tracker warns about exactly what this platform does on purpose.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


# --- 2: literal device="cuda" ----------------------------------------------------------------------------------------


class _TorchOnCpu:
    """Stands in for a module's `torch`: factory functions asked for "cuda" or pinned memory make CPU tensors."""

    _FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange", "zeros_like", "empty_like")

    def __init__(self) -> None:
        for name in self._FACTORIES:
            setattr(self, name, self._on_cpu(getattr(torch, name)))

    @staticmethod
    def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_MODULES_WITH_CUDA_LITERALS = (
    "pipeline_parallel.schedules",
    "optimizer.clip_grads",
    "optimizer.optimizer",
    "optimizer.grad_scaler",
    "utils",
    "transformer.utils",
    "transformer.moe.moe_utils",
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rope_utils",
)


def _replace_cuda_literals() -> None:
    stand_in = _TorchOnCpu()
    for name in _MODULES_WITH_CUDA_LITERALS:
        module: Any = importlib.import_module(f"megatron.core.{name}")
        module.torch = stand_in
    # The all-to-all dispatcher needs numpy split sizes; the original converts CUDA tensors only.
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = moe_utils.maybe_move_tensor_to_cpu = to_host


# --- 3: tensor.type() comparisons ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    original = torch.Tensor.type

    def type_name(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = type_name  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def _replace_type_comparisons() -> None:
    def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _cuda_type_names():
                return function(*args, **kwargs)

        return call

    optimizer: Any = importlib.import_module("megatron.core.optimizer.optimizer")
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    clip: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    for owner in (optimizer.Float16OptimizerWithFloat16Params, distributed.DistributedOptimizer):
        owner.__init__ = renamed(owner.__init__)
    clip.clip_grad_by_total_norm_fp32 = renamed(clip.clip_grad_by_total_norm_fp32)
    optimizer.clip_grad_by_total_norm_fp32 = clip.clip_grad_by_total_norm_fp32


# --- 4: local layer spec, packed attention, packed RoPE --------------------------------------------------------------


class LocalNorm:
    """RMSNorm or LayerNorm for the local spec, its weight marked for sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> nn.Module:
        norm_class = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


@dataclass(frozen=True, slots=True)
class _LengthGroup:
    """Packed sequences of similar length, as one padded batch.

    packed_rows: int64 [m], rows of the packed tensor. slots: int64 [m], the same tokens' rows in the padded batch
    [num_sequences * longest]. Every row and every slot occurs once, so scattering is exact and deterministic.
    """

    packed_rows: Tensor
    slots: Tensor
    num_sequences: int
    longest: int

    def pad(self, packed: Tensor) -> Tensor:
        """[T, H, D] -> [num_sequences, H, longest, D], zeros in the padding."""
        padded = packed.new_zeros(self.num_sequences * self.longest, *packed.shape[1:])
        padded = padded.index_copy(0, self.slots, packed.index_select(0, self.packed_rows))
        return padded.view(self.num_sequences, self.longest, *packed.shape[1:]).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """[num_sequences, H, longest, D] -> [m, H, D], in the order of `packed_rows`."""
        return padded.transpose(1, 2).flatten(0, 1).index_select(0, self.slots)

    @classmethod
    def of(cls, cu_seqlens: Tensor, members: Tensor) -> _LengthGroup:
        """The group of the sequences `members` (int64 indices) among those packed as `cu_seqlens`."""
        starts, lengths = cu_seqlens[:-1].long()[members], torch.diff(cu_seqlens.long())[members]
        columns = torch.arange(int(lengths.max()))
        valid = columns[None, :] < lengths[:, None]
        packed_rows = (starts[:, None] + columns[None, :])[valid]
        return cls(packed_rows, valid.flatten().nonzero()[:, 0], len(members), len(columns))


def _similar_lengths(cu_seqlens: Tensor) -> list[Tensor]:
    """Indices of packed sequences of similar length: up to the same power of two, so that padding at most doubles the
    work."""
    lengths = torch.diff(cu_seqlens.long())
    buckets = torch.ceil(torch.log2(lengths.clamp(min=1).double())).long()
    return [((buckets == bucket) & (lengths > 0)).nonzero()[:, 0] for bucket in buckets[lengths > 0].unique().tolist()]


class PackedAttention(nn.Module):
    """Causal core attention on scaled_dot_product_attention, for packed (THD) input, with grouped-query attention.

    Megatron's own local core attention rejects packed sequences. Sequences are padded in groups of similar length:
    a trailing padding column is never seen by a causal query of its own sequence. Under context parallelism every
    rank gathers all keys and values, and attends with the queries of its own zig-zag rows.
    """

    def __init__(
        self, config: Any, *args: Any, softmax_scale: float | None = None, pg_collection: Any = None, **kwargs: Any
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.context_group = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """query [t, H, D], key and value [t, Hkv, D] -> [t, H * D]; t rows of this rank."""
        cu_seqlens = kwargs["packed_seq_params"].cu_seqlens_q
        size = self.context_group.size()
        if size > 1:
            key, value = (_gather_context(each, cu_seqlens, self.context_group) for each in (key, value))
        out_tHD = torch.zeros_like(query)
        for members in _similar_lengths(cu_seqlens):
            keys = _LengthGroup.of(cu_seqlens, members)
            queries = keys if size == 1 else _LengthGroup.of(cu_seqlens // size, members)
            padded = nn.functional.scaled_dot_product_attention(
                queries.pad(query),
                keys.pad(key),
                keys.pad(value),
                attn_mask=None if size == 1 else self._mask(queries, keys, cu_seqlens),
                is_causal=size == 1,
                scale=self.softmax_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            out_tHD = out_tHD.index_copy(0, queries.packed_rows, queries.unpad(padded))
        return out_tHD.flatten(1)

    def _mask(self, queries: _LengthGroup, keys: _LengthGroup, cu_seqlens: Tensor) -> Tensor:
        """bool [num_sequences, 1, longest query, longest key]: True where a query sees a key."""
        positions_t = _local_positions(cu_seqlens, self.context_group)
        padded = positions_t.new_zeros(queries.num_sequences * queries.longest)
        padded = padded.index_copy(0, queries.slots, positions_t[queries.packed_rows])
        columns = torch.arange(keys.longest)
        return columns <= padded.view(queries.num_sequences, 1, queries.longest, 1)


def _gather_context(local: Tensor, cu_seqlens: Tensor, group: Any) -> Tensor:
    """[t, ...] of every context-parallel rank -> [T, ...] in the order of the sequences; differentiable."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    gathered = gather_from_sequence_parallel_region(local.contiguous(), group=group)
    bounds, size = cu_seqlens.numpy(), group.size()
    order = torch.from_numpy(np.concatenate([context_rows(bounds, size, rank) for rank in range(size)]))
    return gathered.index_select(0, torch.argsort(order))


def _local_positions(cu_seqlens: Tensor, group: Any) -> Tensor:
    """int64 [t]: positions within their sequence of the rows of this context-parallel rank."""
    lengths = torch.diff(cu_seqlens.long())
    positions = torch.arange(int(cu_seqlens[-1])) - torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
    return positions[torch.from_numpy(context_rows(cu_seqlens.numpy(), group.size(), group.rank()))]


def local_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's local (no Transformer Engine) decoder spec with the norm and attention of this platform."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.identity_op import IdentityOp

    spec: Any = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )

    def use_local_norm(submodules: Any, names: tuple[str, ...]) -> None:
        for name in names:
            if getattr(submodules, name, IdentityOp) is not IdentityOp:
                setattr(submodules, name, LocalNorm)

    for layer in spec.layer_specs:
        attention: Any = layer.submodules.self_attention.submodules
        use_local_norm(layer.submodules, ("input_layernorm", "pre_mlp_layernorm"))
        use_local_norm(attention, ("q_layernorm", "k_layernorm", "kv_layernorm"))
        attention.core_attention = PackedAttention
    spec.layer_norm = LocalNorm
    return spec


def _replace_packed_rope() -> None:
    """Applies RoPE to all packed sequences in one call: the unfused original loops over sequences in Python."""
    rope: Any = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    original = rope._apply_rotary_pos_emb_thd

    def apply(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cp_group = kwargs.get("cp_group")
        packed_freqs = freqs.size(0) == int(cu_seqlens[-1]) and len(cu_seqlens) > 2
        if args or packed_freqs or cp_group is None:
            return original(t, cu_seqlens, freqs, *args, **kwargs)
        positions = _local_positions(cu_seqlens, cp_group)
        options = {k: v for k, v in kwargs.items() if k not in ("cp_group", "multi_latent_attention")}
        return rope._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[positions], **options).squeeze(1)

    rope._apply_rotary_pos_emb_thd = apply
