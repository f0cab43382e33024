"""Import of Megatron-Bridge with and without Transformer Engine, quietly. Runs in every trainer rank."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

from moerl.errors import ConfigError
from moerl.machine.shipped import BRIDGE
from moerl.machine.torch_start import uncollected
from moerl.trainer import platform


class _StubModule(types.ModuleType):
    """A module whose every attribute is an empty class: enough for isinstance checks and type annotations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        stub = type(name, (), {"__doc__": "stand-in for a Transformer Engine class"})
        setattr(self, name, stub)
        return stub


@contextlib.contextmanager
def _transformer_engine_stub() -> Iterator[None]:
    """Stands in for Transformer Engine while bridge modules are imported (they import it unconditionally)."""
    if "transformer_engine" in sys.modules or importlib.util.find_spec("transformer_engine"):
        yield
        return
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")
    stubs = []
    for name in names:
        stub: Any = _StubModule(name)
        stub.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        stub.__path__, stub.__version__ = [], "0.0"
        sys.modules[name] = stub
        stubs.append(stub)
    stubs[0].pytorch, stubs[1].ops = stubs[1], stubs[2]
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.") and getattr(module, "HAVE_TE", False) is True:
                module.HAVE_TE = False  # type: ignore[attr-defined]


def import_bridge() -> Any:
    """Imports and returns the class `megatron.bridge.AutoBridge`, with or without Transformer Engine.

    Raises:
        ConfigError: Megatron-Bridge is not installed.
    """
    platform.prepare()
    try:
        with uncollected(), _transformer_engine_stub(), quiet():
            module = importlib.import_module("megatron.bridge")
    except ModuleNotFoundError as error:
        if error.name != "megatron.bridge":
            raise
        raise ConfigError(
            "megatron-bridge is not installed",
            seen=str(error),
            expected="megatron-bridge 0.6.2, which moerl cannot declare: it requires packages for CUDA alone",
            remedy=f"pip install --no-deps {BRIDGE}",
        ) from error
    return module.AutoBridge


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps the output and the log of Megatron and the bridge while they start (missing fusions, progress) off the
    screen. Both raise errors, and do not log them: errors pass through.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        # The bridge installs a root handler of its own while it is imported.
        root.handlers[:] = handlers
        root.setLevel(level)
