"""All tasks: one for each module of this package that defines a `TaskSection`. Torch-free; any process."""

from __future__ import annotations

import importlib
import pkgutil
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

import moerl.tasks
from moerl.tasks.section import TaskSection


def _sections() -> list[type[TaskSection]]:
    """Finds the sections of all tasks, in the order of their modules' names."""
    names = [f"moerl.tasks.{each.name}" for each in pkgutil.iter_modules(moerl.tasks.__path__)]
    modules = [importlib.import_module(name) for name in names if name != __name__]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, TaskSection) and value.__module__ == module.__name__
        if value is not TaskSection
    ]


TASK_SECTIONS = _sections()

if TYPE_CHECKING:
    TaskConfig = TaskSection
else:
    TaskConfig = Annotated[reduce(or_, TASK_SECTIONS), Field(discriminator="name")]
    """The ``task`` section of a configuration: that of the task with this name."""
