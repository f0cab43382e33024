"""What ranks tell one another outside of Megatron."""

from __future__ import annotations

import numpy as np
import pytest
from gloo import run_ranks

from moerl.errors import EngineError, MoerlError
from moerl.orchestration.exchange import broadcast_bytes, gather_rows


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


def gather(rank: int, world_size: int) -> list[list[float]]:
    rows = np.full((rank * 2, 3), rank, np.float32)
    return gather_rows(rows).tolist()


def test_every_rank_gets_the_bytes_of_the_main_rank():
    assert run_ranks(2, broadcast) == [b"\x00frame\xff"] * 2


def test_the_main_rank_keeps_its_own_error_and_the_others_stop():
    assert run_ranks(2, fail_on_the_main_rank) == ["EngineError", "MoerlError"]


def test_tables_of_different_lengths_are_gathered_in_rank_order():
    assert run_ranks(3, gather) == [[[1.0] * 3] * 2 + [[2.0] * 3] * 4] * 3


@pytest.mark.parametrize("payload", [b"", b"x"])
def test_one_process_talks_to_itself(payload: bytes):
    assert run_ranks(1, _alone, payload) == [payload]


def _alone(rank: int, world_size: int, payload: bytes) -> bytes:
    return broadcast_bytes(payload)
