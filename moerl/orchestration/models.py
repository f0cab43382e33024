"""Hugging Face model directories: built from an architecture, read for the engine, written from an export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moerl.config.architecture import architecture_config
from moerl.config.model_files import check_tokenizer, stored_tensors
from moerl.config.model_tensors import SCALES, is_bypassed
from moerl.config.schema import ArchitectureConfig
from moerl.contract.files import sync
from moerl.contract.sealed import SEAL, seal
from moerl.errors import ConfigError
from moerl.models.description import ModelDescription
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.loading import load_model
from moerl.trainer.model import DTYPES
from moerl.trainer.tensors import bypassed_tensors

VOCAB_MULTIPLE = 8
"""The embedding is padded to a multiple of this, so that tensor parallelism can split it."""


def build_model(architecture: ArchitectureConfig, tokenizer: PreTrainedTokenizerBase, seed: int, folder: Path) -> None:
    """Writes a freshly initialised Qwen3-MoE and its tokenizer; the folder appears whole or not at all, sealed."""
    torch.manual_seed(seed)
    vocab_size = -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen3MoeConfig.from_dict(architecture_config(architecture, vocab_size=vocab_size) | ids)
    partial = _partial(folder)
    Qwen3MoeForCausalLM(config).float().save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    _publish(partial, folder)


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer stored with a model.

    Raises:
        ConfigError: there is none that can be read.
    """
    check_tokenizer(folder)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the library raises whatever its parsers do, plain `Exception` too
        raise ConfigError(
            f"model.path: {folder}: the tokenizer cannot be read",
            seen=" ".join(f"{type(error).__name__}: {error}".split())[:500],
            expected="a tokenizer that transformers reads",
            remedy="copy the tokenizer's files of the model into the directory again",
        ) from error


def make_engine(model: ModelDescription, *, dtype: str, max_running: int, version: int = -1) -> EmbeddedEngine:
    """An embedded engine for the model of a Hugging Face directory.

    Args:
        version: policy version of the weights in its folder; -1 where the engine must wait for a first update.
    """
    assert model.folder is not None
    loaded = load_model(model.folder, dtype=DTYPES[dtype])
    return EmbeddedEngine(loaded, model.spec, engine_id="embedded-0", max_running=max_running, policy_version=version)


def checkpoint_shapes(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that an export writes for the model of a directory, by name.

    Args:
        config: content of its Hugging Face config.
    """
    return {
        name: tensor.shape
        for name, tensor in stored_tensors(folder).items()
        if not is_bypassed(name, config) and not name.endswith(SCALES)
    }


def write_model(folder: Path, like: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Writes exported weights as a Hugging Face directory; it appears whole or not at all, sealed and on disk.

    Args:
        like: the directory the model came from; its config and tokenizer are kept, and its multi-token-prediction
            heads, which are not trained.
        tensors: the trainer's export.
    """
    partial = _partial(folder)
    for file in like.iterdir():
        is_kept = file.suffix in (".json", ".txt", ".model", ".jinja") and "safetensors" not in file.name
        if file.is_file() and is_kept and file.name != SEAL:
            shutil.copy2(file, partial / file.name)
    # Gate and up projections are views of one tensor; each file entry needs storage of its own.
    weights = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors}
    config = json.loads((partial / "config.json").read_text())
    dtype = next(iter(weights.values())).dtype
    weights |= dict(bypassed_tensors(like, config))
    save_torch_state_dict(weights, partial)
    config["dtype"] = str(dtype).removeprefix("torch.")
    # Weights are written as they are trained, also where they came quantised.
    config.pop("quantization_config", None)
    (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    _publish(partial, folder)


def _partial(folder: Path) -> Path:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _publish(partial: Path, folder: Path) -> None:
    # safetensors makes files for their owner alone; a model is as open as the directory it lies in.
    mode = partial.stat().st_mode & 0o666
    for file in partial.iterdir():
        file.chmod(mode)
    seal(partial)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    sync(folder.parent)
