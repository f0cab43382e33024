"""The tensors of a Hugging Face directory, as the headers of its safetensors files say. Torch-free; any process.

Loaders fill a tensor that is missing with random numbers, and at most log that. Everything that reads a model asks
here first: `moerl.machine.model_tensors` compares the answer with what the model's config needs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.errors import ConfigError
from moerl.reading import find_irregular, open_regular, read_json

INITIAL_MODEL = "initial_model"
"""Folder of a run directory with the model that the run built."""

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""Longest header that the format allows."""

MAX_TOKENIZER_BYTES = 1 << 28
"""Largest file of a tokenizer. A vocabulary of 260,000 tokens takes 35 MB."""

_ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("F64", "I64", "U64"), 8),
}
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",))
"""Files that make a tokenizer, one set of them."""

_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    file: Path
    """Safetensors file that holds the tensor."""
    dtype: str
    """Name of the dtype in safetensors, for example BF16."""
    shape: tuple[int, ...]
    """Sizes of the tensor; empty for one number."""


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a model directory, by name: those that its index lists, or those of its only file.

    Files that the index does not name are not the model's, and are left alone.

    Raises:
        ConfigError: a file is missing, cut or no safetensors file, or index and files disagree.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return read_header(_only_file(folder))
    weight_map = _read_index(index)
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
            listed = sum(file == name for file in weight_map.values())
            raise _broken(index, f"{name} is missing, with {listed} tensors", "every file that the index names")
        for tensor, stored in read_header(folder / name).items():
            if weight_map.get(tensor) == name:
                tensors[tensor] = stored
    lost = weight_map.keys() - tensors.keys()
    if lost:
        first = min(lost)
        raise _broken(index, f"{first!r} is not in {weight_map[first]} ({len(lost)} such tensors)", "files that fit it")
    return tensors


def weight_files(folder: Path) -> list[str]:
    """Returns the names of the files of a model directory's weights, by its index; the files may be missing.

    Raises:
        ConfigError: the index cannot be read.
    """
    index = folder / INDEX_FILE
    return sorted(set(_read_index(index).values())) if index.is_file() else [SINGLE_FILE]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Reads the tensors of one safetensors file, which is as long as its header says.

    Raises:
        ConfigError: it is cut, longer, or no safetensors file.
    """
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            start = opened.read(8)
            num_bytes = int.from_bytes(start, "little")
            if _LFS_POINTER.startswith(start) and start:
                raise _broken(file, "a pointer of Git LFS", "the file itself", "fetch it: git lfs pull")
            if len(start) < 8 or num_bytes > min(MAX_HEADER_BYTES, size - 8):
                raise _broken(file, f"{size} bytes, the header alone would have {num_bytes}", "a safetensors file")
            header = json.loads(opened.read(num_bytes))
    except OSError as error:
        raise _broken(file, error, "a file that can be read", "check the path and its permissions") from error
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"a header that is no JSON ({error})", "a safetensors file") from error
    if not isinstance(header, dict):
        raise _broken(file, f"a header that is a JSON {type(header).__name__}", "a safetensors file")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(file, name, facts) for name, facts in header.items()}
    end = 8 + num_bytes + sum(_num_bytes(tensor) for tensor in tensors.values())
    if size != end:
        kind = "cut" if size < end else "too long"
        raise _broken(file, f"{size} bytes: {kind}", f"{end} bytes, as its header says")
    return tensors


def check_tokenizer(folder: Path, key: str = "model.path") -> None:
    """Refuses a directory without a tokenizer, with a damaged one, or with something that a library would wait for.

    Args:
        key: the key that names the directory, for messages.

    Raises:
        ConfigError: there is none, one of its JSON files cannot be read, or something there is neither file nor folder.
    """
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS):
        raise ConfigError(
            f"{key}: {folder}: no tokenizer",
            seen=", ".join(sorted(path.name for path in folder.glob("*token*"))) or "no such file",
            expected="tokenizer.json",
            remedy="copy the files of a tokenizer into the directory",
        )
    if irregular := find_irregular(folder):
        raise _broken(folder, irregular, "files and folders: libraries wait for all else", "remove it")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            content = read_json(folder / name, MAX_TOKENIZER_BYTES) if (folder / name).exists() else {}
        except (OSError, ValueError) as error:
            raise _broken(folder / name, error, "a JSON object", key=key) from error
        if not isinstance(content, dict):
            raise _broken(folder / name, f"a JSON {type(content).__name__}", "a JSON object", key=key)


def _tensor(file: Path, name: str, facts: Any) -> StoredTensor:
    dtype, shape = (facts.get("dtype"), facts.get("shape")) if isinstance(facts, dict) else (None, None)
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not isinstance(dtype, str) or dtype not in _ELEMENT_BYTES or not isinstance(shape, list) or not is_shape:
        raise _broken(file, f"{name!r} is {facts!r:.200}", "a dtype and a shape that safetensors knows")
    tensor = StoredTensor(file, dtype, tuple(shape))
    span = facts.get("data_offsets")
    if not isinstance(span, list) or len(span) != 2 or not all(type(each) is int for each in span):
        raise _broken(file, f"{name!r} is {facts!r:.200}", "a place in the file")
    if span[1] - span[0] != _num_bytes(tensor) or span[0] < 0:
        raise _broken(file, f"{name!r} is {facts!r:.200}", f"a place of {_num_bytes(tensor)} bytes")
    return tensor


def _num_bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * _ELEMENT_BYTES[tensor.dtype]


def _only_file(folder: Path) -> Path:
    single = folder / SINGLE_FILE
    if single.is_file():
        return single
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        raise ConfigError(
            f"model.path: {folder}: {INDEX_FILE} is missing",
            seen=", ".join(others[:5]),
            expected=f"{INDEX_FILE}, which says what is where, or one {SINGLE_FILE}",
            remedy="copy the whole directory",
        )
    has_pickles = any(folder.glob("pytorch_model*.bin"))
    raise ConfigError(
        f"model.path: {folder}: no weights",
        seen="pytorch_model.bin, a pickle" if has_pickles else "no safetensors file",
        expected=f"{SINGLE_FILE}, or several files and {INDEX_FILE}",
        remedy="save the model with safetensors" if has_pickles else "copy the whole directory",
    )


def _read_index(index: Path) -> Mapping[str, str]:
    try:
        content = read_json(index)
    except (OSError, ValueError) as error:
        raise _broken(index, error, "a JSON object") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _broken(index, "no weight_map", "a weight_map that names the file of every tensor")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise _broken(index, f"{name!r} in {file!r}", "the name of a file in the same directory")
    return weight_map


def _broken(
    file: Path, seen: object, expected: object, remedy: str = "copy or download it again", key: str = "model.path"
) -> ConfigError:
    return ConfigError(f"{key}: {file} cannot be used", seen=seen, expected=expected, remedy=remedy)
