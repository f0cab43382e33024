"""Answers of SGLang's /generate as they came, each with the `input_ids` of its request.

Routes are base64 of int32 [S - 1 - start, all layers, K]; the log-prob under the restricted distribution is used if the
answer has it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.dumps.build import EMPTY, Parts
from moerl.diagnostics.dumps.jsonl import Row, rows
from moerl.diagnostics.dumps.reading import Reading
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.dumps.values import MAX_IDS, RowError, floats, in_range, integer, ints, shown, text
from moerl.errors import ConfigError

FORMAT = "SGLang answers"
NOTES = (
    "temperature and top-p are read from `sampling_params` next to an answer, and taken as 1 without it",
    "log-probs are those inside the kept set if an answer has `output_token_sampling_logprobs`, else those before "
    "top-p and top-k",
)


def read(file: Path, reading: Reading) -> Iterator[DumpedRollout]:
    for where, row in rows(file, reading.unusable):
        yield from reading.take(where, _parts, row, where, reading)


def _parts(row: Row, where: str, reading: Reading) -> Parts:
    meta = row.get("meta_info")
    if not isinstance(meta, dict):
        raise RowError("meta_info: missing", meta)
    if meta.get("output_token_logprobs") == []:
        raise RowError(EMPTY, "an answer of 0 tokens")
    output_ids, logprobs = _pairs(meta.get("output_token_logprobs"), "output_token_logprobs")
    if row.get("output_ids") is not None and row["output_ids"] != output_ids:
        raise RowError("output ids: not those of the log-probs", row["output_ids"])
    prompt = row.get("input_ids")
    if prompt is None:
        prompt = _pairs(meta.get("input_token_logprobs"), "input_ids", first_is_none=True)[0]
    prompt_ids = ints(prompt, "input ids").tolist()
    if type(meta.get("prompt_tokens")) is int and meta["prompt_tokens"] != len(prompt_ids):
        counted = meta["prompt_tokens"]
        raise RowError("input ids: not as many as the server counted", f"{len(prompt_ids)}, not {shown(counted)}")
    kept, kept_logprobs = _kept(meta, output_ids)
    sampling = row.get("sampling_params")
    sampling = sampling if isinstance(sampling, dict) else {}
    version = meta.get("weight_version")
    expert_ids, start = _routes(row, meta, len(prompt_ids) + len(output_ids), reading)
    return Parts(
        name=text(meta.get("id"), "id") or where,
        token_ids=prompt_ids + output_ids,
        rollout_logprobs=logprobs if kept_logprobs is None else kept_logprobs,
        num_response=len(output_ids),
        temperatures=sampling.get("temperature"),
        top_ps=sampling.get("top_p"),
        policy_versions=None if version is None else reading.version_numbers([version])[0],
        expert_ids=expert_ids,
        first_row=start,
        kept=kept,
        labels={
            "group": row.get("group"),
            "engine": row.get("engine"),
            "prompt": row.get("prompt"),
            "response": row.get("text"),
        },
    )


def _pairs(value: object, name: str, *, first_is_none: bool = False) -> tuple[list[int], list[float]]:
    """Returns the ids and log-probs of a list of [log-prob, id, text]; the first token of a prompt has no log-prob."""
    if not isinstance(value, list) or not value:
        raise RowError(f"{name}: missing", value)
    if not all(isinstance(each, list) and len(each) >= 2 for each in value):
        raise RowError(f"{name}: not pairs of log-prob and id", value)
    found = [each[0] for each in value]
    if first_is_none and found[0] is None:
        found[0] = 0.0
    return ints([each[1] for each in value], name).tolist(), floats(found, name).tolist()


def _kept(meta: Row, output_ids: list[int]) -> tuple[tuple[object, object] | None, list[float] | None]:
    """Returns the kept sets, and the log-probs of the sampled tokens inside them; None each if the answer has none."""
    sets, logprobs = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    kept = None
    if sets is not None:
        if not isinstance(sets, list) or len(sets) != len(output_ids):
            raise RowError("output_token_sampling_mask: not one for each token", sets)
        listed = [ints([] if each is None else each, "ids of kept sets").tolist() for each in sets]
        sizes = [len(each) for each in listed]
        kept = (np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]), [each for ids in listed for each in ids])
        sets = listed
    if logprobs is None:
        return kept, None
    if not isinstance(logprobs, list) or len(logprobs) != len(output_ids):
        raise RowError("output_token_sampling_logprobs: not one for each token", logprobs)
    if sets is not None and any(isinstance(each, list) for each in logprobs):
        logprobs = [_own(each, ids, token) for each, ids, token in zip(logprobs, sets, output_ids, strict=True)]
    return kept, logprobs


def _own(logprobs: Any, ids: list[int], token: int) -> Any:
    """Returns the sampled token's log-prob out of those of its whole kept set."""
    if not isinstance(logprobs, list):
        return logprobs
    if len(logprobs) != len(ids) or token not in ids:
        raise RowError("output_token_sampling_logprobs: the sampled token is not in its kept set", token)
    return logprobs[ids.index(token)]


def _routes(row: Row, meta: Row, num_tokens: int, reading: Reading) -> tuple[NDArray[np.int32] | None, int]:
    """Returns int32 [rows, layers, K], None without routes, and the number of the first row."""
    encoded = meta.get("routed_experts")
    if encoded is None:
        return None, 0
    experts = row.get("experts_per_token", reading.experts_per_token)
    if experts is None:
        raise ConfigError(
            "DUMP: routes of SGLang answers are flat, and nothing says how many experts a token has",
            seen="neither a model nor `experts_per_token` next to the answer",
            expected="the number of experts per token",
            remedy="name the model, or write `experts_per_token` next to each answer",
        )
    experts = integer(experts, "experts_per_token", least=1)
    said = meta.get("routed_experts_start_len", row.get("routed_experts_start_len"))
    start = 0 if said is None else integer(said, "routed_experts_start_len")
    if not isinstance(encoded, str) or len(encoded) > MAX_IDS * 6:
        raise RowError("routed_experts: not base64 of int32", encoded)
    try:
        data = base64.b64decode(encoded, validate=True)
        found = np.frombuffer(data, "<i4")
    except (binascii.Error, ValueError) as error:
        raise RowError("routed_experts: not base64 of int32", str(error)) from error
    num_rows = num_tokens - 1 - start
    if num_rows < 1 or found.size == 0 or found.size % (num_rows * experts):
        raise RowError("routed_experts: ids do not divide into rows", f"{found.size} ids, {num_rows} rows of {experts}")
    return in_range(found, "routed_experts", -(1 << 31) + 1).reshape(num_rows, -1, experts), start
