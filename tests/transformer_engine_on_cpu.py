"""The Python code of Transformer Engine on a machine without a GPU: modules can be built there, and compute nothing.

`load` is what a process does before it imports Megatron (`Ranks(1, first="transformer_engine_on_cpu")`). The package
is the real one, as `make test-transformer-engine` installs it. Its compiled part needs CUDA and is replaced with a
stand-in, `_CompiledPart`: names of types and enums are there, and a function that would start a kernel raises.
Parameters are on the CPU and hold values, so weights are loaded into these modules and read from them as on a GPU.
"""

from __future__ import annotations

import enum
import functools
import importlib
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "transformer_engine"
LOCK = ROOT / "requirements" / "transformer_engine.lock"


def missing() -> str:
    """Why the package cannot be loaded; empty where it can."""
    installed = FOLDER / "installed.lock"
    if installed.exists() and installed.read_bytes() == LOCK.read_bytes():
        return ""
    return "the locked Transformer Engine is not in build/transformer_engine: run `make test-transformer-engine`"


def load() -> None:
    """Imports Transformer Engine, and has moerl choose what it chooses on a GPU."""
    # Its own switch for processes that have no shared libraries to load.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    sys.path.append(str(FOLDER))
    sys.modules["transformer_engine_torch"] = _CompiledPart("transformer_engine_torch")
    with warnings.catch_warnings():
        # It looks for a library, and goes on without `transformer_engine.pytorch` where there is none.
        warnings.simplefilter("ignore")
        importlib.import_module("transformer_engine")
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    importlib.import_module("transformer_engine.pytorch")
    _build_without_cuda()
    _choose_layers_of_a_gpu()


def _build_without_cuda() -> None:
    """Modules ask for CUDA in their constructors, and need none there."""
    import torch

    base: Any = importlib.import_module("transformer_engine.pytorch.module.base").TransformerEngineBaseModule
    original = base.__init__

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            original(self, *args, **kwargs)

    base.__init__ = construct


def _choose_layers_of_a_gpu() -> None:
    from moerl.trainer import platform

    platform.prepare()
    platform.layer_spec = platform.gpu_layer_spec
    platform.model_overrides = lambda dims: platform.gpu_overrides() | {"use_cpu_initialization": True}
    # Both ask for small tensors on a GPU in their constructors.
    for name in ("megatron.core.transformer.moe.token_dispatcher", "transformer_engine.pytorch.optimizers.fused_adam"):
        module: Any = importlib.import_module(name)
        module.torch = platform._TorchOnCpu()


class _DType(enum.IntEnum):
    """Transformer Engine compares these names with its own."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class _FusedAttentionBackend(enum.IntEnum):
    """Transformer Engine compares these names with its own."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class _Names(type):
    """The type of a stand-in for an enum: each name that is asked for is another number."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return getattr(cls, name)


class _CompiledPart(ModuleType):
    """Stands in for `transformer_engine_torch`."""

    DType = _DType
    NVTE_Fused_Attn_Backend = _FusedAttentionBackend

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = _Names(name, (), {}) if name[0].isupper() else functools.partial(_refuse, name)
        setattr(self, name, value)
        return value


def _refuse(name: str, *args: object, **kwargs: object) -> None:
    raise RuntimeError(f"the kernel '{name}' of Transformer Engine was called; this process has a stand-in for it")
