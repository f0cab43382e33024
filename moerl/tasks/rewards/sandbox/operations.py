"""Operations on objects that live in the other process. Runs in the sandbox, in both processes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

COMPARISONS_AND_ARITHMETIC = tuple(
    f"__{name}__"
    for name in (
        *("eq", "ne", "lt", "le", "gt", "ge"),
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"),
    )
)
"""Operations of two objects of the program."""


def _exit(manager: Any, *error: Any) -> Any:
    # The error is the tests'; the program learns that there was one.
    return type(manager).__exit__(manager, *([None] * 3 if error[0] is None else [Exception, Exception(), None]))


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in COMPARISONS_AND_ARITHMETIC},
    **{
        name: getattr(operator, name)
        for name in (
            *("__neg__", "__pos__", "__abs__", "__invert__", "__index__"),
            *("__contains__", "__getitem__", "__setitem__", "__delitem__"),
        )
    },
    "__len__": len,
    "__iter__": iter,
    "__reversed__": reversed,
    "__next__": next,
    "__str__": str,
    "__repr__": repr,
    "__format__": format,
    "__hash__": hash,
    "__bool__": bool,
    "__int__": int,
    "__float__": float,
    "__round__": round,
    "__enter__": lambda manager: type(manager).__enter__(manager),
    "__exit__": _exit,
    "__instancecheck__": lambda kind, value: isinstance(value, kind),
    "__subclasscheck__": lambda kind, value: issubclass(value, kind),
    "__call__": operator.call,
}
"""Special methods of objects of the program, as functions; the first argument is the object."""

GET, SET, NAME, AWAIT, PING = "get", "set", "name", "await", "ping"
"""Further operations: of an attribute, of a name of the program, of a coroutine; and whether the program is there."""
