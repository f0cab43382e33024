"""Everything that lets Megatron-Core run without CUDA, in one place (the bridge: `moerl.trainer.bridge`).

Runs in every trainer rank, before anything else of Megatron is imported. With a CUDA device `prepare` changes
nothing. Without one, malloc keeps freed memory, and seven things are replaced (megatron-core 0.19.2):

1. `torch.cuda` functions that Megatron calls unconditionally (current device, streams, RNG state);
2. modules that hold a literal ``device="cuda"``;
3. optimizers that compare ``tensor.type()`` with ``"torch.cuda.FloatTensor"``;
4. the local layer spec's norm (refuses sequence parallelism), core attention (refuses packed sequences, see
   `moerl.trainer.attention`) and experts (slow, see `moerl.trainer.experts`);
5. collectives of uneven slices, which gloo does not have (`moerl.trainer.uneven`);
6. `torch.compile`, which would call a C++ compiler;
7. rotary embedding of packed sequences (`moerl.trainer.attention`).

Goes when Megatron-Core takes its device from the accelerator API throughout.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moerl.contract.parallel import ParallelDims
from moerl.contract.trainer import DeviceUse
from moerl.processes.memory import keep_freed_memory
from moerl.trainer import uneven
from moerl.trainer.attention import PackedAttention, replace_packed_rope
from moerl.trainer.norm import RMSNorm

CPU = torch.device("cpu")


def prepare() -> None:
    """Makes Megatron importable and runnable on this machine; idempotent. Does nothing if CUDA is present."""
    if torch.cuda.is_available() or getattr(prepare, "done", False):
        return
    keep_freed_memory()
    # torch's extension builder looks for CUDA when Megatron is imported, and warns; its absence is known here.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    _compile_nothing()
    _replace_cuda_functions()
    _replace_cuda_literals()
    _replace_type_comparisons()
    replace_packed_rope()
    uneven.replace_collectives()
    prepare.done = True  # type: ignore[attr-defined]


def device() -> torch.device:
    """Returns the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def use_deterministic_kernels() -> None:
    """Has torch take deterministic kernels on a GPU; Megatron asks torch when tokens come back from experts. An
    operation that has none warns. Does nothing on a CPU."""
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)


def can_share_prompts() -> bool:
    """Returns whether attention on this machine can have sequences go on from a shared one."""
    return not torch.cuda.is_available()


def device_use() -> DeviceUse | None:
    """Returns the peaks of this rank's GPU since the last call; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    use = DeviceUse(name, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    torch.cuda.reset_peak_memory_stats()
    return use


def collective_backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def model_overrides(dims: ParallelDims) -> dict[str, Any]:
    """Returns provider settings for this machine: on a CPU no fusion that needs CUDA, on a GPU those of
    `gpu_overrides`."""
    if torch.cuda.is_available():
        return gpu_overrides()
    has_all_experts = dims.expert == dims.expert_tensor == 1
    return {
        # If a rank has all experts, the all-to-all dispatcher sorts and copies rows that are sorted already. The
        # all-gather one cannot have microbatches of different lengths between pipeline stages.
        "moe_token_dispatcher_type": "allgather" if has_all_experts and dims.pipeline == 1 else "alltoall",
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
        # gloo has no batched point-to-point operations that overlap, and its sends still read memory that the schedule
        # would free.
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": False,
    }


def gpu_overrides() -> dict[str, Any]:
    """Returns provider settings for a GPU.

    If Transformer Engine is installed, the bridge has gradients added up inside of matrix products; Megatron then
    refuses to build linear layers of its own, of which the head is one, without a kernel of Apex. The head's product is
    never computed by its layer. `moerl.trainer.optimizer` sets layers of Transformer Engine one by one.
    """
    return {"gradient_accumulation_fusion": False}


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Returns Megatron's decoder spec for this machine, each layer dense or MoE as the config says."""
    return gpu_layer_spec(config, vp_stage) if torch.cuda.is_available() else local_layer_spec(config, vp_stage)


def gpu_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Returns the spec of Transformer Engine's layers; in checkpoints tensors have the names of `local_layer_spec`.
    The bridges of Qwen3-MoE and OLMoE would make every layer MoE."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.identity_op import IdentityOp

    spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    for layer in spec.layer_specs:
        submodules = layer.submodules
        has_own_norm = submodules.pre_mlp_layernorm is not IdentityOp
        submodules.sharded_state_dict_keys_map |= _stored_norms(config.multi_latent_attention, has_own_norm)
    return spec


def _stored_norms(is_latent: bool, has_own_norm: bool) -> dict[str, str]:
    """Returns the beginnings of names in checkpoints of a layer's norms, by those that Transformer Engine's layer has.

    Megatron's specs agree on norms that one of them fuses with the product after it, but for these.
    """
    own, fused = "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
    if not is_latent:
        return {own: fused} if has_own_norm else {}
    attention = {
        "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
        "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    }
    return attention if has_own_norm else {**attention, fused: own}


def _compile_nothing() -> None:
    """Has `torch.compile` return what it is given: Megatron decorates very small functions with it, for which it would
    call a C++ compiler at run time."""
    # Functions that were decorated before, a loss of the user among them. The stance alone would do, but has torch's
    # compiler imported, which takes two seconds.
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager")

    def compile[T](model: T | None = None, **options: object) -> T | Callable[[T], T]:
        return (lambda given: given) if model is None else model

    torch.compile = compile


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
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    # The tracker warns about exactly what this platform does on purpose.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


# --- 2: literal device="cuda" ----------------------------------------------------------------------------------------


class _TorchOnCpu:
    """Substitute for a module's `torch`: factory functions asked for "cuda" or pinned memory make CPU tensors."""

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


def _replace_type_comparisons() -> None:
    original = torch.Tensor.type

    def type_name(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before, torch.Tensor.type = torch.Tensor.type, type_name  # type: ignore[method-assign]
            try:
                return function(*args, **kwargs)
            finally:
                torch.Tensor.type = before  # type: ignore[method-assign]

        return call

    optimizer: Any = importlib.import_module("megatron.core.optimizer.optimizer")
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    clip: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    for owner in (optimizer.Float16OptimizerWithFloat16Params, distributed.DistributedOptimizer):
        owner.__init__ = renamed(owner.__init__)
    clip.clip_grad_by_total_norm_fp32 = renamed(clip.clip_grad_by_total_norm_fp32)
    optimizer.clip_grad_by_total_norm_fp32 = clip.clip_grad_by_total_norm_fp32


# --- 4: local layer spec ---------------------------------------------------------------------------------------------


class LocalNorm:
    """RMSNorm or LayerNorm for the local spec, its weight marked for sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> nn.Module:
        norm_class = RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def local_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Returns Megatron's local (no Transformer Engine) decoder spec with the norm, attention and experts of this
    platform."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from moerl.trainer.experts import Experts

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
        mlp: Any = layer.submodules.mlp
        if getattr(mlp, "func", None) is MoELayer:
            submodules = mlp.keywords["submodules"]
            submodules.experts = functools.partial(Experts, **submodules.experts.keywords)
    spec.layer_norm = LocalNorm
    return spec
