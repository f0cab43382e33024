"""All kinds of scorers: one for each module of this package that defines a `ScorerSection`. Torch-free; any process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import moerl.scorers
from moerl.scorers.section import ScorerSection
from moerl.sections import find_sections, one_of

SCORER_SECTIONS = find_sections(moerl.scorers, ScorerSection, __name__)

if TYPE_CHECKING:
    ScorerConfig = ScorerSection
else:
    ScorerConfig = one_of(SCORER_SECTIONS, "kind")
    """Settings of one scorer: those of the kind that it names."""
