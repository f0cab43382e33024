"""Packs samples into microbatches under a token budget. Torch-free; runs in the controller or on a trainer
rank.

A token counts once it is an input: a sample of S tokens has S - 1 rows. Every function here is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence

from moerl.buffer.partition import Pack, first_fit_decreasing, split_balanced, split_until
from moerl.buffer.rows import Rows, concatenate, pad_rows, text_rows, trajectory_rows
from moerl.contract.batch import Microbatch, TextSample, TrainSample
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import ModelSpec
from moerl.errors import ConfigError, ContractError


def pack_trajectories(
    samples: Sequence[TrainSample], *, token_budget: int, multiple: int, replay: bool
) -> list[Microbatch]:
    """Microbatches that hold every sample exactly once.

    Args:
        samples: Trajectories of one model with their advantages.
        token_budget: Most rows of a microbatch, padding included. A longer sample has a microbatch of its
        own. multiple: The number of rows of each microbatch is padded to a multiple of this.
        replay: Attach expert ids and their checksums.

    Raises:
        ReplayError: `replay`, and a row has no captured routing.
        ContractError: Advantages do not fit, tokens were drawn greedily, or the samples are of different
        models. ConfigError: `token_budget` is smaller than `multiple`.
    """
    ranks = pack_for_ranks(samples, 1, token_budget=token_budget, multiple=multiple, replay=replay)
    return ranks[0]


def pack_text(samples: Sequence[TextSample], *, token_budget: int, multiple: int) -> list[Microbatch]:
    """Microbatches of supervised sequences; arguments and errors as in `pack_trajectories`."""
    return pack_text_for_ranks(samples, 1, token_budget=token_budget, multiple=multiple)[0]


def pack_for_ranks(
    samples: Sequence[TrainSample], num_ranks: int, *, token_budget: int, multiple: int, replay: bool
) -> list[list[Microbatch]]:
    """One list of microbatches per data-parallel rank, all of the same length.

    Expert-parallel ranks meet in every forward pass, so all must run equally many: where a rank needs fewer,
    its largest microbatches are halved, and where nothing is left to halve it gets microbatches of pad rows
    alone. `sample_index` counts in `samples` as given. Other arguments and errors as in `pack_trajectories`.
    """
    spec = _common_spec(samples)
    sizes = [len(sample.trajectory) - 1 for sample in samples]
    plan = _plan(sizes, num_ranks, token_budget, multiple)
    pad_spec = spec if replay else None
    return [
        [_padded([trajectory_rows(samples[i], i, replay=replay) for i in pack], multiple, pad_spec) for pack in packs]
        for packs in plan
    ]


def pack_text_for_ranks(
    samples: Sequence[TextSample], num_ranks: int, *, token_budget: int, multiple: int
) -> list[list[Microbatch]]:
    """`pack_for_ranks` for supervised sequences."""
    plan = _plan([len(sample.token_ids) - 1 for sample in samples], num_ranks, token_budget, multiple)
    return [[_padded([text_rows(samples[i], i) for i in pack], multiple, None) for pack in packs] for packs in plan]


def _plan(sizes: Sequence[int], num_ranks: int, token_budget: int, multiple: int) -> list[list[Pack]]:
    """Packs per rank, equally many on each; an empty pack stands for a microbatch of pad rows."""
    if not 1 <= multiple <= token_budget:
        raise ConfigError(
            "trainer.microbatch_tokens does not hold one padded row",
            seen=f"{token_budget} tokens, padded to a multiple of {multiple}",
            expected=f"at least {multiple}",
            remedy="raise trainer.microbatch_tokens",
        )
    capacity = token_budget - token_budget % multiple
    plan = []
    for members in split_balanced(sizes, num_ranks):
        packs = first_fit_decreasing([sizes[i] for i in members], capacity)
        plan.append([[members[i] for i in pack] for pack in packs])
    num_packs = max(map(len, plan))
    return [split_until(packs, sizes, num_packs) for packs in plan]


def _padded(sequences: list[Rows], multiple: int, spec: ModelSpec | None) -> Microbatch:
    num_rows = sum(map(len, sequences))
    num_pad = -num_rows % multiple if sequences else multiple
    return concatenate([*sequences, pad_rows(num_pad, spec)] if num_pad else sequences)


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
