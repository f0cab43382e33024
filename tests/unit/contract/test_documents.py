"""Documents on the wire are looked through before anything is built of them: few values, short texts, each key once."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from factories import FULL, SPEC, make_trajectory

from moerl.batching.packing import PackOptions, pack_text_for_ranks
from moerl.contract.batch import TextSample
from moerl.contract.batch_wire import decode_batches, encode_batches
from moerl.contract.documents import MAX_DEPTH, check_document
from moerl.contract.frame import FrameKind, WireLimits, pack_frame, unpack_frame
from moerl.contract.reasons import Reason
from moerl.contract.requirements import MAX_NAMES, MAX_TEXT_BYTES
from moerl.contract.trajectory import Lineage, ModelSpec
from moerl.contract.wire import decode_records, decode_trajectories, encode_trajectories
from moerl.errors import ContractError

RNG = np.random.default_rng(3)
GOOD = make_trajectory(RNG, scores={"teacher": RNG.normal(size=8).astype(np.float32)})
LIMITS = WireLimits(max_payload_bytes=1 << 22)
encode = msgspec.msgpack.encode


def document_of(frame: bytes, kind: FrameKind) -> tuple[bytes, bytes]:
    """The document of a frame, and what is behind it."""
    payload = unpack_frame(frame, kind)
    end = 8 + int.from_bytes(payload[:8], "little")
    return payload[8:end], payload[end:]


def sealed(document: bytes, rest: bytes = b"", kind: FrameKind = FrameKind.TRAJECTORIES) -> bytes:
    payload = len(document).to_bytes(8, "little") + document + rest
    return pack_frame([payload], len(payload), kind)


DOCUMENT, EXPERT_IDS = document_of(encode_trajectories([GOOD]), FrameKind.TRAJECTORIES)


def edited(edit: Callable[[dict[str, Any]], object]) -> bytes:
    message = msgspec.msgpack.decode(DOCUMENT)
    edit(message["trajectories"][0])
    return sealed(encode(message), EXPERT_IDS)


def refusal_of(decode: Callable[[], object]) -> tuple[ContractError, int]:
    """The refusal, and the most bytes in use while it came about."""
    tracemalloc.start()
    try:
        with pytest.raises(ContractError) as caught:
            decode()
        return caught.value, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


TURN = {"start": 0, "end": 1, "kind": "prompt", "sampling": None}
SAMPLING = {"temperature": 0.5, "top_p": 0.5, "top_k": 4000, "min_p": 0.5, "seed": 2**40}
SAMPLED = TURN | {"kind": "sampled", "sampling": SAMPLING}
FILL = (1 << 22) - 2000
BOMBS: dict[str, Callable[[dict[str, Any]], object]] = {
    "turns": lambda t: t.update(turns=[TURN] * (FILL // len(encode(TURN)))),
    "sampled turns": lambda t: t.update(turns=[SAMPLED] * (FILL // len(encode(SAMPLED)))),
    "rewards": lambda t: t.update(rewards={f"{i:x}": 1 for i in range(FILL // 8)}),
    "scores": lambda t: t.update(scores={f"{i:x}": b"" for i in range(FILL // 8)}),
    "one long score name": lambda t: t.update(scores={"\x01" * FILL: b""}),
    "long score names": lambda t: t.update(scores={chr(33 + i) * (FILL // 64): b"" for i in range(64)}),
    "a long rollout id": lambda t: t["lineage"].update(rollout_id="\x01" * FILL),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_frame_of_very_many_values_is_refused_before_they_are_built(name: str):
    frame = edited(BOMBS[name])
    assert name == "rewards" or name == "scores" or len(frame) < 1 << 16
    error, peak = refusal_of(lambda: decode_trajectories(frame, spec=SPEC, limits=LIMITS))
    assert error.reason in {Reason.FRAME_TOO_LARGE, Reason.TEXT_TOO_LONG}
    assert peak < 2 * LIMITS.max_payload_bytes


def test_a_frame_of_very_many_trajectories_is_refused_before_they_are_built():
    message = msgspec.msgpack.decode(DOCUMENT)
    frame = sealed(encode(message | {"trajectories": message["trajectories"] * (FILL // len(DOCUMENT))}))
    error, peak = refusal_of(lambda: decode_records(frame, spec=SPEC, limits=LIMITS))
    assert error.reason == Reason.FRAME_TOO_LARGE
    assert peak < 2 * LIMITS.max_payload_bytes


def test_batches_and_facts_are_counted_too():
    batches = pack_text_for_ranks([TextSample(np.arange(9, dtype=np.int32), np.arange(9) > 3)], 1, PackOptions(64))[0]
    document, _ = document_of(encode_batches(batches, {"tokens": 1.0}), FrameKind.BATCHES)
    message = msgspec.msgpack.decode(document)
    for bomb in (
        message | {"batches": message["batches"] * (FILL // len(document))},
        message | {"facts": {f"{i:x}": 1 for i in range(FILL // 8)}},
    ):
        frame = sealed(encode(bomb), kind=FrameKind.BATCHES)
        error, peak = refusal_of(lambda frame=frame: decode_batches(frame, spec=SPEC, limits=LIMITS))
        assert error.reason == Reason.FRAME_TOO_LARGE
        assert peak < 2 * LIMITS.max_payload_bytes


def test_more_turns_than_tokens_are_refused():
    error, _ = refusal_of(lambda: decode_trajectories(edited(lambda t: t.update(turns=[TURN] * 9)), spec=SPEC))
    assert (error.reason, error.field, error.seen) == (Reason.TURNS_DO_NOT_COVER, "turns", "9 turns")


def test_more_runs_of_versions_than_tokens_are_refused():
    runs = {"version_values": bytes(4 * 9), "version_lengths": (8).to_bytes(4, "little") + bytes(4 * 8)}
    error, _ = refusal_of(lambda: decode_trajectories(edited(lambda t: t.update(runs)), spec=SPEC))
    assert error.reason == Reason.ARRAY_LENGTH_WRONG


LARGE: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "tokens": (ModelSpec(1, 1, 2, 100), {"num_sampled": 250_000, "sampling": FULL}),
    "a version for each token": (
        ModelSpec(1, 1, 2, 100),
        {"num_sampled": 250_000, "sampling": FULL, "version": np.arange(250_003)},
    ),
    "kept ids": (ModelSpec(1, 1, 2, 5000), {"num_sampled": 40_000}),
    "expert ids": (ModelSpec(16, 8, 16, 100), {"num_sampled": 30_000, "sampling": FULL}),
    "experts that repeat": (ModelSpec(16, 8, 16, 100), {"num_sampled": 30_000, "sampling": FULL}),
}


@pytest.mark.parametrize("name", LARGE)
def test_decoding_never_takes_more_than_four_times_the_limit(name: str):
    spec, changes = LARGE[name]
    frame = encode_trajectories([make_trajectory(np.random.default_rng(0), spec, **changes)])
    document, expert_ids = document_of(frame, FrameKind.TRAJECTORIES)
    if name == "experts that repeat":
        expert_ids = expert_ids[:-1] + expert_ids[-2:-1]
    limits = WireLimits(max_payload_bytes=len(document) + len(expert_ids) + 8)
    reasons = []
    tracemalloc.start()
    try:
        decode_trajectories(sealed(document, expert_ids), spec=spec, limits=limits)
    except ContractError as error:
        reasons.append(error.reason)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert reasons == ([Reason.REPEATED_EXPERT] if name == "experts that repeat" else [])
    assert peak < 4 * limits.max_payload_bytes


@pytest.mark.parametrize("where", ["document", "lineage", "rewards", "scores"])
def test_a_key_that_stands_twice_is_refused(where: str):
    key, value = {
        "document": (b"\xa8attempt", b"\x00"),
        "lineage": (b"\xa7fork_at", b"\xff"),
        "rewards": (b"\xa6reward", b"\xcb" + bytes(8)),
        "scores": (b"\xa7teacher", b"\xc4\x20" + bytes(32)),
    }[where]
    if where == "document":
        key = b"\xa7attempt"
    broken = with_pair_twice(DOCUMENT, key, value)
    error, _ = refusal_of(lambda: decode_trajectories(sealed(broken, EXPERT_IDS), spec=SPEC))
    assert (error.reason, error.seen) == (Reason.DUPLICATE_FIELD, repr(key[1:].decode()))


def with_pair_twice(document: bytes, key: bytes, value: bytes) -> bytes:
    """A document whose map with `key` has the pair once more, in front; the map's own head counts it."""
    heads = {
        b"\xa7attempt": b"\xde\x00\x13\xa7lineage",
        b"\xa7fork_at": b"\x87\xaarollout_id",
        b"\xa6reward": b"\x81\xa6reward",
        b"\xa7teacher": b"\x81\xa7teacher",
    }
    head = heads[key]
    assert document.count(head) == 1
    if head[0] == 0xDE:
        more = b"\xde" + (int.from_bytes(head[1:3], "big") + 1).to_bytes(2, "big") + key + value + head[3:]
    else:
        more = bytes([head[0] + 1]) + key + value + head[1:]
    return document.replace(head, more)


@pytest.mark.parametrize(
    "key", [b"\xa1a", b"\xd9\x01a", b"\xda\x00\x01a", b"\xdb\x00\x00\x00\x01a"], ids=["fix", "8", "16", "32"]
)
def test_a_key_is_the_same_however_its_length_is_written(key: bytes):
    with pytest.raises(ContractError, match=Reason.DUPLICATE_FIELD):
        check_document(memoryview(b"\x82\xa1a\x01" + key + b"\x02"), 10)


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x81\xa1a", id="a value missing"),
        pytest.param(b"\x92\x01", id="an element missing"),
        pytest.param(b"\xa5abc", id="a text cut off"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="bytes cut off"),
        pytest.param(b"\xc6\xff", id="a length cut off"),
        pytest.param(b"\xcb\x00", id="a number cut off"),
        pytest.param(b"\x01\x02", id="something behind"),
        pytest.param(b"\x81\x01\x02", id="a key that is no text"),
        pytest.param(b"\xc1", id="the reserved byte"),
        pytest.param(b"\xd4\x01\x02", id="an extension"),
        pytest.param(nested(MAX_DEPTH + 1), id="too deep"),
    ],
)
def test_what_is_no_document_is_refused(document: bytes):
    with pytest.raises(ContractError, match=Reason.MESSAGE_MALFORMED):
        check_document(memoryview(document), 100)


def test_every_kind_of_value_is_looked_through():
    values = [None, True, 0, 127, 128, 2**16, 2**32, -1, -128, -(2**15), -(2**31), -(2**63), 2**64 - 1, 0.5]
    values += [
        "",
        "a" * 31,
        "a" * 300,
        b"",
        b"a" * 300,
        b"a" * 70_000,
        [1] * 20,
        {"a": [0], "b": {str(i): i for i in range(20)}},
    ]
    document = memoryview(encode(values))
    check_document(document, 100)
    check_document(memoryview(b"\xca" + bytes(4)), 1)
    check_document(memoryview(nested(MAX_DEPTH)), 100)
    num_values = 1 + len(values) + 20 + (4 + 1 + 40)
    check_document(document, num_values)
    with pytest.raises(ContractError, match=Reason.FRAME_TOO_LARGE):
        check_document(document, num_values - 1)


def test_limits_leave_room_for_what_is_sent():
    many = encode_trajectories([make_trajectory(RNG, rollout_id=f"r{i}") for i in range(300)])
    assert len(decode_records(many, spec=SPEC, limits=LIMITS)) == 300
    longest = Lineage("r" * MAX_TEXT_BYTES, "p", "g")
    names = {f"name {i}": 1.0 for i in range(MAX_NAMES)}
    largest = make_trajectory(RNG, lineage=longest, rewards=names, timings=names)
    assert len(decode_trajectories(encode_trajectories([largest]), spec=SPEC)) == 1
