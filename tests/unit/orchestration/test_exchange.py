"""What ranks tell one another outside of Megatron."""

from __future__ import annotations

import numpy as np
import pytest
from gloo import run_ranks

from moerl.contract.parallel import ParallelDims, RankCoordinates
from moerl.errors import EngineError, MoerlError
from moerl.orchestration.exchange import broadcast_bytes, gather_layouts, gather_rows, scatter_bytes


def broadcast(rank: int, world_size: int) -> bytes:
    return broadcast_bytes(b"\x00frame\xff" if rank == 0 else None)


def fail_on_the_main_rank(rank: int, world_size: int) -> str:
    try:
        try:
            if rank == 0:
                raise EngineError("the engine is gone")
        finally:
            broadcast_bytes(None)
    except MoerlError as error:
        return type(error).__name__
    return "nothing"


def scatter(rank: int, world_size: int, payloads: list[bytes]) -> list[bytes]:
    """Twice in a row: nothing of the first may be left for the second."""
    return [scatter_bytes(payloads if rank == 0 else None), scatter_bytes(payloads[::-1] if rank == 0 else None)]


def fail_to_scatter(rank: int, world_size: int, payloads: list[bytes] | None) -> str:
    try:
        scatter_bytes(payloads)
    except MoerlError as error:
        return str(error)
    return "nothing"


def layouts(rank: int, world_size: int) -> list[RankCoordinates]:
    moe_layers = None if rank == 1 else tuple(range(rank * 5))
    return gather_layouts(RankCoordinates(ParallelDims(context=3), rank, moe_layers))


def gather(rank: int, world_size: int) -> list[list[float]]:
    rows = np.full((rank * 2, 3), rank, np.float32)
    return gather_rows(rows).tolist()


def test_every_rank_gets_the_bytes_of_the_main_rank():
    assert run_ranks(2, broadcast) == [b"\x00frame\xff"] * 2


def test_the_main_rank_keeps_its_own_error_and_the_others_stop():
    assert run_ranks(2, fail_on_the_main_rank) == ["EngineError", "MoerlError"]


def test_tables_of_different_lengths_are_gathered_in_rank_order():
    assert run_ranks(3, gather) == [[[1.0] * 3] * 2 + [[2.0] * 3] * 4] * 3


def test_every_rank_gets_its_own_bytes():
    payloads = [b"main", b"\x00" * 100_000, b"", b"\xffz"]
    assert run_ranks(4, scatter, payloads) == [list(pair) for pair in zip(payloads, payloads[::-1], strict=True)]


def test_a_main_rank_without_payloads_stops_the_others():
    seen = run_ranks(2, fail_to_scatter, None)
    assert seen[0] == "nothing"
    assert "the main rank failed" in seen[1]


def test_payloads_for_other_numbers_of_ranks_stop_all():
    seen = run_ranks(2, fail_to_scatter, [b"one"])
    assert "not one payload per rank; seen: 1; expected: 2" in seen[0]
    assert "the main rank failed" in seen[1]


def test_every_rank_knows_the_coordinates_of_every_rank():
    dims = ParallelDims(context=3)
    expected = [RankCoordinates(dims, 0, ()), RankCoordinates(dims, 1), RankCoordinates(dims, 2, tuple(range(10)))]
    assert run_ranks(3, layouts) == [expected] * 3


@pytest.mark.parametrize("payload", [b"", b"x"])
def test_one_process_talks_to_itself(payload: bytes):
    assert run_ranks(1, _alone, payload) == [[payload, payload]]


def _alone(rank: int, world_size: int, payload: bytes) -> list[bytes]:
    assert gather_layouts(RankCoordinates()) == [RankCoordinates()]
    return [broadcast_bytes(payload), scatter_bytes([payload])]
