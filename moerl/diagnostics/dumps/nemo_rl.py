"""NeMo-RL's `train_data_step{N}.jsonl`: both policies, padded to the longest of the batch, no routes, no kept sets.

A line is one sample of a batch, so every value stands in a list of one. Token t's log-prob stands at t.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from moerl.diagnostics.dumps.build import Parts
from moerl.diagnostics.dumps.jsonl import Row, rows
from moerl.diagnostics.dumps.reading import Reading
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.dumps.values import RowError, integer, ints

FORMAT = "NeMo-RL train data"
NOTES = ("NeMo-RL writes no routes, kept sets, policy versions or sampling parameters into its train data",)
REQUIRED = frozenset({"token_ids", "token_loss_mask", "generation_logprobs"})


def read(file: Path, reading: Reading) -> Iterator[DumpedRollout]:
    step = re.search(r"step(\d{1,9})", file.stem)
    number = int(step[1]) if step else -1
    for where, row in rows(file, reading.unusable):
        yield from reading.take(where, _parts, row, number, where)


def _parts(row: Row, step: int, where: str) -> Parts:
    token_ids = _single(row.get("token_ids"), "token ids")
    length = integer(_single(row.get("input_lengths"), "input lengths"), "input lengths", least=2)
    padded = len(ints(token_ids, "token ids"))
    if length > padded:
        raise RowError("input lengths: longer than the token ids", f"{length} of {padded} tokens")
    previous = row.get("prev_logprobs")
    return Parts(
        name=f"{step}/{row['idx']}" if type(row.get("idx")) is int else where,
        token_ids=_cut(token_ids, length, padded, "token ids"),
        rollout_logprobs=_cut(row.get("generation_logprobs"), length, padded, "generation log-probs"),
        sampled=_cut(row.get("token_loss_mask"), length, padded, "token loss mask"),
        trainer_logprobs={} if previous is None else {"trainer": _cut(previous, length, padded, "previous log-probs")},
        labels=_texts(row.get("content")),
        step=step,
    )


def _single(value: object, name: str) -> object:
    """Returns the only element of a list of one, or the value itself if it is no such list."""
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    if isinstance(value, list) and value and isinstance(value[0], list):
        raise RowError(f"{name}: several samples in one line", value)
    return value


def _cut(value: object, length: int, padded: int, name: str) -> object:
    """Returns the first `length` of `padded` values."""
    value = _single(value, name)
    if not isinstance(value, list):
        raise RowError(f"{name}: missing" if value is None else f"{name}: not a list", value)
    if len(value) != padded:
        raise RowError(f"{name}: not as long as the token ids", f"{len(value)}, not {padded}")
    return value[:length]


def _texts(content: object) -> dict[str, object]:
    """Returns the texts of the messages: the first is the prompt."""
    messages = _single(content, "content") if isinstance(content, list) else content
    if isinstance(messages, str):
        return {"response": messages}
    if isinstance(messages, list) and messages and all(isinstance(each, str) for each in messages):
        return {"prompt": messages[0], "response": "".join(messages[1:])}
    return {}
