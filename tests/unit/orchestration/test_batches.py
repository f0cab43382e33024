"""Minibatches on their way from the main rank to all."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tiny_moe
from gloo import run_ranks

from moerl.buffer.packing import PackOptions
from moerl.contract.batch import Microbatch
from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.errors import ContractError
from moerl.orchestration import batches


def spoil(batch: Microbatch) -> Microbatch:
    assert batch.expert_ids is not None
    expert_ids = batch.expert_ids.copy()
    expert_ids[0, 0, 0] = 200
    return replace(batch, expert_ids=expert_ids)


def share(rank: int, world_size: int, spoilt: int) -> str:
    """What a rank makes of a minibatch of which one rank's part was spoilt after packing."""
    pack = batches.pack_for_ranks

    def pack_and_spoil(*args: Any, **kwargs: Any) -> list[list[Microbatch]]:
        ranks = pack(*args, **kwargs)
        return [[spoil(b) for b in part] if i == spoilt else part for i, part in enumerate(ranks)]

    batches.pack_for_ranks = pack_and_spoil
    layout = RankCoordinates(ParallelDims(data=world_size), rank)
    trainer = SimpleNamespace(spec=tiny_moe.SPEC, layout=layout)
    config = SimpleNamespace(keep_routing=SimpleNamespace(uncaptured="reject"))
    exchange = batches.BatchExchange(cast(Any, trainer), PackOptions(32), cast(Any, config))
    samples = tiny_moe.make_samples(3, (8, 9, 10))
    try:
        (minibatch,) = exchange.share([samples] if rank == 0 else None)
    except ContractError as error:
        return str(error)
    return f"{int(np.sum([batch.loss_mask.sum() for batch in minibatch.batches]))} of {minibatch.num_tokens:.0f}"


@pytest.mark.parametrize("spoilt", [0, 1])
def test_a_share_that_one_rank_refuses_stops_every_rank_with_its_reason(spoilt: int) -> None:
    refused = "contract: expert_id_out_of_range in field 'expert_ids'; seen: {}; expected: in [0, 8)"
    for rank, said in enumerate(run_ranks(2, share, spoilt)):
        assert refused.format("200" if rank == spoilt else f"rank {spoilt}: 200") in said


def test_shares_that_all_accept_reach_all() -> None:
    first, second = run_ranks(2, share, -1)
    assert first.split(" of ")[1] == second.split(" of ")[1]
    assert sum(int(said.split(" of ")[0]) for said in (first, second)) == int(first.split(" of ")[1])
