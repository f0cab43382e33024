"""The trainer's log-probs that a dump brings, against the engine's and those of our own scoring. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.causes.faults import CLEAN, LEAST_TOKENS, MOST_FLOOR, ODD
from moerl.diagnostics.causes.gaps import Gaps, Plan
from moerl.diagnostics.causes.texts import CAUSES
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.report.data import Evidence, Finding, Interval, Level
from moerl.diagnostics.report.run_findings import FAR_SHARE
from moerl.telemetry.metrics import SCORERS

FACT = "the trainer's log-probs"
"""Name of the fact whose value is `TrainerSide.said`."""
FAR_LOG_RATIO = float(np.log(2.0))
WITH_ENGINE = 0.5
"""Times the trainer's distance from the model, below which its distance from the engine is small."""
_SAME = 1e-4
"""Times the floor, within which two distances are one."""
_CLEARLY = 0.8
"""Times the second distance, up to which the first tells what the trainer kept."""


def scorer_of_trainer(rollout: DumpedRollout) -> str:
    """Returns the name under which the rollout has the log-probs that the trainer trained with."""
    names = list(rollout.trainer_logprobs)
    return next((name for name in ("trainer", *SCORERS) if name in names), names[0])


def sampled_gaps(rollout: DumpedRollout) -> NDArray[np.float64]:
    """Returns d of the sampled tokens from the log-probs that the dump brings, float64 [T], nats."""
    theirs = rollout.trainer_logprobs[scorer_of_trainer(rollout)]
    return (theirs.astype(np.float64) - rollout.rollout_logprobs)[rollout.sampled]


@dataclass(frozen=True, slots=True)
class TrainerSide:
    """The trainer's log-probs against those of scorers. Shape legend: H = rollouts that have the trainer's."""

    gaps: Gaps
    """All rollouts and their scores."""
    plans: Mapping[str, Plan]
    """Plans of the dump as it came, by the names of `SCORERS`."""
    final: Plan
    """The plan after all repairs."""
    floor: float
    """Nats that rounding makes if each side has the experts of its own routers."""

    def there(self) -> list[int]:
        """Returns the numbers of the rollouts that have the trainer's log-probs."""
        return [number for number, rollout in enumerate(self.gaps.rollouts) if rollout.trainer_logprobs]

    def from_engine(self) -> NDArray[np.float64]:
        """Returns the trainer's log-probs less the engine's, of all sampled tokens of those rollouts."""
        return np.concatenate([sampled_gaps(self.gaps.rollouts[number]) for number in self.there()])

    def distances(self) -> dict[str, float]:
        """Returns how far the trainer is from each scorer, mean |difference| in nats."""
        return {name: float(np.concatenate(self._from(plan)).mean()) for name, plan in self.plans.items()}

    def said(self) -> str:
        """Returns a sentence on how far the trainer is from the engine and from each scorer, and what it kept if that
        can be told."""
        found: list[tuple[str, float]] = []
        for name, nats in self.distances().items():
            # Without kept sets, scorers inside and outside of them are the same, but for the last digit on some CPUs.
            if all(abs(nats - other) > _SAME * self.floor for _, other in found):
                found.append((name, nats))
        found.sort(key=lambda each: each[1])
        listed = ", ".join(f"{nats:.1e} with {SCORERS[name]}" for name, nats in found)
        text = f"{np.abs(self.from_engine()).mean():.1e} nats from the engine's; from ours {listed}"
        if len(found) > 1:
            is_clear = found[0][1] <= _CLEARLY * found[1][1] and found[0][1] <= CLEAN * self.floor
            text += "" if is_clear else "; what it kept cannot be told"
        count = len(self.there())
        return text + (
            "" if count == len(self.gaps.rollouts) else f"; in {count} of {len(self.gaps.rollouts)} rollouts"
        )

    def findings(self) -> list[Finding]:
        """Returns a finding if the trainer's log-probs are those of no scorer: of all rollouts, or of some."""
        own = [replace(each, routing="own") for each in self.final]
        full = [[replace(each, kept="full") for each in plan] for plan in (own, self.final)]
        sizes = [self._from(plan) for plan in (*self.plans.values(), own, self.final, *full)]
        nearest = min(sizes, key=lambda each: float(np.concatenate(each).mean()))
        nats = float(np.concatenate(nearest).mean())
        means = np.min([[float(each.mean()) for each in of_plan] for of_plan in sizes], axis=0)
        odd = np.array([len(each) >= LEAST_TOKENS for each in nearest]) & (means > ODD * self.floor)
        left = [each for each, is_odd in zip(nearest, odd, strict=True) if not is_odd]
        if 2 * odd.sum() < len(odd) and float(np.concatenate(left).mean()) <= CLEAN * self.floor:
            if not odd.any() or self.floor > MOST_FLOOR:
                return []
            chosen = [each for each, is_odd in zip(nearest, odd, strict=True) if is_odd]
            names = tuple(self.gaps.rollouts[i].name for i in np.array(self.there())[odd].tolist())
            return [self._apart(chosen, float(np.concatenate(chosen).mean()), names)]
        # If the trainer is at the engine's side, the model is the one that is apart: findings of the engine say so.
        is_with_engine = float(np.abs(self.from_engine()).mean()) < WITH_ENGINE * nats
        return [] if is_with_engine else [self._of_temperature(nats) or self._apart(nearest, nats)]

    def _from(self, plan: Plan) -> list[NDArray[np.float64]]:
        """Returns |the trainer's log-probs less those of a plan|, of the sampled tokens of each rollout, [H]."""
        ours = self.gaps.logprobs(plan)
        found: list[NDArray[np.float64]] = []
        for number in self.there():
            rollout = self.gaps.rollouts[number]
            theirs = rollout.trainer_logprobs[scorer_of_trainer(rollout)][rollout.sampled].astype(np.float64)
            found.append(np.abs(theirs - ours[number]))
        return found

    def _apart(self, sizes: Sequence[NDArray[np.float64]], nats: float, names: tuple[str, ...] = ()) -> Finding:
        far = float((np.concatenate(sizes) > FAR_LOG_RATIO).mean())
        title = f"the trainer's log-probs are {nats:.1e} nats from the model's, whatever is kept"
        if names:
            title += f", in {len(names)} of {len(self.there())} rollouts"
        evidence = (
            Evidence("mean difference to the nearest scorer", f"{nats:.2e} nats", f"{self.floor:.1e} (rounding)"),
            Evidence("tokens that differ by more than a factor of 2", f"{far:.1%}", f"at most {FAR_SHARE:.0%}"),
        )
        is_fault = not names and far > FAR_SHARE
        return _finding("trainer_apart", "fault" if is_fault else "note", title, evidence, names)

    def _of_temperature(self, before: float) -> Finding | None:
        """Tells whether the trainer scored without the temperature."""
        temperatures = [float(np.median(r.temperatures[r.sampled])) for r in self.gaps.rollouts]
        if all(abs(each - 1.0) < 0.01 for each in temperatures):
            return None
        without = [
            replace(each, factor=1.0 / temperature) for each, temperature in zip(self.final, temperatures, strict=True)
        ]
        plans = (without, [replace(each, routing="own") for each in without])
        after = min(float(np.concatenate(self._from(plan)).mean()) for plan in plans)
        if after > CLEAN * self.floor:
            return None
        seen = Evidence("mean difference with and without the temperature", f"{before:.2e}, {after:.2e} nats")
        title = f"the trainer's log-probs are those before the temperature of {np.median(temperatures):g} was applied"
        return _finding("trainer_temperature", "fault", title, (seen,))


def _finding(
    cause: str, level: Level, title: str, evidence: tuple[Evidence, ...], names: tuple[str, ...] = ()
) -> Finding:
    # The gap that a report takes apart is the engine's: the trainer has no part in it.
    none = Interval(0.0, 0.0, 0.0)
    return Finding(cause, level, "likely", title, CAUSES[cause].remedy, none, 0.0, evidence, names)
