"""Checksums of the weights that a server computes with, by tensor, from its own ranks. Runs in the engine's process.

Each tensor-parallel rank answers with checksums of the parts that it holds, under the checkpoint's names
(`patches/sglang`, 0009); parts add up, copies must agree, and together they must cover every tensor.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from moerl.errors import EngineError, WeightSyncError
from moerl.kernels.checksum import add_checksums
from moerl.rollout.sglang.http import SGLangHttp

_RECORD_BYTES, _RANK_BYTES = 512, 1 << 16
"""Longest record of a tensor without its name, and what a rank may say beyond; a record takes about 100 bytes."""

_NAMED = 5


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Tensors that a server must hold."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor, by its name in the checkpoint."""
    num_ranks: int
    """Tensor-parallel ranks of the server."""
    tied: Mapping[str, str]
    """Tensors that are another one's, each with that one's name."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's record: rows [rows) and columns [columns) of a tensor. checksum: 0 if it was not asked for."""

    rank: int
    dtype: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    checksum: int

    @property
    def is_empty(self) -> bool:
        return self.rows[0] == self.rows[1] or self.columns[0] == self.columns[1]


class _RankAnswer(msgspec.Struct):
    checksums: dict[str, str]


class _Answer(msgspec.Struct):
    success: bool
    message: str
    ranks: list[_RankAnswer] = []


async def weight_digests(http: SGLangHttp, model: ServedModel, seconds: float) -> dict[str, int]:
    """Asks for `moerl.kernels.checksum` of every tensor that the server computes with, by checkpoint name, tied ones
    included.

    Raises:
        WeightSyncError: no complete answer; or, naming tensor and ranks: copies that differ, a tensor that is not held
            completely, one that the checkpoint has not, or one whose parts the server cannot tell.
    """
    ranks = await ask_ranks(http, "held", seconds, max_answer_bytes(model))
    parts = await asyncio.to_thread(read_parts, ranks, model)
    return {name: add_checksums(part.checksum for part in mine) for name, mine in parts.items()}


async def weight_dtypes(http: SGLangHttp, model: ServedModel, seconds: float) -> dict[str, str]:
    """Asks for names of dtypes (float32, bfloat16) by checkpoint name: the server casts each tensor to its dtype, and
    reads no weights for the answer.

    Raises:
        WeightSyncError: as `weight_digests`.
    """
    ranks = await ask_ranks(http, "held_layout", seconds, max_answer_bytes(model))
    return {name: mine[0].dtype for name, mine in read_parts(ranks, model).items()}


def max_answer_bytes(model: ServedModel) -> int:
    """Returns the bytes of the longest answer that can be one about this model."""
    records = sum(len(name.encode()) + _RECORD_BYTES for name in model.shapes)
    return model.num_ranks * (records + _RANK_BYTES)


async def ask_ranks(http: SGLangHttp, action: str, seconds: float, max_bytes: int) -> list[dict[str, str]]:
    """Asks for the records of each rank by tensor; returns them unparsed.

    Args:
        action: `held`, or `held_layout` for records without checksums.
        max_bytes: the longest answer that is read.

    Raises:
        WeightSyncError: the server did not answer, or not in this form.
    """
    path, content = "/weights_checker", b""
    try:
        body = {"action": action, "selector": "target"}
        content = await http.call_once(path, body, max_bytes, seconds, admin=True)
        answer = msgspec.json.decode(content, type=_Answer)
    except (EngineError, msgspec.MsgspecError, RecursionError) as error:
        said = content[:300].decode(errors="replace")
        raise _refusal("no answer", f"{type(error).__name__}: {error} {said}", "records of its weights") from error
    if not answer.success:
        raise _refusal("refused", answer.message[:500], "records of its weights")
    return [rank.checksums for rank in answer.ranks]


def read_parts(ranks: Sequence[Mapping[str, str]], model: ServedModel) -> dict[str, list[_Part]]:
    """Returns the parts that make up every tensor, each once; those of a tied tensor are its owner's.

    Raises:
        WeightSyncError: as `weight_digests`.
    """
    if len(ranks) != model.num_ranks:
        raise _refusal("ranks that answered", len(ranks), model.num_ranks)
    parts: dict[str, list[_Part]] = {name: [] for name in model.shapes}
    unknown: list[str] = []
    for number, records in enumerate(ranks):
        for name, record in records.items():
            if record.startswith("!"):
                raise _refusal(f"cannot tell what it holds of '{name}'", f"rank {number}: {record[1:]}", "its layout")
            if name in parts:
                clipped = (_clip(part, model.shapes[name]) for part in _parse(name, number, record))
                parts[name] += [part for part in clipped if not part.is_empty]
            else:
                unknown.append(f"'{name}' (rank {number})")
    if unknown:
        raise _refusal("tensors that the checkpoint has not", _listed(unknown), "the checkpoint's tensors alone")
    whole = {name: _agreed(name, held) for name, held in parts.items()}
    missing = [_coverage(name, whole[name]) for name, shape in model.shapes.items() if not _covers(whole[name], shape)]
    if missing:
        raise _refusal("tensors that are not held whole", _listed(missing), "every element of every tensor once")
    return whole | {name: whole[owner] for name, owner in model.tied.items()}


def _parse(name: str, rank: int, record: str) -> Iterable[_Part]:
    for text in record.split(" "):
        try:
            dtype, first_row, end_row, first_column, end_column, checksum = text.split(":")
            rows, columns = (int(first_row), int(end_row)), (int(first_column), int(end_column))
            yield _Part(rank, dtype, rows, columns, int(checksum or 0))
        except ValueError as error:
            raise _refusal(
                f"record of '{name}'", f"rank {rank}: {text[:200]}", "dtype:rows:columns:checksum"
            ) from error


def _clip(part: _Part, shape: tuple[int, ...]) -> _Part:
    """Cuts off what pads the tensor: those are zeros, which add nothing to a checksum, or the checksum will be
    wrong."""
    num_rows, num_columns = _matrix(shape)
    rows, columns = (
        (min(span[0], end), min(span[1], end)) for span, end in ((part.rows, num_rows), (part.columns, num_columns))
    )
    return replace(part, rows=rows, columns=columns)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the rows and columns of a tensor, as `moerl.kernels.checksum` counts them."""
    return (shape[0] if shape else 1, math.prod(shape[1:]))


def _agreed(name: str, parts: Sequence[_Part]) -> list[_Part]:
    """Returns one part for every region of a tensor.

    Raises:
        WeightSyncError: copies of a region differ, or dtypes of parts.
    """
    first: dict[tuple[tuple[int, int], tuple[int, int]], _Part] = {}
    for part in parts:
        other = first.setdefault((part.rows, part.columns), part)
        if (part.dtype, part.checksum) != (other.dtype, other.checksum):
            raise _refusal(
                f"copies of '{name}' differ",
                f"rank {other.rank}: {other.dtype} {other.checksum}, rank {part.rank}: {part.dtype} {part.checksum}",
                f"one value of rows {part.rows}, columns {part.columns}",
            )
    if len({part.dtype for part in first.values()}) > 1:
        seen = ", ".join(f"rank {part.rank}: {part.dtype}" for part in first.values())
        raise _refusal(f"parts of '{name}'", seen, "one dtype")
    return list(first.values())


def _covers(parts: Sequence[_Part], shape: tuple[int, ...]) -> bool:
    """Returns whether the parts are a whole tensor, cut along its rows or along its columns."""
    num_rows, num_columns = _matrix(shape)
    rows = sorted(part.rows for part in parts if part.columns == (0, num_columns))
    columns = sorted(part.columns for part in parts if part.rows == (0, num_rows))
    return (len(rows) == len(parts) and _chain(rows, num_rows)) or (
        len(columns) == len(parts) and _chain(columns, num_columns)
    )


def _chain(spans: Sequence[tuple[int, int]], end: int) -> bool:
    """Returns whether spans follow one another from 0 to `end`."""
    return bool(spans) and [0, *(last for _, last in spans)] == [*(first for first, _ in spans), end]


def _coverage(name: str, parts: Sequence[_Part]) -> str:
    regions = ", ".join(f"rows {part.rows} columns {part.columns} (rank {part.rank})" for part in parts)
    return f"'{name}': {regions or 'nothing'}"


def _listed(items: Sequence[str]) -> str:
    return "; ".join(items[:_NAMED]) + (f"; {len(items)} in all" if len(items) > _NAMED else "")


def _refusal(what: str, seen: object, expected: object) -> WeightSyncError:
    return WeightSyncError(
        f"weights of the SGLang server: {what}",
        seen=seen,
        expected=expected,
        remedy="send it a whole update; start it again, from the trainer's model, if that does not help",
    )
