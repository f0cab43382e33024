"""Opening of all dumps, those that torch.save wrote (slime, miles) included. Torch is loaded with the first file that
needs it.

Nothing is unpickled but the types that torch allows with `weights_only`, and numeric numpy arrays.
"""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moerl.diagnostics.dumps.opening import open_dumps
from moerl.diagnostics.dumps.refused import damaged, refused_globals
from moerl.diagnostics.dumps.rollout import Dump
from moerl.errors import ConfigError

_NUMERIC = "?bhilBHILefd"
"""Codes of the numpy types that are allowed. No texts, no objects."""

_MAX_PICKLE_BYTES = 2 << 30
"""Largest part of a file that torch reads value by value; tensors are in other parts."""


def open_any_dumps(
    paths: Sequence[Path],
    *,
    moe_layers: Sequence[int] | None = None,
    experts_per_token: int | None = None,
    notify: Callable[[str], None] | None = None,
) -> list[Dump]:
    """Opens dumps as `moerl.diagnostics.dumps.opening.open_dumps` does, files of torch.save included."""
    return open_dumps(paths, moe_layers=moe_layers, experts_per_token=experts_per_token, load=load_torch, notify=notify)


def load_torch(file: Path) -> Any:
    """Reads a file of torch.save, with tensors of samples as arrays.

    Raises:
        ConfigError: the file is damaged or compressed, or holds anything but data.
    """
    import torch

    _check_parts(file)
    try:
        with _only(_allowed()):
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise refused_globals(file, _reason(error)) from error
    except (
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        EOFError,
        OverflowError,
        MemoryError,
    ) as error:
        # The kind of error that torch's unpickler raises on bytes that are no pickle depends on the bytes.
        raise damaged(file, f"a damaged file of torch.save: {type(error).__name__}: {_reason(error)}") from error
    return _arrays(loaded)


@contextlib.contextmanager
def _only(allowed: Sequence[Any]) -> Iterator[None]:
    """Lets torch load these classes besides its own, and no others: libraries of this process, Megatron among them, add
    theirs to a list for the whole process."""
    from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

    before = get_safe_globals()
    clear_safe_globals()
    add_safe_globals(list(allowed))
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def _allowed() -> list[Any]:
    """Returns the functions and types that rebuild numeric arrays and scalars of numpy, under its old name too."""
    rebuild = (np._core.multiarray._reconstruct, np._core.multiarray.scalar)  # pyright: ignore
    names = [(each, f"numpy.{core}.multiarray.{each.__name__}") for each in rebuild for core in ("core", "_core")]
    return [*names, np.ndarray, np.dtype, *{type(np.dtype(code)) for code in _NUMERIC}]


def _check_parts(file: Path) -> None:
    """Refuses archives that are larger than they look."""
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise damaged(file, f"a damaged zip file: {error}") from error
    large = max((part.file_size for part in parts if part.filename.endswith(".pkl")), default=0)
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or large > _MAX_PICKLE_BYTES:
        raise ConfigError(
            f"DUMP: {file} is compressed, or too large",
            seen=f"{large} bytes of values that are no tensors",
            expected=f"an archive as torch.save writes it, with at most {_MAX_PICKLE_BYTES} bytes of values",
            remedy="dump fewer rollouts into a file",
        )


def _reason(error: BaseException) -> str:
    """Returns the line of torch's message that names the fault."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return (named or lines or [type(error).__name__])[0].partition(" Please use")[0][:300]


def _arrays(loaded: Any) -> Any:
    """Turns tensors of samples into arrays: two dicts or lists deep, and no deeper."""
    if not isinstance(loaded, dict):
        return loaded
    out = dict(loaded)
    if isinstance(out.get("samples"), list):
        out["samples"] = [_mapped(sample) for sample in out["samples"]]
    if isinstance(out.get("rollout_data"), dict):
        columns = out["rollout_data"]
        out["rollout_data"] = {
            name: [_array(each) for each in column] if isinstance(column, list | tuple) else _array(column)
            for name, column in columns.items()
        }
    return out


def _mapped(sample: Any) -> Any:
    return {name: _array(value) for name, value in sample.items()} if isinstance(sample, dict) else sample


def _array(value: Any) -> Any:
    """Returns a tensor as an array, bfloat16 as float32; a tensor without such a form, and any other value, as it
    is."""
    import torch

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized or value.is_meta:
        return value
    wide = value.detach()
    return (wide.float() if wide.is_floating_point() and wide.dtype != torch.float64 else wide).numpy()
