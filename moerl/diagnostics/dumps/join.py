"""Log-probs of the trainer from train data, put beside the rollouts of another dump. numpy only; any process."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from moerl.diagnostics.dumps import slime
from moerl.diagnostics.dumps.rollout import Dump, DumpedRollout
from moerl.errors import ConfigError

_MAX_STEPS_SAID = 8


def joined(dumps: Sequence[Dump]) -> list[Dump]:
    """Returns the dumps of rollouts, each rollout with the trainer's log-probs that train data has of it.

    slime and miles write routes into one dump and the trainer's log-probs into another. A rollout and its train data
    have the same tokens, the same sampled tokens, the same log-probs of the engine and, if both say one, the same
    step. Train data are read at once, and what they say of the trainer is held in memory. Without train data, or with
    nothing else, the dumps come back as they are.

    Raises:
        ConfigError: the train data have no log-probs of the trainer; or, when the last dump has been read, they belong
            to none of the rollouts.
    """
    trains = [dump for dump in dumps if dump.format == slime.TRAIN]
    others = [dump for dump in dumps if dump.format != slime.TRAIN]
    if not trains or not others:
        return list(dumps)
    known = _Known()
    for train in trains:
        for rollout in train.rollouts:
            known.add(rollout)
        others[0].unusable.add_all(train.unusable, "train data: ")
    known.check(others[0])
    ends = [False] * (len(others) - 1) + [True]
    return [_with_trainer(dump, known, is_last) for dump, is_last in zip(others, ends, strict=True)]


@dataclass(slots=True)
class _Known:
    """Rows of train data, by the tokens of a rollout, and how many rollouts they belonged to."""

    by_tokens: defaultdict[bytes, list[DumpedRollout]] = field(default_factory=lambda: defaultdict(list))
    steps: set[int] = field(default_factory=set)
    rollout_steps: set[int] = field(default_factory=set)
    num_samples: int = 0
    num_matched: int = 0
    num_other_logprobs: int = 0

    def add(self, rollout: DumpedRollout) -> None:
        """Keeps a sample; ranks that hold a part of the model alone write some without log-probs of the trainer."""
        self.num_samples += 1
        if rollout.trainer_logprobs:
            self.steps.add(rollout.step)
            self.by_tokens[_key(rollout)].append(replace(rollout, kept=None, prompt="", response=""))

    def check(self, dump: Dump) -> None:
        if not self.by_tokens:
            reasons = "; ".join(reason for reason in dump.unusable.counts if reason.startswith("train data: "))
            raise ConfigError(
                "DUMP: train data without log-probs of the trainer",
                seen=f"{self.num_samples} samples without log_probs" + (f"; {reasons}" if reasons else ""),
                expected="log_probs of the samples, which slime and miles compute before the update",
                remedy="name the train data of the last pipeline stage, or the dump of rollouts alone",
            )

    def find(self, rollout: DumpedRollout) -> DumpedRollout | None:
        """Returns the sample of this rollout, the one with its name if there are several."""
        self.rollout_steps.add(rollout.step)
        same_tokens = [each for each in self.by_tokens.get(_key(rollout), ()) if _same_step(each, rollout)]
        same = [each for each in same_tokens if (each.rollout_logprobs == rollout.rollout_logprobs).all()]
        self.num_other_logprobs += bool(same_tokens) and not same
        self.num_matched += bool(same)
        return next((each for each in same if each.name == rollout.name), same[0]) if same else None

    def check_end(self) -> None:
        if self.num_matched:
            return
        seen = f"rollouts of {_steps(self.rollout_steps)}, train data of {_steps(self.steps)}, no sample in both"
        if self.num_other_logprobs:
            seen += (
                f"; {self.num_other_logprobs} rollouts have the tokens of a sample and other log-probs of the engine"
            )
        raise ConfigError(
            "DUMP: rollouts and train data do not fit together",
            seen=seen,
            expected="samples with the same tokens, loss mask and log-probs of the engine",
            remedy="name the two files that one run wrote with the same rollout_id, or one of them alone",
        )


def _with_trainer(dump: Dump, known: _Known, is_last: bool) -> Dump:
    notes = [note for note in dump.notes if note != slime.TRAINER_ELSEWHERE]
    return Dump(f"{dump.format}, with {slime.TRAIN}", _matched(dump, known, notes, is_last), dump.unusable, notes)


def _matched(dump: Dump, known: _Known, notes: list[str], is_last: bool) -> Iterator[DumpedRollout]:
    missing, total = 0, 0
    for rollout in dump.rollouts:
        total += 1
        found = known.find(rollout)
        missing += found is None
        yield rollout if found is None else replace(rollout, trainer_logprobs=found.trainer_logprobs)
    notes += [note for note in dump.notes if note not in (*notes, slime.TRAINER_ELSEWHERE)]
    if is_last:
        known.check_end()
    if missing:
        notes.append(f"{missing} of {total} rollouts are not in the train data")


def _key(rollout: DumpedRollout) -> bytes:
    digest = hashlib.blake2b(rollout.token_ids.tobytes(), digest_size=16)
    digest.update(rollout.sampled.tobytes())
    return digest.digest()


def _same_step(one: DumpedRollout, other: DumpedRollout) -> bool:
    return one.step == other.step or -1 in (one.step, other.step)


def _steps(steps: set[int]) -> str:
    said = [str(step) for step in sorted(steps) if step >= 0]
    more = f" and {len(said) - _MAX_STEPS_SAID} more" if len(said) > _MAX_STEPS_SAID else ""
    return f"rollout_id {', '.join(said[:_MAX_STEPS_SAID])}{more}" if said else "no rollout_id"
