"""Packs samples into microbatches under a token budget. Torch-free; runs in the controller and in offline
commands.

A token counts once it is an input: a sample of S tokens has S - 1 rows. Every function here is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from moerl.batching.cost import SequenceCost
from moerl.batching.partition import Pack, plan_packs
from moerl.batching.prefixes import PrefixFamily, alone, find_families, find_text_families
from moerl.batching.rows import Padding, SequenceRows, build_microbatch, text_rows, trajectory_rows
from moerl.contract.batch import Microbatch, TextSample, TrainSample
from moerl.contract.reasons import Reason
from moerl.contract.routing import rollout_key
from moerl.contract.trajectory import ModelSpec
from moerl.errors import ConfigError, ContractError

Uncaptured = Literal["reject", "live"]
"""Treatment of rows without captured routing: the batch is refused, or the trainer's own router decides there."""

_PARTS_OF_A_RANK = 8
"""Parts of a rank's rows: if several ranks have to be balanced, samples that share rows take up at most one part."""


@dataclass(frozen=True, slots=True)
class PackOptions:
    """Options by which sequences share microbatches."""

    token_budget: int
    """Most rows of a microbatch, padding included; a longer sample has a microbatch of its own."""
    padding: Padding = field(default_factory=Padding)
    """Padding that the layout needs."""
    count_multiple: int = 1
    """Ranks get a multiple of this many microbatches, as an interleaved pipeline schedule needs."""
    cost: SequenceCost = field(default_factory=SequenceCost)
    """Cost by which ranks are balanced; the default counts rows alone."""
    share_prompts: bool = False
    """True if rows that several samples begin with are packed once."""
    scores: tuple[str, ...] = ()
    """Names of the side scores that rows carry (`Algorithm.needs`)."""


def pack_trajectories(
    samples: Sequence[TrainSample], options: PackOptions, *, replay: bool, uncaptured: Uncaptured = "reject"
) -> list[Microbatch]:
    """Runs `pack_for_ranks` for one rank."""
    return pack_for_ranks(samples, 1, options, replay=replay, uncaptured=uncaptured)[0]


def pack_for_ranks(
    samples: Sequence[TrainSample],
    num_ranks: int,
    options: PackOptions,
    *,
    replay: bool,
    uncaptured: Uncaptured = "reject",
) -> list[list[Microbatch]]:
    """Returns one list of microbatches per data-parallel rank, all of the same length; together they hold every sample
    once.

    Expert-parallel ranks meet in every forward pass, so all must run equally many, as few as the options allow, of
    nearly equal cost (`moerl.batching.partition.plan_packs`); a rank without enough sequences gets microbatches of pad
    rows alone.

    Args:
        samples: trajectories of one model with their advantages; `sample_index` counts in this sequence.
        replay: attach expert ids and their checksums.
        uncaptured: with `replay`, the treatment of rows without captured routing.

    Raises:
        ReplayError: `replay`, `uncaptured` is reject, and a row has no captured routing.
        ContractError: Advantages do not fit, tokens were drawn greedily, or the samples are of different models or
            twice of one rollout.
        ConfigError: the budget does not hold one padded row.
    """
    spec = _common_spec(samples)
    _refuse_repeated_rollouts(samples)
    num_rows = [len(sample.trajectory) - 1 for sample in samples]
    families = alone(len(samples))
    if options.share_prompts:
        families = find_families(samples, options.padding, _most_rows(num_rows, num_ranks, options))

    def rows(index: int) -> SequenceRows:
        return trajectory_rows(samples[index], index, replay=replay, uncaptured=uncaptured, scores=options.scores)

    return _pack(families, num_rows, rows, num_ranks, options, spec if replay else None)


def pack_text_for_ranks(samples: Sequence[TextSample], num_ranks: int, options: PackOptions) -> list[list[Microbatch]]:
    """Does the same as `pack_for_ranks` for supervised sequences.

    Raises:
        ContractError: A sequence is too short, or its loss mask does not fit.
        ConfigError: the budget does not hold one padded row.
    """
    texts = [text_rows(sample, index) for index, sample in enumerate(samples)]
    num_rows = [len(text) for text in texts]
    families = alone(len(texts))
    if options.share_prompts:
        families = find_text_families(texts, options.padding, _most_rows(num_rows, num_ranks, options))
    return _pack(families, num_rows, texts.__getitem__, num_ranks, replace(options, scores=()), None)


def packing_metrics(ranks: Sequence[Sequence[Microbatch]], options: PackOptions) -> dict[str, float]:
    """Returns how well whole microbatches of all data-parallel ranks are filled and balanced, by metric name.

    With c the cost of microbatch i of rank r, R ranks and the sums over all: ``packing/cost_max_over_mean`` is
    max_r(sum_i c) R / sum c, and ``packing/lockstep_over_mean`` is sum_i(max_r c) R / sum c, the time lost if the
    ranks wait for one another in every microbatch.
    """
    batches = [batch for rank in ranks for batch in rank]
    if not batches:
        return {}
    num_real = sum(int((~batch.is_pad).sum()) for batch in batches)
    costs_RM = np.array([[_batch_cost(batch, options.cost) for batch in rank] for rank in ranks])
    mean = costs_RM.sum() / len(ranks)
    return {
        "packing/fill": num_real / (len(batches) * options.token_budget),
        "packing/real_rows": num_real / sum(batch.num_rows for batch in batches),
        "packing/cost_max_over_mean": float(costs_RM.sum(1).max() / mean),
        "packing/lockstep_over_mean": float(costs_RM.max(0).sum() / mean),
        "packing/microbatches": float(costs_RM.shape[1]),
        "packing/shared_rows": sum(_num_shared(batch) for batch in batches) / max(num_real, 1),
    }


def _batch_cost(batch: Microbatch, cost: SequenceCost) -> float:
    is_sample = batch.sample_index[batch.cu_seqlens[:-1]] >= 0
    lengths, before = np.diff(batch.cu_seqlens)[is_sample], batch.rows_before[is_sample]
    return sum(cost(first + rows) - cost(first) for first, rows in zip(before.tolist(), lengths.tolist(), strict=True))


def _num_shared(batch: Microbatch) -> int:
    """Returns the number of rows that are not packed because those of another sample stand for them."""
    if batch.prefix_of is None:
        return 0
    used = np.unique(batch.prefix_of[batch.prefix_of >= 0])
    # A prefix that is no sample itself is packed in the place of one of those that begin with it.
    samples = batch.sample_index[batch.cu_seqlens[:-1]]
    extra = [prefix for prefix in used if (samples == samples[prefix]).sum() > 1]
    return int(batch.rows_before.sum() - np.diff(batch.cu_seqlens)[extra].sum())


def _most_rows(num_rows: Sequence[int], num_ranks: int, options: PackOptions) -> int:
    """Returns the most rows that a family may have: it fits into a microbatch, and ranks can be balanced with it."""
    total = sum(num_rows)
    return min(options.token_budget, total // (_PARTS_OF_A_RANK * num_ranks) if num_ranks > 1 else total)


def _pack(
    families: Sequence[PrefixFamily],
    num_rows: Sequence[int],
    rows_of: Callable[[int], SequenceRows],
    num_ranks: int,
    options: PackOptions,
    spec: ModelSpec | None,
) -> list[list[Microbatch]]:
    """Returns microbatches per rank. num_rows, rows_of: of every sample. spec: as in `build_microbatch`."""
    unit, budget = options.padding.unit, options.token_budget
    if unit > budget:
        raise ConfigError(
            "trainer.microbatch_tokens does not hold one padded row",
            seen=f"{budget} tokens, padded to a multiple of {unit}",
            expected=f"at least {unit}",
            remedy="raise trainer.microbatch_tokens",
        )
    sizes = [family.size(num_rows, options.padding) for family in families]
    costs = [family.cost(num_rows, options.padding, options.cost) for family in families]

    def build(pack: Pack) -> Microbatch:
        sequences: list[SequenceRows] = []
        for family in (families[i] for i in pack):
            sequences += family.sequences([rows_of(i) for i in family.members], len(sequences))
        return build_microbatch(sequences, options.padding, spec, options.scores)

    plan = plan_packs(sizes, costs, num_ranks, budget - budget % unit, count_multiple=options.count_multiple)
    return [[build(pack) for pack in packs] for packs in plan]


def _refuse_repeated_rollouts(samples: Sequence[TrainSample]) -> None:
    """Refuses two samples of one rollout: their rows have one salt, so that their routes could change places under one
    checksum."""
    seen: dict[int, int] = {}
    for index, sample in enumerate(samples):
        rollout_id = sample.trajectory.lineage.rollout_id
        first = seen.setdefault(rollout_key(rollout_id), index)
        if first != index:
            raise ContractError(
                Reason.ROLLOUT_DUPLICATE,
                field="lineage.rollout_id",
                seen=f"samples {first} and {index} are both of rollout {rollout_id!r}",
                expected="every rollout once in a batch",
                remedy="give every rollout an id of its own, or drop the repetition",
            )


def _common_spec(samples: Sequence[TrainSample]) -> ModelSpec | None:
    """Returns the model of all samples; None without samples."""
    specs = list(dict.fromkeys(sample.trajectory.spec for sample in samples))
    if len(specs) > 1:
        raise ContractError(
            Reason.SPEC_MISMATCH,
            field="spec",
            seen=f"{specs[0]} and {specs[1]}",
            expected="trajectories of one model in a batch",
            remedy="train on the trajectories of one model at a time",
        )
    return specs[0] if specs else None
