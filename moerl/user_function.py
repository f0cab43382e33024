"""Functions that a configuration names as ``package.module:function`` and that run in moerl's own processes.

Modules are looked for on this process's import path, then in the current directory. Torch-free.
"""

from __future__ import annotations

import functools
import importlib
import os
import symtable
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from moerl.errors import ConfigError


def check_function(key: str, name: str) -> None:
    """Looks the function up without running any code of its module.

    Raises:
        ConfigError: there is no such module, its source cannot be compiled, or it has no such name at its top level.
    """
    module, _, function = name.partition(":")
    spec = _find(module)
    if spec is None:
        raise not_loaded(key, name, f"no module {module}")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    try:
        table = symtable.symtable(Path(spec.origin).read_text(encoding="utf-8"), spec.origin, "exec")
    except (SyntaxError, ValueError, OSError) as error:
        raise not_loaded(key, name, f"{type(error).__name__}: {error}") from error
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    if function not in names and "import *" not in Path(spec.origin).read_text(encoding="utf-8"):
        raise not_loaded(key, name, f"{spec.origin} defines no {function}")


@functools.cache
def load_function(key: str, name: str) -> Callable[..., Any]:
    """Imports the function and returns it. Raises `ConfigError` if it cannot be imported or called."""
    module, _, attribute = name.partition(":")
    _search_here()
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # process boundary: a user's module can raise anything
        raise not_loaded(key, name, f"{type(error).__name__}: {error}") from error
    if not callable(function):
        raise not_loaded(key, name, f"module {module} has no function {attribute}")
    return function


def _search_here() -> None:
    """Puts the current directory last on the import path, so that no file there takes the place of a library."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _find(module: str) -> ModuleSpec | None:
    """Finds a module without importing its packages; None if there is none."""
    _search_here()
    path, spec, parts = None, None, module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        found = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((each for each in found if each is not None), None)
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return None
        path = spec.submodule_search_locations
    return spec


def not_loaded(key: str, name: str, seen: str) -> ConfigError:
    """Returns the error for a function that cannot be imported. key: key of the configuration that names it."""
    return ConfigError(
        f"{key}: cannot import {name}",
        seen=seen,
        expected="an importable module with a function of that name",
        remedy="check the name; the module must be in the current directory or in a folder on PYTHONPATH",
    )
