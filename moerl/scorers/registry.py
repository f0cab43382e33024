"""All kinds of scorers: one for each module of this package that defines a `ScorerSection`. Torch-free; any process."""

from __future__ import annotations

import importlib
import pkgutil
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

import moerl.scorers
from moerl.scorers.section import ScorerSection


def _sections() -> list[type[ScorerSection]]:
    names = [f"{moerl.scorers.__name__}.{each.name}" for each in pkgutil.iter_modules(moerl.scorers.__path__)]
    modules = [importlib.import_module(name) for name in names if name != __name__]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ScorerSection) and value.__module__ == module.__name__
        if value is not ScorerSection
    ]


SCORER_SECTIONS = _sections()

if TYPE_CHECKING:
    ScorerConfig = ScorerSection
else:
    ScorerConfig = reduce(or_, SCORER_SECTIONS)
    """Settings of one scorer: those of the kind that it names."""
    if len(SCORER_SECTIONS) > 1:
        ScorerConfig = Annotated[ScorerConfig, Field(discriminator="kind")]
