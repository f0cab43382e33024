"""Packs samples into microbatches under a token budget. Torch-free; runs in the controller or on a trainer
rank.

A token counts once it is an input: a sample of S tokens has S - 1 rows. Every function here is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from moerl.buffer.partition import Pack, first_fit_decreasing, split_balanced, split_until
from moerl.buffer.rows import Padding, build_microbatch, text_rows, trajectory_rows
from moerl.contract.batch import Microbatch, TextSample, TrainSample
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import ModelSpec
from moerl.errors import ConfigError, ContractError

Uncaptured = Literal["reject", "live"]
"""What happens to rows without captured routing: the batch is refused, or the trainer's own router decides there."""


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How sequences share microbatches.

    token_budget: most rows of a microbatch, padding included; a longer sample has a microbatch of its own.
    padding: what the layout needs.
    """

    token_budget: int
    padding: Padding = field(default_factory=Padding)


def pack_trajectories(
    samples: Sequence[TrainSample], options: PackOptions, *, replay: bool, uncaptured: Uncaptured = "reject"
) -> list[Microbatch]:
    """`pack_for_ranks` for one rank."""
    return pack_for_ranks(samples, 1, options, replay=replay, uncaptured=uncaptured)[0]


def pack_text(samples: Sequence[TextSample], options: PackOptions) -> list[Microbatch]:
    """Microbatches of supervised sequences for one rank."""
    return pack_text_for_ranks(samples, 1, options)[0]


def pack_for_ranks(
    samples: Sequence[TrainSample],
    num_ranks: int,
    options: PackOptions,
    *,
    replay: bool,
    uncaptured: Uncaptured = "reject",
) -> list[list[Microbatch]]:
    """One list of microbatches per data-parallel rank, all of the same length; together they hold every sample once.

    Expert-parallel ranks meet in every forward pass, so all must run equally many: where a rank needs fewer, its
    largest microbatches are halved, and where nothing is left to halve it gets microbatches of pad rows alone.

    Args:
        samples: trajectories of one model with their advantages; `sample_index` counts in them.
        replay: attach expert ids and their checksums. uncaptured: with `replay`, what to do about rows without them.

    Raises:
        ReplayError: `replay`, `uncaptured` is reject, and a row has no captured routing.
        ContractError: Advantages do not fit, tokens were drawn greedily, or the samples are of different models.
        ConfigError: the budget does not hold one padded row.
    """
    spec = _common_spec(samples)
    plan = _plan([len(sample.trajectory) - 1 for sample in samples], num_ranks, options)

    def build(pack: Pack) -> Microbatch:
        rows = [trajectory_rows(samples[i], i, replay=replay, uncaptured=uncaptured) for i in pack]
        return build_microbatch(rows, options.padding, spec if replay else None)

    return [[build(pack) for pack in packs] for packs in plan]


def pack_text_for_ranks(samples: Sequence[TextSample], num_ranks: int, options: PackOptions) -> list[list[Microbatch]]:
    """`pack_for_ranks` for supervised sequences.

    Raises:
        ContractError: A sequence is too short, or its loss mask does not fit.
        ConfigError: the budget does not hold one padded row.
    """
    plan = _plan([len(sample.token_ids) - 1 for sample in samples], num_ranks, options)
    return [
        [build_microbatch([text_rows(samples[i], i) for i in pack], options.padding, None) for pack in packs]
        for packs in plan
    ]


def _plan(num_rows: Sequence[int], num_ranks: int, options: PackOptions) -> list[list[Pack]]:
    """Packs per rank, equally many on each; an empty pack stands for a microbatch of pad rows."""
    padding, budget = options.padding, options.token_budget
    if padding.unit > budget:
        raise ConfigError(
            "trainer.microbatch_tokens does not hold one padded row",
            seen=f"{budget} tokens, padded to a multiple of {padding.unit}",
            expected=f"at least {padding.unit}",
            remedy="raise trainer.microbatch_tokens",
        )
    capacity = budget - budget % padding.unit
    sizes = [padding.padded(rows) for rows in num_rows]
    plan = []
    for members in split_balanced(sizes, num_ranks):
        packs = first_fit_decreasing([sizes[i] for i in members], capacity)
        plan.append([[members[i] for i in pack] for pack in packs])
    num_packs = max(map(len, plan))
    return [split_until(packs, sizes, num_packs) for packs in plan]


def _common_spec(samples: Sequence[TrainSample]) -> ModelSpec | None:
    """The model of all samples; None where there are none."""
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
