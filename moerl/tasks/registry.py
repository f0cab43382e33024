"""All tasks: one for each module of this package that defines a `TaskSection`. Torch-free; any process."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

import moerl.tasks
from moerl.sections import find_sections
from moerl.tasks.section import TaskSection

TASK_SECTIONS = find_sections(moerl.tasks, TaskSection, __name__)

if TYPE_CHECKING:
    TaskConfig = TaskSection
else:
    TaskConfig = Annotated[reduce(or_, TASK_SECTIONS), Field(discriminator="name")]
    """The ``task`` section of a configuration: that of the task with this name."""
