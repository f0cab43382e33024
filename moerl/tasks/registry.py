"""All tasks: one for each module of this package that defines a `TaskSection`. Torch-free; any process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import moerl.tasks
from moerl.sections import find_sections, one_of
from moerl.tasks.section import TaskSection

TASK_SECTIONS = find_sections(moerl.tasks, TaskSection, __name__)

if TYPE_CHECKING:
    TaskConfig = TaskSection
else:
    TaskConfig = one_of(TASK_SECTIONS, "name")
    """The ``task`` section of a configuration: that of the task with this name."""
