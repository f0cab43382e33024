"""Buckets that receivers pass on to one another, over real gloo groups of processes that are killed or hang."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from receivers import PlainReceiver, load_relay
from torch import Tensor

from moerl.rollout.sglang.broadcast import Broadcast, NoAnswer, to_blame
from moerl.rollout.sglang.sender_group import GroupOptions, flat_view, flattened

NUM_VALUES = 2 << 20
"""Values of a bucket: float32, 8 pieces."""


def bucket(value: float) -> list[tuple[str, Tensor]]:
    return [("a", torch.arange(float(NUM_VALUES // 2)) + value), ("b", torch.full((NUM_VALUES // 2,), value))]


def digest(value: float) -> str:
    return hashlib.sha256(flattened(bucket(value)).numpy()).hexdigest()


class Sender:
    """A `Broadcast`, from outside of an event loop."""

    def __init__(self, options: GroupOptions) -> None:
        self.broadcast = Broadcast(options)

    def send(self, bucket: list[tuple[str, Tensor]], receivers: list[PlainReceiver], number: int):
        return asyncio.run(self.broadcast.send(bucket, {r.key: r for r in receivers}, number))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="module", autouse=True)
def _default_group() -> Iterator[None]:
    """Torch makes no group without one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def pool() -> Iterator[list[PlainReceiver]]:
    """Receivers that outlive a test, where they do not fail in it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    made: list[PlainReceiver] = []
    yield made
    for receiver in made:
        receiver.close()


@pytest.fixture
def three(pool: list[PlainReceiver]) -> list[PlainReceiver]:
    """A, B and C."""
    while len(pool) < 3:
        pool.append(PlainReceiver(""))
    for receiver, name in zip(pool, "ABC", strict=True):
        receiver.name, receiver.loaded, receiver.num_joined = name, [], 0
    return list(pool)


@pytest.fixture
def spoilt(pool: list[PlainReceiver]) -> Iterator[Callable[[PlainReceiver], None]]:
    """Ends a receiver after the test."""
    receivers: list[PlainReceiver] = []
    yield receivers.append
    for receiver in receivers:
        receiver.close()
        pool.remove(receiver)


@pytest.fixture
def sender() -> Iterator[Sender]:
    """Three seconds for a piece, and more where the machine has more to do than these tests."""
    seconds = 12.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2)
    made = Sender(GroupOptions("127.0.0.1", "gloo", torch.device("cpu"), seconds))
    yield made
    made.broadcast.leave()


def test_every_receiver_gets_every_bucket_in_one_group(sender: Sender, three: list[PlainReceiver]):
    for number in range(3):
        assert sender.send(bucket(number), three, number) == {}
    for receiver in three:
        assert receiver.loaded == [digest(0), digest(1), digest(2)]
        assert receiver.num_joined == 1


def test_the_ranks_of_a_receiver_pass_buckets_on_to_one_another(sender: Sender, three: list[PlainReceiver]):
    wide = PlainReceiver("wide", num_ranks=2)
    assert sender.send(bucket(1), [three[0], wide, three[1]], 0) == {}
    assert wide.loaded == three[1].loaded == [digest(1)]
    wide.close()


def test_each_rank_receives_once_and_a_server_sends_once_to_the_next_one():
    route_of = load_relay().route_of
    routes = {rank: tuple(route_of(rank, [1, 2, 5], 7)) for rank in range(1, 7)}
    assert routes == {1: (0, (2,)), 2: (1, (5, 3)), 3: (2, (4,)), 4: (3, ()), 5: (2, (6,)), 6: (5, ())}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("at", "how"),
    [
        ("begin", "error"),
        ("piece", "SIGKILL"),
        pytest.param("piece", "SIGSTOP", marks=SLOW),
        ("end", "error"),
        *(pytest.param("join", how, marks=SLOW) for how in ("SIGKILL", "SIGSTOP", "error")),
        *(pytest.param("store", how, marks=SLOW) for how in ("SIGKILL", "SIGSTOP", "error")),
        *(pytest.param("end", how, marks=SLOW) for how in ("SIGKILL", "SIGSTOP")),
        *(pytest.param("begin", how, marks=SLOW) for how in ("SIGKILL", "SIGSTOP")),
    ],
)
def test_a_receiver_that_fails_is_named_and_the_others_get_the_bucket(
    at: str, how: str, sender: Sender, three: list[PlainReceiver], spoilt: Callable[[PlainReceiver], None]
):
    if at in ("begin", "piece", "end"):
        assert sender.send(bucket(0), three, 0) == {}
    three[1].fail(at, how)
    spoilt(three[1])
    failed = sender.send(bucket(1), three, 1)
    assert list(failed) == [three[1].key]
    assert "'B'" in str(failed[three[1].key])
    for receiver in (three[0], three[2]):
        assert receiver.loaded[-1] == digest(1)
        assert receiver.num_joined <= 2  # the others were told apart from it the first time
    assert sender.send(bucket(2), [three[0], three[2]], 2) == {}
    assert three[0].loaded[-1] == three[2].loaded[-1] == digest(2)


@pytest.mark.slow
@pytest.mark.parametrize("position", [0, 2])
def test_it_does_not_matter_where_in_the_chain_a_receiver_hangs(
    position: int, sender: Sender, three: list[PlainReceiver], spoilt: Callable[[PlainReceiver], None]
):
    three[position].fail("piece", "SIGSTOP")
    spoilt(three[position])
    assert list(sender.send(bucket(1), three, 0)) == [three[position].key]
    assert all(r.loaded[-1] == digest(1) for i, r in enumerate(three) if i != position)


@pytest.mark.slow
def test_two_receivers_that_hang_at_once_cost_one_group(
    sender: Sender, three: list[PlainReceiver], spoilt: Callable[[PlainReceiver], None]
):
    # At a later point the second may wait for the first, and not hang itself.
    for receiver in three[:2]:
        receiver.fail("begin", "SIGSTOP")
        spoilt(receiver)
    assert sender.send(bucket(1), three, 0).keys() == {three[0].key, three[1].key}
    assert three[2].loaded == [digest(1)]
    assert three[2].num_joined == 2


def test_a_receiver_that_comes_late_is_served_alone_and_then_with_the_others(
    sender: Sender, three: list[PlainReceiver]
):
    *early, late = three
    assert sender.send(bucket(0), early, 0) == {}
    assert sender.send(bucket(0), [late], 0) == {}
    assert sender.send(bucket(1), three, 0) == {}
    assert {tuple(receiver.loaded) for receiver in three} == {(digest(0), digest(1))}


def test_where_all_fail_nothing_is_left_to_send_to(
    sender: Sender, three: list[PlainReceiver], spoilt: Callable[[PlainReceiver], None]
):
    for receiver in three:
        receiver.fail("join", "SIGKILL")
        spoilt(receiver)
    assert sender.send(bucket(1), three, 0).keys() == {receiver.key for receiver in three}


# --- who is to blame -------------------------------------------------------------------------------------------------

LATE = "weight relay: rank {} is late: no piece"
GONE = "weight relay: rank {} is gone: connection closed"


@pytest.mark.parametrize(
    ("outcomes", "out", "is_sent"),
    [
        ([None, None, None, None], [], True),
        ([None, None, "the model does not know the tensor", None], [1], True),
        ([None, None, NoAnswer(), None], [1], True),  # it has passed all on, and hangs where it loads
        ([None, LATE.format(2), NoAnswer(), LATE.format(2)], [1], False),
        ([LATE.format(1), NoAnswer(), LATE.format(1), GONE.format(2)], [0], False),
        ([None, GONE.format(2), "connection refused", GONE.format(2)], [1], False),
        # All live; a link is broken.
        ([None, None, LATE.format(1), GONE.format(2)], [1], False),
        ([None, GONE.format(2), GONE.format(3), LATE.format(2)], [1], False),
        ([None, None, None, LATE.format(2)], [2], False),
        ([LATE.format(1), LATE.format(0), GONE.format(1), GONE.format(2)], [0], False),
    ],
)
def test_who_is_left_out(outcomes: list[str | Exception | None], out: list[int], is_sent: bool):
    raised = [RuntimeError(outcome) if isinstance(outcome, str) else outcome for outcome in outcomes]
    assert to_blame(raised, lambda rank: rank - 1) == (out, is_sent)


def test_a_bucket_that_lies_in_one_piece_is_not_copied():
    whole = torch.arange(12.0)
    flat = flat_view([("a", whole[:4].view(2, 2)), ("b", whole[4:])])
    assert flat is not None
    assert flat.data_ptr() == whole.data_ptr()
    assert len(flat) == whole.nbytes
    parts = [("a", whole[4:]), ("b", whole[:4])]
    assert flat_view(parts) is None
    assert torch.equal(flattened(parts).view(torch.float32), whole[[*range(4, 12), *range(4)]])
