"""Log-probs of the trainer from the dump of the trainer's side, joined to the rollouts of another dump. numpy only; any
process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.dumps import prime_rl, slime
from moerl.diagnostics.dumps.rollout import Dump, DumpedRollout, turns_of
from moerl.diagnostics.dumps.twice import same_step, tokens_key
from moerl.errors import ConfigError

_MAX_STEPS_SAID = 8

TRAINER_ELSEWHERE = (slime.TRAINER_ELSEWHERE, prime_rl.TRAINER_ELSEWHERE)
"""Notes of dumps whose trainer log-probs are in another dump."""


@dataclass(frozen=True, slots=True)
class _Side:
    """Dump of the trainer's side. format: its name. name: for people. rollouts: format of the dumps that it belongs to,
    empty if any. elsewhere: their note, which is dropped when it is joined. expected, remedy: for files that do not
    fit. needed, instead: the same for files without log-probs of the trainer."""

    format: str
    name: str
    rollouts: str
    elsewhere: str
    expected: str
    remedy: str
    needed: str
    instead: str


_SIDES = (
    _Side(
        slime.TRAIN,
        "train data",
        "",
        slime.TRAINER_ELSEWHERE,
        "samples with the same tokens, loss mask and log-probs of the engine",
        "name the two files that one run wrote with the same rollout_id, or one of them alone",
        "log_probs of the samples, which slime and miles compute before the update",
        "name the train data of the last pipeline stage, or the dump of rollouts alone",
    ),
    _Side(
        prime_rl.EXPORT,
        "token exports",
        prime_rl.TRACES,
        prime_rl.TRAINER_ELSEWHERE,
        "sequences with the same tokens and log-probs of the engine",
        "name the traces and the token exports of the same steps of one run, or one of them alone",
        "sequences with trainer_logprobs",
        "name the traces alone",
    ),
)


def belong_together(formats: Collection[str]) -> bool:
    """Returns True if a directory may hold these formats: rollouts and their trainer's side."""
    return set(formats) in ({slime.ROLLOUTS, slime.TRAIN}, {prime_rl.TRACES, prime_rl.EXPORT})


def joined(dumps: Sequence[Dump]) -> list[Dump]:
    """Returns the dumps of rollouts, each rollout with the trainer's log-probs that train data, or token exports, have
    of it.

    slime and miles write routes into one dump and the trainer's log-probs into another. A rollout and its train data
    have the same tokens, the same sampled tokens, the same log-probs of the engine and, if both say one, the same step.
    prime-rl rounds log-probs in traces, and trains tokens that several paths share once: a rollout gets log-probs and
    sampled tokens of its export. The trainer's side is read at once, and its log-probs stay in memory. Dumps without a
    trainer's side, or a trainer's side alone, come back as they are.

    Raises:
        ConfigError: train data have no log-probs of the trainer; or, when the last dump has been read, they belong to
            none of the rollouts.
    """
    found = list(dumps)
    for side in _SIDES:
        found = _with_side(found, side)
    return found


def is_joined(format: str, formats: Collection[str]) -> bool:
    """Returns True if a dump of the first format is joined to dumps of the others: it has no rollouts of its own
    then."""
    return any(side.format == format and any(_takes(side, other) for other in formats) for side in _SIDES)


def _takes(side: _Side, format: str) -> bool:
    return format == side.rollouts if side.rollouts else format != side.format


def _with_side(dumps: list[Dump], side: _Side) -> list[Dump]:
    trains = [dump for dump in dumps if dump.format == side.format]
    others = [dump for dump in dumps if dump.format != side.format]
    places = [place for place, dump in enumerate(others) if _takes(side, dump.format)]
    if not trains or not places:
        return dumps
    known = _Known(side)
    first = others[places[0]]
    for train in trains:
        for rollout in train.rollouts:
            known.add(rollout)
        first.unusable.add_all(train.unusable, f"{side.name}: ")
    known.check(first)
    for place in places:
        dump = others[place]
        notes = [note for note in dump.notes if note != side.elsewhere]
        rollouts = _matched(dump, known, notes, place == places[-1])
        others[place] = Dump(f"{dump.format}, with {side.format}", rollouts, dump.unusable, notes)
    return others


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """Parts of a `DumpedRollout` of the trainer's side."""

    name: str
    step: int
    sampled: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    trainer_logprobs: Mapping[str, NDArray[np.float32]]


@dataclass(slots=True)
class _Known:
    """Samples of the trainer's side, by the tokens of a rollout, and how many rollouts they belonged to."""

    side: _Side
    by_tokens: defaultdict[bytes, list[_Sample]] = field(default_factory=lambda: defaultdict(list))
    steps: set[int] = field(default_factory=set)
    rollout_steps: set[int] = field(default_factory=set)
    num_samples: int = 0
    num_matched: int = 0
    num_other_logprobs: int = 0
    found: set[tuple[bytes, int]] = field(default_factory=set)

    def add(self, rollout: DumpedRollout) -> None:
        """Keeps a sample that has log-probs of the trainer; ranks that hold only a part of the model write some
        without."""
        self.num_samples += 1
        if rollout.trainer_logprobs:
            self.steps.add(rollout.step)
            self.by_tokens[self._key(rollout)].append(
                _Sample(rollout.name, rollout.step, rollout.sampled, rollout.rollout_logprobs, rollout.trainer_logprobs)
            )

    def check(self, dump: Dump) -> None:
        if not self.by_tokens:
            name = self.side.name
            reasons = "; ".join(reason for reason in dump.unusable.counts if reason.startswith(f"{name}: "))
            raise ConfigError(
                f"DUMP: {name} without log-probs of the trainer",
                seen=f"{self.num_samples} samples without log_probs" + (f"; {reasons}" if reasons else ""),
                expected=self.side.needed,
                remedy=self.side.instead,
            )

    def find(self, rollout: DumpedRollout) -> _Sample | None:
        """Returns the sample of this rollout, the one with its name if there are several."""
        self.rollout_steps.add(rollout.step)
        key = self._key(rollout)
        same_tokens = [each for each in self.by_tokens.get(key, ()) if same_step(each.step, rollout.step)]
        same = [each for each in same_tokens if self._fits(each, rollout)]
        self.num_other_logprobs += bool(same_tokens) and not same
        self.num_matched += bool(same)
        self.found.update((key, each.step) for each in same)
        return next((each for each in same if each.name == rollout.name), same[0]) if same else None

    def num_left(self) -> int:
        """Returns how many samples belong to no rollout."""
        return sum((key, each.step) not in self.found for key, several in self.by_tokens.items() for each in several)

    def check_end(self) -> None:
        if self.num_matched:
            return
        name = self.side.name
        seen = f"rollouts of {self._said(self.rollout_steps)}, {name} of {self._said(self.steps)}, no sample in both"
        if self.num_other_logprobs:
            have = "rollout has" if self.num_other_logprobs == 1 else "rollouts have"
            seen += f"; {self.num_other_logprobs} {have} the tokens of a sample and other log-probs of the engine"
        raise ConfigError(
            f"DUMP: rollouts and {name} do not fit together",
            seen=seen,
            expected=self.side.expected,
            remedy=self.side.remedy,
        )

    def _key(self, rollout: DumpedRollout) -> bytes:
        # Token exports have other sampled tokens than traces.
        is_alike = self.side.format == slime.TRAIN
        return tokens_key(rollout if is_alike else replace(rollout, sampled=np.zeros(0, np.bool_)))

    def _fits(self, sample: _Sample, rollout: DumpedRollout) -> bool:
        if self.side.format == slime.TRAIN:
            return bool((sample.rollout_logprobs == rollout.rollout_logprobs).all())
        here = sample.sampled
        near = np.abs(sample.rollout_logprobs - rollout.rollout_logprobs)[here] <= 0.51 * 10.0**-prime_rl.DECIMALS
        return bool(rollout.sampled[here].all() and near.all())

    def _said(self, steps: set[int]) -> str:
        word = "rollout_id" if self.side.format == slime.TRAIN else "step"
        said = [str(step) for step in sorted(steps) if step >= 0]
        more = f" and {len(said) - _MAX_STEPS_SAID} more" if len(said) > _MAX_STEPS_SAID else ""
        return f"{word} {', '.join(said[:_MAX_STEPS_SAID])}{more}" if said else f"no {word}"


def _matched(dump: Dump, known: _Known, notes: list[str], is_last: bool) -> Iterator[DumpedRollout]:
    missing, total, side = 0, 0, known.side
    for rollout in dump.rollouts:
        total += 1
        found = known.find(rollout)
        missing += found is None
        yield rollout if found is None else _trained(rollout, found)
    wrong = (side.elsewhere,) if missing else (side.elsewhere, prime_rl.ROUNDED)
    notes += [note for note in dump.notes if note not in (*notes, *wrong)]
    if is_last:
        known.check_end()
    if missing:
        notes.append(f"{missing} of {total} rollouts {'is' if missing == 1 else 'are'} not in the {side.name}")
    if is_last and (left := known.num_left()):
        are = "sample is" if left == 1 else "samples are"
        notes.append(f"{left} {are} in the {side.name} alone, and left out")


def _trained(rollout: DumpedRollout, sample: _Sample) -> DumpedRollout:
    """Returns a rollout with what the trainer's side has of it. Only token exports have other sampled tokens."""
    rollout = replace(rollout, rollout_logprobs=sample.rollout_logprobs, trainer_logprobs=sample.trainer_logprobs)
    if (sample.sampled == rollout.sampled).all():
        return rollout
    sampled = sample.sampled
    versions = np.where(sampled, rollout.policy_versions, -1).astype(np.int32)
    return replace(rollout, sampled=sampled, turns=turns_of(sampled), policy_versions=versions)
