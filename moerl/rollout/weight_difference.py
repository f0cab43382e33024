"""The weights that an engine holds, compared with those that were sent to it. Runs in the engine's process."""

from __future__ import annotations

from collections.abc import Mapping

from moerl.errors import WeightSyncError

_NAMED = 5


def weight_difference(engine_id: str, sent: Mapping[str, int], held: Mapping[str, int]) -> WeightSyncError | None:
    """Returns the tensors whose checksums differ, as an error; None if all of `sent` agree."""
    wrong = sorted(name for name, value in sent.items() if held.get(name) != value)
    if not wrong:
        return None
    listed = ", ".join(f"'{name}'" for name in wrong[:_NAMED]) + (", ..." if len(wrong) > _NAMED else "")
    return WeightSyncError(
        f"weight update: {engine_id!r} does not hold what was sent: {listed}",
        seen=f"{len(wrong)} of {len(sent)} checksums differ",
        expected="equal checksums on both sides",
        remedy="it serves nothing until a whole update has passed; look for faulty memory or links",
    )
