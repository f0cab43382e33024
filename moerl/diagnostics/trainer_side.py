"""The trainer's log-probs that a dump brings, beside the engine's and those of our own scoring. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.causes.gaps import Differences
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.telemetry.metrics import SCORERS

FACT = "the trainer's log-probs"
"""Name of the fact that `said` is the value of."""


def scorer_of_trainer(rollout: DumpedRollout) -> str:
    """Returns the name under which the rollout has the log-probs that the trainer trained with."""
    names = list(rollout.trainer_logprobs)
    return next((name for name in ("trainer", *SCORERS) if name in names), names[0])


def sampled_gaps(rollout: DumpedRollout) -> NDArray[np.float64]:
    """d of the sampled tokens from the log-probs that the dump brings, float64 [T], nats."""
    theirs = rollout.trainer_logprobs[scorer_of_trainer(rollout)]
    return (theirs.astype(np.float64) - rollout.rollout_logprobs)[rollout.sampled]


def distances(rollouts: Sequence[DumpedRollout], ours: Mapping[str, Differences]) -> dict[str, float]:
    """Returns how far the trainer's log-probs are from those of each scorer, mean |difference| in nats, over the
    rollouts that have the trainer's; nothing if none has.

    Args:
        ours: of each scorer, its log-probs less the engine's.
    """
    there = [number for number, rollout in enumerate(rollouts) if rollout.trainer_logprobs]
    if not there:
        return {}
    theirs_N = np.concatenate([sampled_gaps(rollouts[number]) for number in there])
    found: dict[str, float] = {}
    for name, each in ours.items():
        ours_N = np.concatenate([each.d_N[slice(*each.starts[number : number + 2])] for number in there])
        found[name] = float(np.abs(theirs_N - ours_N).mean())
    return found


def trainer_gaps(rollouts: Sequence[DumpedRollout]) -> NDArray[np.float64]:
    """The trainer's log-probs less the engine's, of the sampled tokens of the rollouts that have them."""
    return np.concatenate([sampled_gaps(rollout) for rollout in rollouts if rollout.trainer_logprobs])


def said(rollouts: Sequence[DumpedRollout], found: Mapping[str, float]) -> str:
    """Returns a sentence on how far the trainer is from the engine and from our scorers."""
    there = sum(bool(rollout.trainer_logprobs) for rollout in rollouts)
    nearest = min(found, key=lambda name: found[name])
    text = f"{np.abs(trainer_gaps(rollouts)).mean():.1e} nats from the engine's"
    text += f"; nearest to ours with {SCORERS[nearest]}: {found[nearest]:.1e} nats"
    return text + ("" if there == len(rollouts) else f"; in {there} of {len(rollouts)} rollouts")
