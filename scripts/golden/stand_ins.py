"""Stand-ins for modules that a package imports along the way and its functions that we call never use.

Ray, a rollout engine or a data library is gigabytes, or does not run everywhere. What a stand-in takes the place of is
listed in the script of each package; no module with a function that we call is ever replaced.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def stand_in_for(*names: str) -> None:
    """From now on these modules, and all below them, are empty ones in which every name is an empty class."""
    sys.meta_path.insert(0, _Finder(names))


def without_code_of(*packages: str) -> None:
    """From now on these packages are there without what their `__init__.py` imports; their modules are the real ones.

    Parents first. For packages that import all of themselves.
    """
    for name in packages:
        parent, _, last = name.rpartition(".")
        places = sys.path if not parent else list(sys.modules[parent].__path__)
        module = ModuleType(name)
        module.__path__ = [next(str(Path(place) / last) for place in places if (Path(place) / last).is_dir())]
        sys.modules[name] = module
        if parent:
            setattr(sys.modules[parent], last, module)


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
