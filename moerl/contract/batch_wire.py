"""Frames of microbatches: what the controller sends to each rank, its own share.

Framing, limits and checksums are those of `moerl.contract.frame`, array layouts `moerl.contract.array_codec`. A
payload is

    document bytes u64 | document (msgpack) | expert ids of each microbatch in order, [l, r, K]

with t rows, l MoE layers and r routing rows of the share. No pickle. Decoding is strict: every length follows from the
few numbers of the document and is compared before memory is spent; what cannot be a share of a packed batch is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moerl.contract.array_checks import rows_are_distinct
from moerl.contract.array_codec import (
    array_bytes,
    pack_flags,
    pack_kept_ids,
    read_array,
    read_expert_planes,
    read_flags,
    read_kept_ids,
    require_length,
)
from moerl.contract.batch import FLAG_ROWS, FLOAT_ROWS, INT_ROWS, Microbatch
from moerl.contract.frame import DEFAULT_LIMITS, FrameKind, WireLimits, unpack_frame
from moerl.contract.parallel import RankCoordinates
from moerl.contract.reasons import Reason
from moerl.contract.requirements import MAX_NAMES, require, require_text
from moerl.contract.shares import cut_share, own_routing_bytes, routing_bytes
from moerl.contract.trajectory import KeptSets, ModelSpec
from moerl.contract.wire import WireStruct, open_sealed, seal

_require = partial(require, remedy="run the same moerl version on all ranks; otherwise report it as a bug")


class RoutingMessage(WireStruct):
    """Recorded routing of a share; the expert ids follow the document."""

    num_rows: int
    """Routing rows of the share (r)."""
    num_layers: int
    """MoE layers of the share (l)."""
    checksums: memoryview
    """uint64 [l]."""


class BatchMessage(WireStruct):
    """Mirrors `Microbatch`; arrays are raw little-endian bytes."""

    num_rows: int
    """Rows of the share (t)."""
    ints: dict[str, memoryview]
    """int32 [t] by name."""
    floats: dict[str, memoryview]
    """float32 [t] by name."""
    flags: dict[str, memoryview]
    """Bits [t] by name."""
    scores: dict[str, memoryview]
    """float32 [t] by name; side scores."""
    sample_index: memoryview
    """int32 [t]."""
    kept_sizes: memoryview
    """uint16 [t]."""
    kept_ids: memoryview
    """Byte planes of differences."""
    cu_seqlens: memoryview
    """int32 [N + 1]."""
    rollout_keys: memoryview
    """uint64 [N]."""
    prefix_of: memoryview | None
    """int32 [N]; None if no rows are shared."""
    prefix_rows: memoryview | None
    """int32 [N]; None if no rows are shared."""
    checksums: memoryview
    """uint64 [2], of contexts and of kept sets."""
    routing: RoutingMessage | None
    """None without replay."""


class BatchesMessage(WireStruct):
    """The payload of a frame of microbatches."""

    facts: dict[str, float]
    """Finite numbers by name, the same for all ranks."""
    batches: list[BatchMessage]
    """Shares of one rank, in the order of the passes."""


_decoder = msgspec.msgpack.Decoder(BatchesMessage)


def encode_batches(batches: Sequence[Microbatch], facts: Mapping[str, float]) -> bytes:
    """Returns one frame of the microbatches, or shares of microbatches, in order.

    Args:
        facts: finite numbers by name that every rank needs besides its share, such as the tokens trained by all.
    """
    message = BatchesMessage(
        facts={name: float(value) for name, value in facts.items()}, batches=[_message(batch) for batch in batches]
    )
    expert_ids = [batch.expert_ids for batch in batches if batch.expert_ids is not None]
    return seal(message, expert_ids, FrameKind.BATCHES)


def decode_batches(
    frame: bytes, *, spec: ModelSpec, limits: WireLimits = DEFAULT_LIMITS
) -> tuple[list[Microbatch], dict[str, float]]:
    """Returns the microbatches of a frame, checked against the model and themselves, and the facts sent along.

    Raises:
        ContractError: With the reason code of the first thing found wrong.
    """
    message, rest = open_sealed(unpack_frame(frame, FrameKind.BATCHES, limits), _decoder, limits)
    for name, value in message.facts.items():
        _require(math.isfinite(value), Reason.VALUE_NOT_FINITE, f"facts[{name!r}]", value, "a finite number")
    batches = []
    for item in message.batches:
        num_bytes = _routing_bytes(item, spec)
        batches.append(_batch(item, rest[:num_bytes], spec))
        rest = rest[num_bytes:]
    require_length(rest, 0, "expert_ids beyond the last microbatch")
    return batches, message.facts


def share_frames(
    ranks: Sequence[Sequence[Microbatch]], layouts: Sequence[RankCoordinates], facts: Mapping[str, float]
) -> tuple[list[bytes], dict[str, float]]:
    """Returns one frame per trainer rank with its share and nothing else, and metrics of the routing in the frames.

    Args:
        ranks: whole microbatches of each data-parallel rank. layouts: of every trainer rank, in rank order.
        facts: as in `encode_batches`, the same for all.
    """
    frames, received, excess = [], [0.0], []
    for layout in layouts:
        shares = [cut_share(batch, layout) for batch in ranks[layout.data_rank]]
        frames.append(encode_batches(shares, facts))
        received.append(float(routing_bytes(shares)))
        own = own_routing_bytes(shares, layout)
        # If there are fewer sequences than ranks, some receive a few pad rows and need nothing.
        excess += [received[-1] / own] if own else []
    if not excess:
        return frames, {}
    return frames, {"data/routing_bytes": max(received), "data/routing_bytes_over_share": max(excess)}


def _message(batch: Microbatch) -> BatchMessage:
    routing = None
    if batch.expert_ids is not None and batch.routing_checksums is not None:
        num_rows, num_layers, _ = batch.expert_ids.shape
        routing = RoutingMessage(
            num_rows=num_rows, num_layers=num_layers, checksums=array_bytes(batch.routing_checksums)
        )
    return BatchMessage(
        num_rows=batch.num_rows,
        ints={name: array_bytes(getattr(batch, name).astype(np.int32)) for name in INT_ROWS},
        floats={name: array_bytes(getattr(batch, name)) for name in FLOAT_ROWS},
        flags={name: pack_flags(getattr(batch, name)) for name in FLAG_ROWS},
        scores={name: array_bytes(values) for name, values in batch.scores.items()},
        sample_index=array_bytes(batch.sample_index),
        kept_sizes=array_bytes(batch.kept.sizes.astype(np.uint16)),
        kept_ids=pack_kept_ids(batch.kept.offsets, batch.kept.ids),
        cu_seqlens=array_bytes(batch.cu_seqlens),
        rollout_keys=array_bytes(batch.rollout_keys),
        prefix_of=None if batch.prefix_of is None else array_bytes(batch.prefix_of),
        prefix_rows=None if batch.prefix_rows is None else array_bytes(batch.prefix_rows),
        checksums=array_bytes(np.array([batch.context_checksum, batch.kept_checksum], np.uint64)),
        routing=routing,
    )


def _routing_bytes(message: BatchMessage, spec: ModelSpec) -> int:
    """Returns the bytes of a microbatch's expert ids behind the document; checks its numbers before it uses them."""
    routing = message.routing
    if routing is None:
        return 0
    divides = 0 < routing.num_rows <= message.num_rows and message.num_rows % routing.num_rows == 0
    seen = f"{routing.num_rows} routing rows, {routing.num_layers} layers"
    _require(divides, Reason.WRONG_SHAPE, "expert_ids", seen, f"an equal part of {message.num_rows} rows")
    expected = f"0..{spec.num_moe_layers} MoE layers"
    _require(0 <= routing.num_layers <= spec.num_moe_layers, Reason.WRONG_SHAPE, "expert_ids", seen, expected)
    return routing.num_rows * routing.num_layers * spec.experts_per_token * spec.expert_dtype.itemsize


def _batch(message: BatchMessage, expert_bytes: memoryview, spec: ModelSpec) -> Microbatch:
    num_rows = message.num_rows
    _require(num_rows > 0, Reason.TOO_SHORT, "num_rows", num_rows, "at least 1")
    for field, seen, names in (
        ("ints", message.ints, INT_ROWS),
        ("floats", message.floats, FLOAT_ROWS),
        ("flags", message.flags, FLAG_ROWS),
    ):
        _require(sorted(seen) == sorted(names), Reason.MESSAGE_MALFORMED, field, sorted(seen), sorted(names))
    # First of all: its length proves `num_rows`, on which everything below spends memory.
    ints = {name: read_array(data, np.int32, num_rows, name).astype(np.int64) for name, data in message.ints.items()}
    sizes = read_array(message.kept_sizes, np.uint16, num_rows, "kept_sizes")
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    num_sequences = len(message.rollout_keys) // 8
    prefixes, before = message.prefix_of, message.prefix_rows
    of_contexts, of_kept = read_array(message.checksums, np.uint64, 2, "checksums").tolist()
    batch = Microbatch(
        **ints,
        **{name: read_array(data, np.float32, num_rows, name) for name, data in message.floats.items()},
        **{name: read_flags(data, num_rows, name) for name, data in message.flags.items()},
        scores=_scores(message.scores, num_rows),
        cu_seqlens=read_array(message.cu_seqlens, np.int32, num_sequences + 1, "cu_seqlens"),
        kept=KeptSets(offsets, read_kept_ids(message.kept_ids, offsets)),
        sample_index=read_array(message.sample_index, np.int32, num_rows, "sample_index"),
        rollout_keys=read_array(message.rollout_keys, np.uint64, num_sequences, "rollout_keys"),
        prefix_of=None if prefixes is None else read_array(prefixes, np.int32, num_sequences, "prefix_of"),
        prefix_rows=None if before is None else read_array(before, np.int32, num_sequences, "prefix_rows"),
        context_checksum=of_contexts,
        kept_checksum=of_kept,
        **_routing(message.routing, expert_bytes, spec),
    )
    _check_rows(batch, spec)
    _check_sequences(batch)
    return batch


def _scores(scores: Mapping[str, memoryview], num_rows: int) -> dict[str, NDArray[np.float32]]:
    _require(len(scores) <= MAX_NAMES, Reason.TOO_MANY_NAMES, "scores", len(scores), f"at most {MAX_NAMES}")
    found = {name: read_array(data, np.float32, num_rows, f"scores[{name!r}]") for name, data in scores.items()}
    for name, values in found.items():
        require_text(name, "scores name")
        finite = bool(np.isfinite(values).all())
        _require(finite, Reason.VALUE_NOT_FINITE, f"scores[{name!r}]", "not finite", "finite in every row")
    return found


def _routing(routing: RoutingMessage | None, data: memoryview, spec: ModelSpec) -> dict[str, NDArray[Any]]:
    if routing is None:
        return {}
    shape = (routing.num_rows, routing.num_layers, spec.experts_per_token)
    expert_ids = read_expert_planes(data, shape, spec.expert_dtype)
    highest = int(expert_ids.max(initial=0))
    expected = f"in [0, {spec.num_experts})"
    _require(highest < spec.num_experts, Reason.EXPERT_ID_OUT_OF_RANGE, "expert_ids", highest, expected)
    checksums = read_array(routing.checksums, np.uint64, routing.num_layers, "routing_checksums")
    return {"expert_ids": expert_ids, "routing_checksums": checksums}


def _check_rows(batch: Microbatch, spec: ModelSpec) -> None:
    """Refuses values that no packer writes: the receiver computes on them unseen."""
    vocabulary = f"in [0, {spec.vocab_size})"
    for name, ids in (("input_ids", batch.input_ids), ("target_ids", batch.target_ids), ("kept.ids", batch.kept.ids)):
        inside = ids.size == 0 or (ids.min() >= 0 and ids.max() < spec.vocab_size)
        _require(inside, Reason.TOKEN_ID_OUT_OF_RANGE, name, f"{ids.min(initial=0)}..{ids.max(initial=0)}", vocabulary)
    for name in FLOAT_ROWS:
        finite = bool(np.isfinite(getattr(batch, name)).all())
        _require(finite, Reason.VALUE_NOT_FINITE, name, "not finite", "finite in every row")
    positive = bool((batch.temperatures > 0).all())
    _require(positive, Reason.TEMPERATURE_NOT_POSITIVE, "temperatures", batch.temperatures.min(), "above 0")
    same = np.array_equal(batch.truncated, batch.kept.sizes > 0)
    _require(same, Reason.TRUNCATED_DISAGREES, "truncated", "other rows", "the rows that list kept ids")
    _check_distinct(batch)
    same = np.array_equal(batch.is_pad, batch.sample_index < 0)
    _require(same, Reason.ROWS_DIFFER, "is_pad", "other rows", "the rows without a sample")
    trained = int((batch.loss_mask & batch.is_pad).sum())
    _require(not trained, Reason.ROWS_DIFFER, "loss_mask", f"{trained} trained pad rows", "none")


def _check_distinct(batch: Microbatch) -> None:
    """Refuses a row that repeats an expert: it would end one rank in a dispatcher and leave the others waiting for it.

    Rows whose routing was not captured hold zeros. Which rows of a tensor-parallel rank they are is not known here, so
    at most as many rows of zeros pass (the trainer looks at each, `moerl.trainer.replay_checks`).
    """
    if batch.expert_ids is None or batch.expert_ids.shape[2] == 1:
        return
    is_filled = batch.expert_ids.any(axis=(1, 2))
    num_empty, num_live = int((~is_filled).sum()), int((~batch.routed).sum())
    filled = batch.expert_ids if not num_empty else batch.expert_ids[is_filled]
    distinct = rows_are_distinct(filled) and (num_empty <= num_live or not batch.expert_ids.size)
    _require(distinct, Reason.REPEATED_EXPERT, "expert_ids", "an expert twice in a row", "distinct experts in a row")


def _check_sequences(batch: Microbatch) -> None:
    """Requires that `cu_seqlens` rises from 0 to a multiple of the rows of this share."""
    cu_seqlens = batch.cu_seqlens
    _require(cu_seqlens[0] == 0, Reason.OFFSETS_NOT_FROM_ZERO, "cu_seqlens", cu_seqlens[0], 0)
    rises = bool((np.diff(cu_seqlens) > 0).all())
    _require(rises, Reason.OFFSETS_FALL, "cu_seqlens", "an empty or negative sequence", "at least one row in each")
    total = batch.num_rows_of_all
    fits = total > 0 and total % batch.num_rows == 0
    _require(fits, Reason.OFFSETS_END_WRONG, "cu_seqlens", total, f"a multiple of {batch.num_rows} rows")
    _check_prefixes(batch)
    longest = int((np.diff(cu_seqlens) + batch.rows_before).max())
    inside = batch.position_ids.min() >= 0 and batch.position_ids.max() < longest
    _require(inside, Reason.VALUE_OUT_OF_RANGE, "position_ids", batch.position_ids.max(), f"in [0, {longest})")


def _check_prefixes(batch: Microbatch) -> None:
    """Requires that a prefix comes before the sequences that share it, has none itself, and has the rows of it."""
    prefix_of, rows = batch.prefix_of, batch.prefix_rows
    if prefix_of is None or rows is None:
        _require(prefix_of is rows, Reason.MISSING_FIELD, "prefix_rows", "one of the two", "prefix_of and prefix_rows")
        return
    earlier = bool(((prefix_of >= -1) & (prefix_of < np.arange(len(prefix_of)))).all())
    _require(earlier, Reason.VALUE_OUT_OF_RANGE, "prefix_of", prefix_of.tolist(), "-1 or an earlier sequence")
    plain = bool((prefix_of[prefix_of[prefix_of >= 0]] < 0).all())
    _require(plain, Reason.VALUE_OUT_OF_RANGE, "prefix_of", prefix_of.tolist(), "prefixes without a prefix")
    lengths = np.where(prefix_of < 0, 0, np.diff(batch.cu_seqlens)[prefix_of])
    inside = bool(((rows <= lengths) & ((rows > 0) == (prefix_of >= 0)) & (rows >= 0)).all())
    _require(inside, Reason.VALUE_OUT_OF_RANGE, "prefix_rows", rows.tolist(), f"up to {lengths.tolist()}, 0 for none")
