"""Log-probs of the trainer from one dump, put beside the rollouts of another. numpy only; any process."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from moerl.diagnostics.dumps.rollout import Dump, DumpedRollout


def joined(dump: Dump, train: Dump) -> Dump:
    """The rollouts of `dump`, with the trainer's log-probs and experts of those in `train` that have the same tokens.

    slime and miles write routes into one dump and the trainer's log-probs into another. `train` is read at once and
    what it says of the trainer is held in memory. Rollouts with equal tokens are matched in order.
    """
    found: dict[bytes, deque[Mapping[str, Any]]] = defaultdict(deque)
    for rollout in train.rollouts:
        found[_key(rollout)].append(
            {"trainer_logprobs": rollout.trainer_logprobs, "trainer_expert_ids": rollout.trainer_expert_ids}
        )
    notes = [*dump.notes, *(note for note in train.notes if note not in dump.notes)]
    unusable = dump.unusable
    for reason, count in train.unusable.counts.items():
        unusable.counts[f"train data: {reason}"] += count
        unusable.examples.setdefault(f"train data: {reason}", train.unusable.examples[reason])
    return Dump(f"{dump.format}, with {train.format}", _matched(dump, found, notes), unusable, notes)


def _matched(dump: Dump, found: dict[bytes, deque[Mapping[str, Any]]], notes: list[str]) -> Iterator[DumpedRollout]:
    missing, total = 0, 0
    for rollout in dump.rollouts:
        total += 1
        matches = found.get(_key(rollout))
        if matches:
            yield replace(rollout, **matches.popleft())
        else:
            missing += 1
            yield rollout
    notes += [note for note in dump.notes if note not in notes]
    if missing:
        notes.append(f"{missing} of {total} rollouts are not in the train data")


def _key(rollout: DumpedRollout) -> bytes:
    digest = hashlib.blake2b(rollout.token_ids.tobytes(), digest_size=16)
    digest.update(rollout.sampled.tobytes())
    return digest.digest()
