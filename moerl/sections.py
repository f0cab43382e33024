"""Parts of every section of a configuration: the base, numbers with their bounds, and paths. Torch-free.

Below every package, so that each can describe its own settings.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, no coercion, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def find_sections[S: Section](package: ModuleType, base: type[S], without: str) -> list[type[S]]:
    """Imports the modules of a package; returns their subclasses of `base`, in the order of the modules' names.

    without: module that is left out, as it asks.
    """
    names = [f"{package.__name__}.{each.name}" for each in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(name) for name in names if name != without]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
        if value is not base
    ]


def one_of(sections: Sequence[type[Section]], name: str) -> Any:
    """Returns the type of a section that is one of these; the key `name` says which."""
    return Annotated[reduce(or_, sections), Field(discriminator=name)]


UNSHOWN = "unshown"
"""Type of a `PydanticCustomError` about a value that may hold a secret: no error shows it."""

LARGEST_INT = 2**40
"""Bound of numbers that have no bound of their own: far above any use, and safe in the arithmetic of all libraries."""

Count = Annotated[int, Field(ge=1, le=LARGEST_INT)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST_INT)]
LARGEST_SIZE = 2**24
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
Ranks = Annotated[int, Field(ge=1, le=2**16)]
Digits = Annotated[int, Field(ge=1, le=18)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Terms = Annotated[int, Field(ge=2, le=1000)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Part = Annotated[float, Field(gt=0.0, lt=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
FloatName = Literal["float32", "bfloat16"]
SamplerFloatName = Literal["float32", "bfloat16", "float8"]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""``package.module:function``."""


def _readable_path(value: object) -> object:
    """Refuses paths that no file system accepts, and ~, which the shell should have replaced."""
    if not isinstance(value, str):
        return value
    if not value or "\0" in value:
        raise ValueError("a path of one character or more, none of them NUL")
    if value.startswith("~"):
        raise ValueError("a path without ~, which the shell leaves as it is behind KEY=; write $HOME")
    if max(len(part.encode(errors="surrogatepass")) for part in value.split("/")) > LONGEST_NAME:
        raise ValueError(f"a path of names of at most {LONGEST_NAME} bytes")
    return value


LONGEST_NAME = 255
"""Bytes in the name of a file or directory, at most, on every file system in use."""
FilePath = Annotated[Path, BeforeValidator(_readable_path)]


def _plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Refuses values that cannot be passed on to a library as they stand in a configuration file."""
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, bool | int | float | str) for item in items):
            raise ValueError(f"numbers, true, false, text, and lists of them; not the value of {name}")
    return values


_Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,127}$")]
PassedOn = Annotated[dict[_Name, Any], AfterValidator(_plain_values)]
"""Settings that are passed on to a library, by their name there: numbers, booleans, texts, and lists of them."""


def _is_address(url: str) -> str:
    if re.search("[@?#]", url):
        # A configuration is stored, and shown in errors.
        raise PydanticCustomError(
            UNSHOWN, "an address without user, password, query and fragment; a key goes into key_file"
        )
    if not re.fullmatch(r"https?://\S+", url):
        raise ValueError("an address that begins with http:// or https://")
    return url


HttpAddress = Annotated[str, AfterValidator(_is_address)]
"""Address of a service, without anything that may be a secret."""
