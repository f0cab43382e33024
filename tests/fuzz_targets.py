"""Targets of fuzzing: nine ways for bytes, files and objects of strangers to come in, each given one input at a time.

An attack makes one input from a random generator. It returns a function that hands the input over and returns the
outcome. The campaign counts errors of this function that are no `MoerlError`.
"""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from factories import FULL, GREEDY, NUCLEUS, SPEC, make_trajectory, same_trajectory, values_of
from fuzz_mutations import Rng, bomb, chance, changed, choice, damaged, doubled_key, odd, odd_values
from fuzz_tables import changed_table, sealed_again, write_table
from sglang_fake import SPEC as SGLANG_SPEC
from sglang_fake import compact, compact_fields

from moerl.batching.packing import PackOptions, pack_trajectories
from moerl.contract.batch import TrainSample
from moerl.contract.batch_wire import decode_batches, encode_batches
from moerl.contract.disk import read_parquet, write_parquet
from moerl.contract.frame import HEADER_BYTES, MAGIC, SCHEMA_VERSION, FrameKind, WireLimits, pack_frame, unpack_frame
from moerl.contract.ports import RolloutRecord, RolloutRequest
from moerl.contract.quarantine import Quarantine, read_quarantined
from moerl.contract.trajectory import FinishReason, Lineage, SamplingParams, Trajectory
from moerl.contract.wire import decode_trajectories, encode_trajectories
from moerl.errors import MoerlError
from moerl.rollout.segments import trajectory_values
from moerl.rollout.sglang.answers import VersionSpan, decode_compact, read_segment

LIMIT_BYTES = 1 << 24
"""Limit in bytes of every reader."""

LIMITS = WireLimits(max_frame_bytes=LIMIT_BYTES, max_payload_bytes=LIMIT_BYTES)
_BOMB_BYTES = LIMIT_BYTES - (1 << 16)
_BOMBS = 0.001
encode = msgspec.msgpack.encode


class Outcome(StrEnum):
    """same: accepted, and what was sent. other: accepted, and valid, where the sender meant to change it. changed:
    accepted, but damage changed it. refused: by a `MoerlError`."""

    REFUSED = "refused"
    SAME = "same"
    OTHER = "other"
    CHANGED = "changed"


Attack = Callable[[Rng], Callable[[], Outcome]]


@dataclass(frozen=True, slots=True)
class Target:
    """prepare: makes the attack; files go into the folder given."""

    name: str
    prepare: Callable[[Path], Attack]


def judged(read: Callable[[], Any], is_same: Callable[[Any], bool], *, crafted: bool) -> Outcome:
    try:
        found = read()
    except MoerlError as error:
        # Users read it, the quarantine writes it: it must have a text.
        str(error).encode("utf-8", "backslashreplace")
        return Outcome.REFUSED
    return Outcome.SAME if is_same(found) else Outcome.OTHER if crafted else Outcome.CHANGED


def sample_trajectories() -> list[Trajectory]:
    """Small ones of every way of sampling, the same each time."""
    rng = np.random.default_rng(5)
    samplings = [NUCLEUS, FULL, GREEDY, SamplingParams(min_p=0.1), SamplingParams(top_k=3)]
    return [
        make_trajectory(
            rng,
            num_prompt=int(rng.integers(1, 5)),
            num_sampled=int(rng.integers(1, 9)),
            sampling=samplings[i % len(samplings)],
            rollout_id=f"r{i}",
            rewards={"reward": 0.5, "format": float(i)},
            timings={"decode": 0.25},
            unrouted=(0,) if i % 3 == 2 else (),
        )
        for i in range(8)
    ]


def with_scores(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [
        replace(t, scores={"teacher": -np.ones(len(t), np.float32)}) if i % 2 else t for i, t in enumerate(trajectories)
    ]


def all_same(sent: Sequence[Trajectory]) -> Callable[[Sequence[Trajectory]], bool]:
    return lambda found: len(found) == len(sent) and all(map(same_trajectory, found, sent))


def sealed_document(document: bytes, rest: bytes, kind: FrameKind) -> bytes:
    payload = len(document).to_bytes(8, "little") + document + rest
    return pack_frame([payload], len(payload), kind)


def split_document(frame: bytes, kind: FrameKind) -> tuple[bytes, bytes]:
    payload = unpack_frame(frame, kind)
    end = 8 + int.from_bytes(payload[:8], "little")
    return payload[8:end], payload[end:]


# --- frames and the wire ---------------------------------------------------------------------------------------------


def frames(_: Path) -> Attack:
    """Damaged frames, and frames that a hostile sender sealed around any body."""
    payloads = [b"", b"a", b"routing " * 200, np.random.default_rng(0).bytes(3000), bytes(100_000)]
    whole = [pack_frame([payload], len(payload), FrameKind.TRAJECTORIES) for payload in payloads]

    def crafted(rng: Rng, payload: bytes) -> bytes:
        options: dict[str, Any] = {"write_checksum": chance(rng, 0.9), "write_content_size": chance(rng, 0.9)}
        size = _BOMB_BYTES * choice(rng, [1, 2, 50]) if chance(rng, _BOMBS) else len(payload)
        body = zstandard.ZstdCompressor(**options).compress(payload if size == len(payload) else bytes(size))
        body = damaged(rng, body) if chance(rng, 0.7) else body
        declared = size if chance(rng, 0.6) else choice(rng, [0, 1, LIMIT_BYTES, 2**40, 2**64 - 1])
        prefix = struct.pack("<4sHHQQ", MAGIC, SCHEMA_VERSION, FrameKind.TRAJECTORIES, declared, len(body))
        return prefix + struct.pack("<I", zlib.crc32(body, zlib.crc32(prefix))) + body

    def attack(rng: Rng) -> Callable[[], Outcome]:
        index = int(rng.integers(len(payloads)))
        is_crafted = chance(rng, 0.4)
        frame = crafted(rng, payloads[index]) if is_crafted else damaged(rng, whole[index])
        return lambda: judged(
            lambda: unpack_frame(frame, FrameKind.TRAJECTORIES, LIMITS),
            lambda found: found == payloads[index],
            crafted=is_crafted,
        )

    assert min(map(len, whole)) >= HEADER_BYTES
    return attack


def wire_damage(_: Path) -> Attack:
    """Damaged frames of trajectories."""
    sent = with_scores(sample_trajectories())
    groups = [sent[i : i + 1 + i % 3] for i in range(len(sent))]
    whole = [encode_trajectories(group) for group in groups]
    same = [all_same(group) for group in groups]

    def attack(rng: Rng) -> Callable[[], Outcome]:
        index = int(rng.integers(len(whole)))
        frame = damaged(rng, whole[index])
        return lambda: judged(lambda: decode_trajectories(frame, spec=SPEC, limits=LIMITS), same[index], crafted=False)

    return attack


def wire_documents(_: Path) -> Attack:
    """Well-sealed frames of trajectories whose document was changed: values, fields, repeated keys, bytes, bombs."""
    sent = with_scores(sample_trajectories())
    groups = [sent[i : i + 1 + i % 2] for i in range(len(sent))]
    parts = [split_document(encode_trajectories(group), FrameKind.TRAJECTORIES) for group in groups]
    messages = [msgspec.msgpack.decode(document) for document, _ in parts]

    def attack(rng: Rng) -> Callable[[], Outcome]:
        index = int(rng.integers(len(groups)))
        document, rest = crafted_document(rng, parts[index][0], messages[index], parts[index][1])
        frame = sealed_document(document, rest, FrameKind.TRAJECTORIES)
        return lambda: judged(
            lambda: decode_trajectories(frame, spec=SPEC, limits=LIMITS), all_same(groups[index]), crafted=True
        )

    return attack


def crafted_document(rng: Rng, document: bytes, message: Any, rest: bytes) -> tuple[bytes, bytes]:
    how = rng.random()
    if how < _BOMBS:
        return encode(bomb(rng, message, _BOMB_BYTES)), rest
    if how < 0.15:
        return document, damaged(rng, rest) if rest else b"\0"
    if how < 0.3:
        return damaged(rng, document), rest
    if how < 0.4:
        return doubled_key(rng, message), rest
    for _ in range(int(rng.integers(1, 4))):
        message = changed(rng, message)
    return encode(message), rest


def batches(_: Path) -> Attack:
    """Frames of microbatches: damaged ones, and sealed ones with a changed document."""
    trainable = [t for t in sample_trajectories() if t.turns[-1].sampling != GREEDY]
    trainable += [
        replace(t, lineage=replace(t.lineage, rollout_id=f"twin of {t.lineage.rollout_id}")) for t in trainable
    ]
    samples = [TrainSample(t, t.sampled.astype(np.float32)) for t in trainable]
    options = PackOptions(40, share_prompts=True)
    packed = pack_trajectories(samples, options, replay=True, uncaptured="live")
    assert any(batch.prefix_of is not None for batch in packed)
    frame = encode_batches(packed, {"tokens": 3.0})
    document, rest = split_document(frame, FrameKind.BATCHES)
    message = msgspec.msgpack.decode(document)

    def same(found: Any) -> bool:
        return encode_batches(found[0], found[1]) == frame

    def attack(rng: Rng) -> Callable[[], Outcome]:
        is_crafted = chance(rng, 0.6)
        broken = damaged(rng, frame)
        if is_crafted:
            broken = sealed_document(*crafted_document(rng, document, message, rest), FrameKind.BATCHES)
        return lambda: judged(lambda: decode_batches(broken, spec=SPEC, limits=LIMITS), same, crafted=is_crafted)

    return attack


# --- dumps -----------------------------------------------------------------------------------------------------------


def dump_damage(folder: Path) -> Attack:
    """Damaged Parquet files."""
    sent = with_scores(sample_trajectories())
    path = folder / "dump.parquet"
    groups = [sent[:1], sent[:3], sent]
    whole = []
    for group in groups:
        write_parquet(path, group, texts=["a"] * len(group), prompts=["b"] * len(group))
        whole.append(path.read_bytes())

    def attack(rng: Rng) -> Callable[[], Outcome]:
        index = int(rng.integers(len(whole)))
        path.write_bytes(damaged(rng, whole[index]))
        return lambda: judged(lambda: read_parquet(path, max_bytes=LIMIT_BYTES), all_same(groups[index]), crafted=False)

    return attack


def crafted_dumps(folder: Path) -> Attack:
    """Sealed Parquet files of other tables, by other writers, or damaged before they were sealed."""
    sent = with_scores(sample_trajectories())[:2]
    path = folder / "dump.parquet"
    write_parquet(path, sent, texts=["a", "b"], prompts=["c", "d"])
    whole, table = path.read_bytes(), pq.read_table(path)

    def attack(rng: Rng) -> Callable[[], Outcome]:
        if chance(rng, 0.4):
            path.write_bytes(sealed_again(damaged(rng, whole)))
        else:
            try:
                write_table(rng, path, changed_table(rng, table, _BOMBS))
            except (pa.ArrowException, OSError, ValueError, OverflowError):
                # Parquet does not hold such a table; the attacker takes the next.
                path.write_bytes(sealed_again(damaged(rng, whole)))
        return lambda: judged(lambda: read_parquet(path, max_bytes=LIMIT_BYTES), all_same(sent), crafted=True)

    return attack


# --- objects ---------------------------------------------------------------------------------------------------------


def constructor(_: Path) -> Attack:
    """Trajectories of changed and replaced field values."""
    sent = with_scores(sample_trajectories())

    def attack(rng: Rng) -> Callable[[], Outcome]:
        index = int(rng.integers(len(sent)))
        values = odd_values(rng, values_of(sent[index]))
        if "surprise" in values or not set(values) <= set(Trajectory.__slots__):
            # Python itself refuses other names; the quarantine names them before.
            values = {name: value for name, value in values.items() if name in Trajectory.__slots__}
        for name in values_of(sent[index]).keys() - values.keys():
            values[name] = odd(rng)
        return lambda: judged(
            lambda: usable(Trajectory(**values)), lambda t: same_trajectory(t, sent[index]), crafted=True
        )

    return attack


def usable(trajectory: Trajectory) -> Trajectory:
    """Checks that an accepted trajectory can be encoded and decoded again; returns it."""
    (back,) = decode_trajectories(encode_trajectories([trajectory]), spec=trajectory.spec)
    assert len(trajectory.temperatures) == len(back)
    return trajectory


def quarantine(folder: Path) -> Attack:
    """Records of any content, ids of any kind: admitted, or kept readable and counted."""
    sent = sample_trajectories()
    made = [0]

    def attack(rng: Rng) -> Callable[[], Outcome]:
        made[0] += 1
        home = folder / f"q{made[0]}"
        gate = Quarantine(home, 1.0, spec=SPEC)
        gate.expect(["r0"])
        good = values_of(sent[0])
        values: Any = odd(rng) if chance(rng, 0.05) else odd_values(rng, good)
        ids: list[Any] = [odd(rng) if chance(rng, 0.1) else right for right in ("r0", "engine", 3)]
        return lambda: admitted(home, gate, RolloutRecord(ids[0], ids[1], ids[2], values))

    def admitted(home: Path, gate: Quarantine, record: RolloutRecord) -> Outcome:
        values: Any = record.values
        try:
            found = gate.admit(record, trainer_version=5)
            assert gate.num_seen == 1
            assert (found is None) == (gate.num_refused == 1)
            if found is not None:
                return Outcome.SAME if same_trajectory(found, sent[0]) else Outcome.OTHER
            (entry,) = home.iterdir()
            why, content = read_quarantined(entry)
            assert why["reason"] in gate.counts
            if type(values) is dict:
                assert len(content) == len(values)
        finally:
            shutil.rmtree(home, ignore_errors=True)
        return Outcome.REFUSED

    return attack


def compact_answers(_: Path) -> Attack:
    """Compact answers of an SGLang server: damaged ones, and whole ones with changed fields."""
    spans = [VersionSpan("3", 0, 4)]
    samplings = [SamplingParams(top_p=0.9, top_k=4), SamplingParams(), SamplingParams(temperature=0.0)]
    requests = [RolloutRequest(Lineage("r0", "p0", "g0"), (7, 8, 9), each, 4) for each in samplings]
    fields = [compact_fields(3, 4, cuts=each.cuts) for each in samplings]
    whole = [compact(each) for each in fields]

    def read(field: bytes, request: RolloutRequest) -> dict[str, Any]:
        segment = read_segment(request, decode_compact(field, LIMIT_BYTES), spans, 0, SGLANG_SPEC)
        return trajectory_values(request, [segment], FinishReason.LENGTH, SGLANG_SPEC)

    sent = [encode_values(read(field, request)) for field, request in zip(whole, requests, strict=True)]

    def attack(rng: Rng) -> Callable[[], Outcome]:
        index = int(rng.integers(len(whole)))
        is_crafted = chance(rng, 0.6)
        field = damaged(rng, whole[index])
        if is_crafted and chance(rng, _BOMBS):
            field = compact(bomb(rng, fields[index], _BOMB_BYTES))
        elif is_crafted:
            document = crafted_document(rng, encode(fields[index]), fields[index], b"\0")[0]
            field = zstandard.ZstdCompressor(write_checksum=True).compress(document)
        return lambda: judged(
            lambda: read(field, requests[index]),
            lambda values: encode_values(values) == sent[index],
            crafted=is_crafted,
        )

    return attack


def encode_values(values: dict[str, Any]) -> bytes:
    """A comparison of field values, arrays by their bytes."""
    arrays = {
        name: (value.dtype.str, value.shape, value.tobytes())
        for name, value in values.items()
        if hasattr(value, "dtype")
    }
    kept = values["kept"]
    return encode([arrays, kept.offsets.tobytes(), kept.ids.tobytes()])


TARGETS = (
    Target("frames", frames),
    Target("wire: damage", wire_damage),
    Target("wire: documents", wire_documents),
    Target("batches", batches),
    Target("dumps: damage", dump_damage),
    Target("dumps: crafted", crafted_dumps),
    Target("trajectories", constructor),
    Target("quarantine", quarantine),
    Target("compact answers", compact_answers),
)
