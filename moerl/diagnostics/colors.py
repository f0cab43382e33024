"""Colours of figures, by what a series means. One meaning has one colour in every chart of a page and in every PNG.

Pure data; torch-free; any process.
"""

from __future__ import annotations

from collections.abc import Iterable

PALETTE = ("#0072b2", "#c65102", "#00805a", "#a6488b", "#80640a", "#5a6772", "#00838f", "#7b3fa0")
"""On white. The page's style has them as `--c0` to `--c7`, and others for a dark page."""
BLUE, ORANGE, GREEN, PINK, OCHRE, GREY, TEAL, PURPLE = PALETTE

TRAINED, ROLLOUTS, EVALUATION = BLUE, ORANGE, GREEN
"""Colours of the trainer's values in a step, responses sampled for training, and greedy responses of an evaluation."""
NOTHING_KEPT, EXPERTS, MASKS, REST = PURPLE, PINK, TEAL, GREY
"""The gap with nothing kept; what other experts make of it; what sampling masks make; what is left with both kept."""

MEANINGS = {
    "as trained": TRAINED,
    "as dumped": TRAINED,
    # Scorers (moerl.telemetry.metrics.SCORERS): with masks kept the experts make the gap, and the other way round.
    "neither": NOTHING_KEPT,
    "kept_sets": EXPERTS,
    "experts": MASKS,
    "both": REST,
    # Causes of a gap (moerl.diagnostics.causes.texts).
    "routing": EXPERTS,
    "masks": MASKS,
    "unexplained": REST,
    "precision": GREEN,
    "staleness": OCHRE,
    # Rows by whether the trainer's router would have chosen other experts.
    "experts differ": EXPERTS,
    "experts agree": REST,
    "sampled": ROLLOUTS,
    "evaluation": EVALUATION,
    "heldout": PURPLE,
}
"""By the key of a series."""


def colors_of(keys: Iterable[str]) -> dict[str, str]:
    """Returns a colour for each key: that of its meaning, and for others the palette's next one that nothing else
    here has."""
    found = dict.fromkeys(keys, "")
    taken = {MEANINGS[key] for key in found if key in MEANINGS}
    free = [color for color in PALETTE if color not in taken] or [*PALETTE]
    others = [key for key in found if key not in MEANINGS]
    return {key: MEANINGS[key] if key in MEANINGS else free[others.index(key) % len(free)] for key in found}
