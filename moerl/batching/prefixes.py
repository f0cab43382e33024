"""Rows that several samples begin with: the prompt of a group is packed and computed once, its responses go on from it;
so do forks of a session from its turns, and supervised texts from what all of them begin with.

A sample of S tokens whose first sampled one is token p has p - 1 rows that predict nothing that was sampled; row p - 1,
the last of the prompt, predicts the first sampled token and stays with its response. Samples share rows only if
tokens and recorded experts are the same, id by id, so each row is enforced and proved as if it were packed for every
sample. Gradients are the same sums; the load-balancing loss counts a shared row once. Pure numpy; any process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moerl.batching.cost import SequenceCost
from moerl.batching.rows import Padding, SequenceRows
from moerl.contract.batch import TrainSample
from moerl.contract.routing import shared_key
from moerl.contract.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class PrefixFamily:
    """Samples that are packed together: they go on from rows of a prefix that is packed for all of them, or, as forks,
    from rows of the first of them."""

    members: tuple[int, ...]
    """Indices of the samples: ascending, or a session's sample and then its forks."""
    nums_shared: tuple[int, ...]
    """Rows of each member that are packed in front of it. Those of the first member are the prefix; if it has none, it
    is a sample alone, or a session, and the others share rows with it, trained ones included."""

    def size(self, num_rows: Sequence[int], padding: Padding) -> int:
        """Returns the rows of the family with their padding; `num_rows`: of every sample."""
        members = zip(self.members, self.nums_shared, strict=True)
        return self.nums_shared[0] + sum(padding.padded(num_rows[i] - num_shared) for i, num_shared in members)

    def cost(self, num_rows: Sequence[int], padding: Padding, cost: SequenceCost) -> float:
        """Returns the cost of the prefix, once, and of what each member has alone."""
        members = zip(self.members, self.nums_shared, strict=True)
        alone = sum(cost(padding.padded(num_rows[i])) - cost(num_shared) for i, num_shared in members)
        return cost(self.nums_shared[0]) + alone

    def sequences(self, rows: Sequence[SequenceRows], before: int) -> list[SequenceRows]:
        """Returns the sequences that are packed for the family.

        Args:
            rows: all rows of each member. before: sequences that stand before these in the microbatch.
        """
        prefix, key = self.nums_shared[0], rows[0].recorded.key
        key = shared_key(key) if prefix else key
        packed = [rows[0].until(prefix, key)] if prefix else []
        for each, num_shared in zip(rows, self.nums_shared, strict=True):
            packed.append(each.after(num_shared, before, key) if num_shared else each)
        return packed


def alone(num_samples: int) -> list[PrefixFamily]:
    """Returns families of one sample each, which share nothing."""
    return [PrefixFamily((index,), (0,)) for index in range(num_samples)]


def find_families(samples: Sequence[TrainSample], padding: Padding, most_rows: int) -> list[PrefixFamily]:
    """Returns samples that begin with the same rows, in families of at most `most_rows` rows if they can be divided.

    Shared rows are a multiple of `padding.sequence`, so that no padding comes between a prompt and its responses. A
    fork behind a turn goes on from its session, whose prompt is then not shared with other sessions; a fork of a fork
    from as many rows as it has of the first session.
    """
    families = _find_forks(samples, padding, most_rows)
    taken = {index for family in families for index in family.members}
    found: dict[tuple[int, bytes], list[list[int]]] = {}
    for index, sample in enumerate(samples):
        if index in taken:
            continue
        trajectory = sample.trajectory
        num_shared = _num_shared(trajectory, padding)
        candidates = found.setdefault((num_shared, trajectory.token_ids[:num_shared].tobytes()), [])
        for members in candidates:
            if num_shared and _same_routing(samples[members[0]].trajectory, trajectory, num_shared):
                members.append(index)
                break
        else:
            candidates.append([index])
    for (num_shared, _), candidates in found.items():
        for members in candidates:
            rows = [len(samples[i].trajectory) - 1 for i in members]
            families += _divided(members, num_shared, rows, most_rows)
    return sorted(families, key=lambda family: family.members)


def find_text_families(texts: Sequence[SequenceRows], padding: Padding, most_rows: int) -> list[PrefixFamily]:
    """Does the same as `find_families` for supervised texts, which share the rows that all of them begin with: an
    instruction, say. No routing is recorded for texts."""
    unlearned = [int(text.loss_mask.argmax()) for text in texts]
    begins = np.stack([text.input_ids[: min(unlearned)] for text in texts]) if texts else np.zeros((0, 0))
    num_shared = int((begins == begins[:1]).all(0).cumprod().sum())
    num_shared -= num_shared % padding.sequence
    if not num_shared:
        return alone(len(texts))
    return _divided(range(len(texts)), num_shared, [len(text) for text in texts], most_rows)


def _find_forks(samples: Sequence[TrainSample], padding: Padding, most_rows: int) -> list[PrefixFamily]:
    by_id = {sample.trajectory.lineage.rollout_id: index for index, sample in enumerate(samples)}
    num_rows = [len(sample.trajectory) - 1 for sample in samples]
    families: dict[int, PrefixFamily] = {}
    for index, sample in enumerate(samples):
        fork = sample.trajectory
        session = _session_of(fork, samples, by_id)
        if session is None:
            continue
        trunk = samples[session].trajectory
        num_shared = min(_num_shared(fork, padding), _num_same(trunk, fork, padding))
        family = families.get(session, PrefixFamily((session,), (0,)))
        family = PrefixFamily((*family.members, index), (*family.nums_shared, num_shared))
        if num_shared > _num_shared(trunk, padding) and family.size(num_rows, padding) <= most_rows:
            families[session] = family
    return [*families.values()]


def _session_of(fork: Trajectory, samples: Sequence[TrainSample], by_id: Mapping[str, int]) -> int | None:
    """Returns the sample of the session that a fork, or the fork that it comes from, goes on from; None if it is no
    fork, or that session is not there."""
    found, seen = None, {fork.lineage.rollout_id}
    while (parent := by_id.get(fork.lineage.parent_rollout_id)) is not None:
        found, fork = parent, samples[parent].trajectory
        if fork.lineage.rollout_id in seen:
            return None
        seen.add(fork.lineage.rollout_id)
    return found


def _num_same(trunk: Trajectory, fork: Trajectory, padding: Padding) -> int:
    """Returns the number of rows with which both begin, tokens and recorded experts; a multiple of
    `padding.sequence`."""
    most = min(len(trunk), len(fork)) - 1
    differs = trunk.token_ids[:most] != fork.token_ids[:most]
    differs |= trunk.routed[:most] != fork.routed[:most]
    differs |= (trunk.expert_ids[:most] != fork.expert_ids[:most]).any(axis=(1, 2))
    num_same = int(differs.argmax()) if differs.any() else most
    return num_same - num_same % padding.sequence


def _divided(members: Sequence[int], num_shared: int, rows: Sequence[int], most_rows: int) -> list[PrefixFamily]:
    parts: list[list[int]] = []
    size = most_rows
    for index, num_rows in zip(members, rows, strict=True):
        own = num_rows - num_shared
        if size + own > most_rows:
            parts.append([])
            size = num_shared
        parts[-1].append(index)
        size += own
    return [PrefixFamily(tuple(part), (num_shared if len(part) > 1 else 0,) * len(part)) for part in parts]


def _num_shared(trajectory: Trajectory, padding: Padding) -> int:
    rows = int(trajectory.sampled.argmax()) - 1
    return max(rows - rows % padding.sequence, 0)


def _same_routing(first: Trajectory, other: Trajectory, num_rows: int) -> bool:
    same = np.array_equal(first.routed[:num_rows], other.routed[:num_rows])
    return same and np.array_equal(first.expert_ids[:num_rows], other.expert_ids[:num_rows])
