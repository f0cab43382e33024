"""slime and miles: rollout and train dumps (torch.save), and miles' `dashboard_columns` (Parquet).

`moerl.offline.torch_dumps` loads the former: nothing here needs torch. Values by token are of the response, which
has tools' tokens in it; routes have a row for every token but the last and, in dumps of both, are of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moerl.diagnostics.dumps import parquet
from moerl.diagnostics.dumps.build import Parts, spread_turns
from moerl.diagnostics.dumps.reading import Reading
from moerl.diagnostics.dumps.refused import NotADumpError
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.dumps.values import MAX_INT, RowError, flags, integer, routes, text
from moerl.errors import ConfigError

type TorchFile = Callable[[Path], Any]
"""Loads what torch.save wrote, tensors of samples as arrays; raises `ConfigError`."""

ROLLOUTS, TRAIN, COLUMNS = "slime or miles rollouts", "slime or miles train data", "miles dashboard columns"
_SETTINGS = "slime and miles write no sampling parameters into dumps: temperature and top-p are taken as 1"
TRAINER_ELSEWHERE = (
    "log-probs of the trainer are in the train data (--save-debug-train-data): name that file as well as this one"
)
"""Note of a dump of rollouts without its train data."""
NOTES = {
    ROLLOUTS: (_SETTINGS, TRAINER_ELSEWHERE),
    TRAIN: (_SETTINGS, "slime and miles take routes out of their train data before they write it"),
    COLUMNS: (_SETTINGS, "dashboard columns have neither routes nor kept sets nor log-probs of the trainer"),
}
COLUMN_NAMES = ("sample_index", "response_length", "tokens", "loss_mask", "rollout_log_probs")
COLUMNS_REQUIRED = frozenset(COLUMN_NAMES)

_NAMES = {
    "response_length": ("response_length", "response_lengths"),
    "loss_mask": ("loss_mask", "loss_masks"),
    "index": ("sample_index", "index", "sample_indices"),
}
"""Rollout dumps name a sample's value in the singular, train dumps after the column that it was cut from."""


_FINISHED = {"completed": "stop", "truncated": "length", "aborted": "abort"}
"""A sample's status, in the words of the contract."""


def kind_of(payload: object, file: Path) -> str:
    """Returns the kind of the loaded dump: `ROLLOUTS` or `TRAIN`. Raises `ConfigError` if the payload is neither."""
    if isinstance(payload, dict):
        samples = payload.get("samples")
        if isinstance(payload.get("rollout_data"), dict):
            return TRAIN
        if isinstance(samples, list):
            return TRAIN if "dp_shards" in payload else ROLLOUTS
    raise NotADumpError(
        f"DUMP: {file} is no dump of slime or miles",
        seen=f"keys {', '.join(map(str, list(payload)[:12]))}"[:300]
        if isinstance(payload, dict)
        else type(payload).__name__,
        expected="a dict with samples (--save-debug-rollout-data, --save-debug-train-data) or rollout_data (miles)",
        remedy="write the minimal schema with the converter script; see docs/dump_formats.md",
    )


def read(payload: Mapping[str, Any], file: Path, reading: Reading) -> Iterator[DumpedRollout]:
    """Yields the rollouts. payload: loaded from the file by a `TorchFile`, and accepted by `kind_of`."""
    rollout_id = payload.get("rollout_id")
    step = int(rollout_id) if type(rollout_id) is int and 0 <= rollout_id <= MAX_INT else -1
    for position, sample in enumerate(_samples(payload, file)):
        where = f"{file.name} sample {position}"
        if isinstance(sample, Mapping):
            yield from reading.take(where, _parts, sample, step, position, reading)
        else:
            reading.unusable.add("sample: not a dict", f"{where}: a {type(sample).__name__}")


def read_columns(file: Path, reading: Reading) -> Iterator[DumpedRollout]:
    for position, (where, sample) in enumerate(parquet.rows(file, COLUMN_NAMES)):
        yield from reading.take(where, _parts, sample, -1, position, reading)


def _samples(payload: Mapping[str, Any], file: Path) -> Iterator[object]:
    if not isinstance(payload.get("rollout_data"), dict):
        yield from payload["samples"]
        return
    if payload.get("cp_size", 1) != 1:
        raise ConfigError(
            f"DUMP: {file} holds parts of sequences",
            seen=f"cp_size {payload.get('cp_size')}",
            expected="train data of a run without context parallelism: miles writes each rank's part of the log-probs",
            remedy="dump a step with --context-parallel-size 1, or join the parts with the converter script",
        )
    columns = payload["rollout_data"]
    tokens = columns.get("tokens")
    if not isinstance(tokens, list):
        raise ConfigError(
            f"DUMP: {file} has no tokens",
            seen=f"columns {', '.join(map(str, list(columns)[:20]))}"[:300],
            expected="a list of tokens by sample",
            remedy="write the dump again, or write the minimal schema with the converter script",
        )
    listed = {name: column for name, column in columns.items() if _by_sample(column, len(tokens))}
    for position in range(len(tokens)):
        yield {name: column[position] for name, column in listed.items()}


def _by_sample(column: object, num_samples: int) -> bool:
    if isinstance(column, np.ndarray):
        return column.shape[:1] == (num_samples,)
    return isinstance(column, list | tuple) and len(column) == num_samples


def _value(sample: Mapping[str, Any], name: str) -> Any:
    return next((sample[each] for each in _NAMES[name] if sample.get(each) is not None), None)


def _parts(sample: Mapping[str, Any], step: int, position: int, reading: Reading) -> Parts:
    index = _value(sample, "index")
    mask, length = _value(sample, "loss_mask"), _value(sample, "response_length")
    if length is None:
        raise RowError("response length: missing", None)
    expert_ids = sample.get("rollout_routed_experts")
    offsets, ids = sample.get("rollout_top_p_token_offsets"), sample.get("rollout_top_p_token_ids")
    if (offsets is None) != (ids is None):
        raise RowError("kept sets: offsets or ids are missing", "one of the two rollout_top_p_token fields")
    trainer = sample.get("log_probs")
    prompt = sample.get("prompt")
    return Parts(
        name=f"{step}/{position if index is None else text(index, 'index')}",
        token_ids=sample.get("tokens"),
        rollout_logprobs=sample.get("rollout_log_probs"),
        num_response=length,
        sampled=mask,
        policy_versions=_versions(sample.get("weight_versions"), mask, integer(length, "response length"), reading),
        expert_ids=None if expert_ids is None else routes(expert_ids, "expert ids"),
        kept=None if offsets is None else (offsets, ids),
        trainer_logprobs={} if trainer is None else {"trainer": trainer},
        labels={
            "group": sample.get("group_index"),
            "prompt": prompt if isinstance(prompt, str) else None,
            "response": sample.get("response"),
        },
        finish_reason=_FINISHED.get(str(sample.get("status"))),
        step=step,
        rewards=_rewards(sample.get("reward")),
    )


def _rewards(reward: object) -> Mapping[str, object]:
    """Returns numbers by name. A reward function may return several, and a key of the run, which the dump does not
    name, picks one: only one that is called `reward` is trained on."""
    named = reward if isinstance(reward, Mapping) else {"reward": reward}
    return {str(name): value for name, value in named.items() if type(value) in (int, float)}


def _versions(versions: object, mask: object, length: int, reading: Reading) -> Any:
    """Returns one version for all tokens, or by token of the response; None if they cannot be assigned to tokens.

    A version was noted at the end of each answer, so if there are as many as sampled spans, they belong to them in
    order.
    """
    if versions is None or (isinstance(versions, list) and not versions):
        return None
    if not isinstance(versions, list):
        raise RowError("policy versions: not a list", versions)
    numbers = reading.version_numbers(versions)
    if len(set(numbers)) == 1:
        return numbers[0]
    sampled = np.ones(1, np.bool_) if mask is None else flags(mask, "loss mask")
    by_token = spread_turns(numbers, sampled) if len(sampled) == length else None
    if by_token is None:
        reading.note("some rollouts name several versions, and not from which token on: their versions are not known")
    return by_token
