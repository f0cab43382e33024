"""Exceptions as JSON: their classes from the most special one on, and their arguments. Runs in the sandbox."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from moerl.tasks.rewards.sandbox.values import Export, Wire, encode


def describe_class(kind: type, number_of: Callable[[Any], int]) -> list[Wire]:
    """Returns the classes of an exception class, the most special one first: module and name of those of Python;
    nothing, the name and the number of those of the program."""
    found: list[Wire] = []
    for each in kind.__mro__:
        if each is object:
            continue
        module = each.__module__
        if module != "__main__" and module.partition(".")[0] in sys.stdlib_module_names:
            found.append([module, each.__qualname__])
        else:
            found.append(["", each.__name__, number_of(each)])
    return found


def describe(error: BaseException, number_of: Callable[[Any], int], export: Export) -> list[Wire]:
    """Returns the answer that says what was raised."""
    try:
        arguments = encode(list(error.args), export)
    except Exception:  # noqa: BLE001 - process boundary: a program's objects can raise anything
        arguments = ["list"]
    return ["raise", describe_class(type(error), number_of), arguments, number_of(error)]


def python_class(module: Any, name: Any) -> type[BaseException] | None:
    """Returns an exception class of Python that this process has imported already; None if it has not."""
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
