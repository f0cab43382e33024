"""prime-rl: `rollouts/step_N/.../traces.jsonl` (episodes), and `token_exports/step_N/rank_R.jsonl` (both policies).

An episode holds traces, a trace a tree of messages; a path from a root to a leaf is one sequence. A message has the
tokens that it adds, a mask of those that were sampled, and log-probs of the sampled ones alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moerl.diagnostics.dumps.build import Parts
from moerl.diagnostics.dumps.jsonl import Row, rows
from moerl.diagnostics.dumps.reading import Reading
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.dumps.values import RowError, flags, floats, integer, ints

TRACES = "prime-rl traces"
TRAINER_ELSEWHERE = (
    "log-probs of the trainer are in the token exports (trainer.enable_token_export): name their directory as well as "
    "the traces"
)
"""Note of traces without token exports."""
TRACE_NOTES = ("prime-rl writes no routes, kept sets or sampling parameters into its traces", TRAINER_ELSEWHERE)
ROUNDED = "log-probs are rounded to four decimals, as verifiers writes traces: gaps below 5e-5 do not show"
"""Note of traces."""
EXPORT = "prime-rl token export"
EXPORT_REQUIRED = frozenset({"token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs"})
EXPORT_NOTES = ("prime-rl writes no routes, kept sets, policy versions or sampling parameters into its token exports",)

DECIMALS = 4
"""Decimals of log-probs in a record of verifiers since 0.4."""

_MAX_BRANCHES = 1024
"""Most sequences of a trace."""


def read_exports(file: Path, reading: Reading) -> Iterator[DumpedRollout]:
    for where, row in rows(file, reading.unusable):
        yield from reading.take(where, _export, row, where)


def _export(row: Row, where: str) -> Parts:
    step = row.get("step", -1)
    return Parts(
        name=f"{step}/{row.get('rank', 0)}/{row.get('export_sequence_idx', where)}"[:200],
        token_ids=row.get("token_ids"),
        rollout_logprobs=row.get("inference_logprobs"),
        sampled=row.get("loss_mask"),
        trainer_logprobs={"trainer": row.get("trainer_logprobs")},
        step=integer(step, "step", least=-1),
    )


def read_traces(file: Path, reading: Reading) -> Iterator[DumpedRollout]:
    folder = re.search(r"step_(\d{1,9})", str(file.parent))
    step = int(folder[1]) if folder else -1
    for where, episode in rows(file, reading.unusable):
        traces = episode.get("traces", [episode] if "nodes" in episode else None)
        if not traces or not isinstance(traces, list):
            reading.unusable.add("traces: missing", where)
            continue
        for index, trace in enumerate(traces):
            place = f"{where} trace {index}"
            if not isinstance(trace, dict):
                reading.unusable.add("trace: not an object", place)
                continue
            try:
                paths = _paths(trace.get("nodes"))
            except RowError as error:
                reading.unusable.add(error.reason, f"{place}: {error.seen}")
                continue
            for branch, path in enumerate(paths):
                name = f"{trace.get('id', place)}/{branch}"[:200]
                yield from reading.take(f"{place} branch {branch}", _branch, path, name, episode, step, reading)


def _paths(nodes: object) -> Iterator[list[Row]]:
    """Returns the messages from a root to each leaf, one path after the other."""
    if not nodes or not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise RowError("messages of a trace: missing", nodes)
    parents = [node.get("parent") for node in nodes]
    for index, parent in enumerate(parents):
        # Messages are appended after those they follow, so an earlier parent leaves no room for a circle.
        if parent is not None and (type(parent) is not int or not 0 <= parent < index):
            raise RowError("messages of a trace: the parent is no earlier one", parent)
    leaves = sorted(set(range(len(nodes))) - {parent for parent in parents if parent is not None})
    if len(leaves) > _MAX_BRANCHES:
        raise RowError("messages of a trace: too many branches", len(leaves))
    return ([nodes[each] for each in _ancestors(leaf, parents)] for leaf in leaves)


def _ancestors(leaf: int, parents: list[int | None]) -> list[int]:
    path, at = [], leaf
    while at is not None:
        path.append(at)
        at = parents[at]
    return path[::-1]


def _branch(path: list[Row], name: str, episode: Row, step: int, reading: Reading) -> Parts:
    token_ids: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    for node in path:
        ids = ints(node.get("token_ids") or [], "token ids").tolist()
        mask = flags(node.get("mask") or [False] * len(ids), "mask").tolist()
        given = floats(node.get("logprobs") or [], "log-probs of the rollout").tolist()
        if len(mask) != len(ids) or len(given) != sum(mask):
            raise RowError(
                "a message: tokens, mask and log-probs do not fit",
                f"{len(ids)} tokens, {len(mask)} flags, {sum(mask)} sampled, {len(given)} log-probs",
            )
        values = iter(given)
        token_ids += ids
        sampled += mask
        logprobs += [next(values) if each else 0.0 for each in mask]
    if not token_ids:
        raise RowError("token ids: none in any message", f"{len(path)} messages")
    written = [value for node in path for value in node.get("logprobs") or []]
    if any(written) and all(round(value, DECIMALS) == value for value in written):
        reading.note(ROUNDED)
    return Parts(
        name=name,
        token_ids=token_ids,
        rollout_logprobs=logprobs,
        sampled=sampled,
        policy_versions=_version(episode, reading),
        labels={"group": _inner(episode, "group", "id"), **_texts(path)},
        step=step,
    )


def _version(episode: Row, reading: Reading) -> int:
    """Returns the one version of an episode; -1 if none is said, or if the policy changed on the way: the dump does not
    say at which token."""
    span = _inner(_inner(_inner(episode, "run"), "work"), "policy")
    start, end = _inner(span, "start"), _inner(span, "end")
    if type(start) is not int or type(end) is not int:
        return -1
    if start != end:
        reading.note("the policy changed in the middle of some episodes, and traces do not say at which token")
        return -1
    return start


def _inner(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _texts(path: list[Row]) -> dict[str, object]:
    contents = [_inner(node, "message", "content") for node in path]
    sampled = [isinstance(node.get("logprobs"), list) and bool(node["logprobs"]) for node in path]
    first = sampled.index(True) if True in sampled else len(path)
    words = [each if isinstance(each, str) else "" for each in contents]
    return {"prompt": "\n".join(words[:first]), "response": "\n".join(words[first:])}
