"""All kinds of scorers: one for each module of this package that defines a `ScorerSection`. Torch-free; any process."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

import moerl.scorers
from moerl.scorers.section import ScorerSection
from moerl.sections import find_sections

SCORER_SECTIONS = find_sections(moerl.scorers, ScorerSection, __name__)

if TYPE_CHECKING:
    ScorerConfig = ScorerSection
else:
    ScorerConfig = reduce(or_, SCORER_SECTIONS)
    """Settings of one scorer: those of the kind that it names."""
    if len(SCORER_SECTIONS) > 1:
        ScorerConfig = Annotated[ScorerConfig, Field(discriminator="kind")]
