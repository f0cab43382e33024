"""Hugging Face model directories as the trainer writes and reads them. Runs in trainer ranks and in the controller."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor

from moerl.contract.files import replace_folder, writing
from moerl.contract.sealed import SEAL, seal
from moerl.errors import undoing
from moerl.reading import read_json
from moerl.trainer.tensors import bypassed_tensors


def write_model(folder: Path, like: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Writes exported weights as a Hugging Face directory; it appears whole or not at all, sealed and on disk.

    Args:
        like: the directory the model came from; its config and tokenizer are kept, and its multi-token-prediction
            heads, which are not trained.
        tensors: the trainer's export.
    """
    # Gate and up projections are views of one tensor; each file entry needs storage of its own.
    weights = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors}
    config = read_json(like / "config.json")
    dtype = next(iter(weights.values())).dtype
    weights |= dict(bypassed_tensors(like, config))
    config["dtype"] = str(dtype).removeprefix("torch.")
    # Weights are written as they are trained, also if the model came quantised.
    config.pop("quantization_config", None)
    with new_directory(folder) as partial:
        for file in like.iterdir():
            is_kept = file.suffix in (".json", ".txt", ".model", ".jinja") and "safetensors" not in file.name
            if file.is_file() and is_kept and file.name != SEAL:
                shutil.copy2(file, partial / file.name)
        save_torch_state_dict(weights, partial)
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@contextmanager
def new_directory(folder: Path) -> Iterator[Path]:
    """Yields an empty directory to write a model into. After the block the directory is sealed and replaces `folder`;
    after an error it is removed.

    Raises:
        MoerlError: the file system refused a write.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    with writing(folder), undoing(lambda: shutil.rmtree(partial, ignore_errors=True)):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
        except Exception as error:  # of libraries in Rust, for a full disk: safetensors' own, tokenizers' plain one
            if not isinstance(error, SafetensorError) and type(error) is not Exception:
                raise
            raise OSError(str(error)) from error
        # safetensors makes files for their owner alone; a model is as open as the directory it lies in.
        mode = partial.stat().st_mode & 0o666
        for file in partial.iterdir():
            file.chmod(mode)
        seal(partial)
        replace_folder(partial, folder)
