"""Dumps as other systems write them, from `DumpedRollout`s: ``from foreign_dumps import make_dumped, write_slime``.

Laid out as their sources do it (August 2026): slime's observability (rollout and train data), miles' debug data and
train dumps, NeMo-RL's logger of batches, prime-rl's file monitor and token export with the traces of verifiers,
SGLang's /generate; `tests/golden/dumps` has some of their own making. Dense layers have routes of zeros where a
system reports all layers.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from moerl.contract.fields import KeptSets
from moerl.diagnostics.dumps.opening import open_dumps
from moerl.diagnostics.dumps.rollout import Dump, DumpedRollout, turns_of
from moerl.offline.torch_dumps import open_any_dumps

type Rollouts = Sequence[DumpedRollout]


def make_dumped(
    rng: np.random.Generator,
    *,
    name: str = "rollout",
    spans: Sequence[int] = (3, 5),
    layers: int = 2,
    experts: int = 2,
    version: int = 3,
    **changes: Any,
) -> DumpedRollout:
    """A sound rollout with everything in it; spans are in turn not sampled and sampled."""
    sampled = np.concatenate([np.full(length, index % 2 == 1) for index, length in enumerate(spans)])
    num_tokens = len(sampled)
    token_ids = rng.integers(0, 1000, num_tokens, dtype=np.int32)
    sets = [np.union1d(rng.integers(0, 1000, 3), token_ids[t]) if sampled[t] else [] for t in range(num_tokens)]
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in sets])]).astype(np.int64)
    logprobs = np.where(sampled, -rng.exponential(1.0, num_tokens), 0).astype(np.float32)
    ranked = rng.random((num_tokens - 1, layers, 8)).argsort(axis=2)
    values: dict[str, Any] = {
        "name": name,
        "token_ids": token_ids,
        "sampled": sampled,
        "rollout_logprobs": logprobs,
        "temperatures": np.where(sampled, 0.75, 1).astype(np.float32),
        "top_ps": np.where(sampled, 0.5, 1).astype(np.float32),
        "policy_versions": np.where(sampled, version, -1).astype(np.int32),
        "turns": turns_of(sampled),
        "expert_ids": ranked[:, :, :experts].astype(np.int32),
        "routed": np.ones(num_tokens - 1, np.bool_),
        "kept": KeptSets(offsets, np.concatenate(sets).astype(np.int32)),
        "trainer_logprobs": {"trainer": np.where(sampled, logprobs * 1.25, 0).astype(np.float32)},
        "group": "7",
        "prompt": "What is 1 + 1?",
        "response": "2",
    }
    return DumpedRollout(**(values | changes))


def same(left: DumpedRollout, right: DumpedRollout, *, but: Sequence[str] = ()) -> None:
    """Asserts that two rollouts agree in every field but those named, dtypes included; a dump that does not say
    temperatures says so. Rewards and ends, which few dumps have, are not compared."""
    few_have = ("says_temperature", "says_top_p", "rewards", "finish_reason")
    for each in fields(DumpedRollout):
        if each.name not in (*but, *few_have):
            _same(getattr(left, each.name), getattr(right, each.name), each.name)


def _same(left: Any, right: Any, name: str) -> None:
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray), name
        assert left.dtype == right.dtype, name
        np.testing.assert_array_equal(left, right, err_msg=name)
    elif isinstance(left, KeptSets):
        assert isinstance(right, KeptSets), name
        _same(left.offsets, right.offsets, name)
        _same(left.ids, right.ids, name)
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), name
        for key in left:
            _same(left[key], right[key], name)
    else:
        assert left == right, name


def open_dump(path: Path, **options: Any) -> Dump:
    """The one dump that a path names."""
    (dump,) = open_dumps([path], **options)
    return dump


def open_any_dump(path: Path, **options: Any) -> Dump:
    """The one dump that a path names, files of torch.save included."""
    (dump,) = open_any_dumps([path], **options)
    return dump


def all_layers(rollout: DumpedRollout, num_layers: int, moe_layers: Sequence[int]) -> np.ndarray:
    """int32 [R, num_layers, K]: the routes in the MoE layers, zeros in the others."""
    ids = rollout.expert_ids
    assert ids is not None
    out = np.zeros((len(ids), num_layers, ids.shape[2]), np.int32)
    out[:, list(moe_layers)] = ids
    return out


def _layers(rollout: DumpedRollout, model: tuple[int, Sequence[int]] | None) -> np.ndarray | None:
    if rollout.expert_ids is None or model is None:
        return rollout.expert_ids
    return all_layers(rollout, *model)


def _versions(rollout: DumpedRollout) -> list[str]:
    """One of each sampled span, as it was at its end."""
    ends = np.flatnonzero(rollout.sampled & ~np.append(rollout.sampled[1:], False))
    return [str(version) for version in rollout.policy_versions[ends]]


def _sample(rollout: DumpedRollout, index: int, routes: Any) -> dict[str, Any]:
    """Returns the fields that samples of slime and miles share."""
    start = rollout.num_prompt
    return {
        "group_index": int(rollout.group),
        "index": index,
        "prompt": rollout.prompt,
        "tokens": rollout.token_ids.tolist(),
        "response": rollout.response,
        "response_length": len(rollout) - start,
        "label": None,
        "reward": rollout.rewards.get("reward", 1.0),
        "loss_mask": rollout.sampled[start:].astype(int).tolist(),
        "weight_versions": _versions(rollout),
        "rollout_log_probs": rollout.rollout_logprobs[start:].tolist(),
        "rollout_routed_experts": routes,
        "status": "completed",
        "metadata": {},
        "spec_info": {"spec_verify_ct": 0},
    }


def write_slime(
    path: Path, rollouts: Rollouts, *, rollout_id: int = 4, model: tuple[int, Sequence[int]] | None = None
) -> None:
    """`--save-debug-rollout-data`. model: number of layers, and which are MoE layers; None for MoE layers alone."""
    samples = []
    for index, rollout in enumerate(rollouts):
        routes = _layers(rollout, model)
        sample = _sample(rollout, index, None if routes is None else torch.as_tensor(routes))
        if rollout.kept is not None:
            start = rollout.num_prompt
            offsets = rollout.kept.offsets[start:] - rollout.kept.offsets[start]
            sample["rollout_top_p_token_ids"] = torch.tensor(rollout.kept.ids)
            sample["rollout_top_p_token_offsets"] = torch.as_tensor(offsets, dtype=torch.int32)
        samples.append(sample)
    torch.save({"rollout_id": rollout_id, "samples": samples}, path)


def write_slime_train(path: Path, rollouts: Rollouts, *, rollout_id: int = 4) -> None:
    """`--save-debug-train-data`, format 2."""
    samples = [
        {"data_parallel_rank": 0, "sample_index": index, "rollout_position": index, **_train_columns(rollout)}
        for index, rollout in enumerate(rollouts)
    ]
    shards = [{"rank": 0, "data_parallel_rank": 0, "partition": list(range(len(samples)))}]
    payload = {"format_version": 2, "rollout_id": rollout_id, "rank": 0, "samples": samples, "dp_shards": shards}
    torch.save(payload | {"raw_reward": [1.0] * len(samples)}, path)


def _train_columns(rollout: DumpedRollout) -> dict[str, Any]:
    start = rollout.num_prompt
    return {
        "tokens": torch.as_tensor(rollout.token_ids, dtype=torch.long),
        "total_lengths": len(rollout),
        "response_lengths": len(rollout) - start,
        "loss_masks": torch.as_tensor(rollout.sampled[start:].astype(np.int32)),
        "rollout_log_probs": torch.as_tensor(rollout.rollout_logprobs[start:]),
        "log_probs": torch.as_tensor(rollout.trainer_logprobs["trainer"][start:]),
        "advantages": torch.ones(len(rollout) - start),
    }


def write_miles(
    path: Path, rollouts: Rollouts, *, rollout_id: int = 4, model: tuple[int, Sequence[int]] | None = None
) -> None:
    """`--save-debug-rollout-data` of miles: routes as numpy arrays, no kept sets."""
    samples = [_sample(rollout, index, _layers(rollout, model)) for index, rollout in enumerate(rollouts)]
    torch.save({"rollout_id": rollout_id, "metadata": {}, "samples": samples}, path)


def write_miles_train(path: Path, rollouts: Rollouts, *, rollout_id: int = 4, cp_size: int = 1) -> None:
    """`--save-debug-train-data` of miles, one rank's."""
    rows = [_train_columns(rollout) for rollout in rollouts]
    data = {name: [row[name] for row in rows] for name in rows[0]} | {"sample_indices": list(range(len(rows)))}
    payload = {"rollout_id": rollout_id, "rank": 0, "rollout_data": data, "cp_rank": 0, "cp_size": cp_size}
    torch.save(payload | {"qkv_format": "thd"}, path)


def write_miles_columns(path: Path, rollouts: Rollouts) -> None:
    """`--dump-details`: dashboard_columns/rollout_N.parquet."""
    samples = [_sample(rollout, index, None) for index, rollout in enumerate(rollouts)]
    names = ("response_length", "tokens", "loss_mask", "rollout_log_probs")
    kinds = (pa.int32(), pa.list_(pa.int32()), pa.list_(pa.int8()), pa.list_(pa.float32()))
    columns = {name: pa.array([each[name] for each in samples], kind) for name, kind in zip(names, kinds, strict=True)}
    columns["sample_index"] = pa.array(range(len(samples)), pa.int32())
    columns["total_length"] = pa.array([len(each) for each in rollouts], pa.int32())
    pq.write_table(pa.table(columns), path, row_group_size=8)


def write_nemo_rl(path: Path, rollouts: Rollouts) -> None:
    """`train_data_step{N}.jsonl`: padded to the longest, every value in a list of one."""
    width = max(map(len, rollouts)) + 1

    def padded(values: np.ndarray) -> list[list[Any]]:
        return [values.tolist() + [0] * (width - len(values))]

    lines = [
        {
            "content": [[rollout.prompt, rollout.response]],
            "rewards": [1.0],
            "input_lengths": [len(rollout)],
            "token_ids": padded(rollout.token_ids),
            "token_loss_mask": padded(rollout.sampled.astype(int)),
            "sample_loss_mask": [1.0],
            "advantages": padded(rollout.sampled.astype(float)),
            "generation_logprobs": padded(rollout.rollout_logprobs),
            "prev_logprobs": padded(rollout.trainer_logprobs["trainer"]),
            "idx": index,
        }
        for index, rollout in enumerate(rollouts)
    ]
    write_lines(path, lines)


def write_prime_rl_traces(run_dir: Path, rollouts: Rollouts, *, step: int = 4) -> Path:
    """One episode of one trace per rollout; returns the file."""
    episodes = []
    for rollout in rollouts:
        nodes: list[dict[str, Any]] = []
        for turn in range(int(rollout.turns.max()) + 1):
            here = rollout.turns == turn
            sampled = bool(rollout.sampled[here][0])
            node = {
                "message": {"role": "assistant", "content": rollout.response}
                if sampled
                else {"role": "user", "content": rollout.prompt},
                "sampled": sampled,
                "token_ids": rollout.token_ids[here].tolist(),
                "mask": rollout.sampled[here].tolist(),
                "logprobs": rollout.rollout_logprobs[here].tolist() if sampled else [],
            }
            nodes.append(node if turn == 0 else {"parent": turn - 1, **node})
        version = int(rollout.policy_versions.max())
        work = {"type": "train", "step": step, "policy": {"start": version, "end": version}}
        trace = {"version": 1, "id": rollout.name, "nodes": nodes, "rewards": {}, "ok": True}
        episodes.append(
            {"id": f"e-{rollout.name}", "task": {}, "group": {"id": rollout.group}, "ok": True, "traces": [trace]}
            | {"run": {"type": "train", "id": "r", "work": work}}
        )
    file = run_dir / "rollouts" / f"step_{step}" / "train" / "effective" / "traces.jsonl"
    file.parent.mkdir(parents=True)
    write_lines(file, episodes)
    return file


def write_prime_rl_export(run_dir: Path, rollouts: Rollouts, *, step: int = 4) -> Path:
    """`token_exports/step_N/rank_0.jsonl`; returns the file."""
    lines = [
        {
            "schema_version": 1,
            "step": step,
            "rank": 0,
            "micro_step": 0,
            "micro_sequence_idx": index,
            "export_sequence_idx": index,
            "env_name": "env",
            "token_ids": rollout.token_ids.tolist(),
            "loss_mask": rollout.sampled.tolist(),
            "inference_logprobs": rollout.rollout_logprobs.tolist(),
            "trainer_logprobs": rollout.trainer_logprobs["trainer"].tolist(),
        }
        for index, rollout in enumerate(rollouts)
    ]
    file = run_dir / "token_exports" / f"step_{step}" / "rank_0.jsonl"
    file.parent.mkdir(parents=True)
    write_lines(file, lines)
    return file


def sglang_answer(
    rollout: DumpedRollout, *, model: tuple[int, Sequence[int]] | None = None, start: int = 0
) -> dict[str, Any]:
    """An answer of /generate with what was asked; the rollout has one sampled turn, at its end."""
    first = rollout.num_prompt
    meta: dict[str, Any] = {
        "id": rollout.name,
        "finish_reason": {"type": "stop"},
        "prompt_tokens": first,
        "completion_tokens": rollout.num_sampled,
        "weight_version": str(rollout.policy_versions.max()),
        "output_token_logprobs": [
            [float(value) - 0.125, int(token), None]
            for value, token in zip(rollout.rollout_logprobs[first:], rollout.token_ids[first:], strict=True)
        ],
    }
    routes = _layers(rollout, model)
    if routes is not None:
        meta["routed_experts"] = base64.b64encode(routes[start:].astype("<i4").tobytes()).decode()
        meta["routed_experts_start_len"] = start
    if rollout.kept is not None:
        sets = np.split(rollout.kept.ids, rollout.kept.offsets[first + 1 : -1])
        meta["output_token_sampling_mask"] = [each.tolist() for each in sets]
        meta["output_token_sampling_logprobs"] = rollout.rollout_logprobs[first:].tolist()
    return {
        "input_ids": rollout.token_ids[:first].tolist(),
        "prompt": rollout.prompt,
        "group": rollout.group,
        "sampling_params": {"temperature": 0.75, "top_p": 0.5},
        "text": rollout.response,
        "output_ids": rollout.token_ids[first:].tolist(),
        "meta_info": meta,
    }


def write_sglang(
    path: Path, rollouts: Rollouts, *, model: tuple[int, Sequence[int]] | None = None, start: int = 0
) -> None:
    """Answers as JSON lines, or where the path says .json as one list."""
    answers = [sglang_answer(rollout, model=model, start=start) for rollout in rollouts]
    if path.suffix == ".json":
        path.write_text(json.dumps(answers, indent=1))
    else:
        write_lines(path, answers)


def write_verl_texts(path: Path, rollouts: Rollouts) -> None:
    """Writes texts as verl does with a rollout_data_dir: {step}.jsonl."""
    lines = [{"input": each.prompt, "output": each.response, "gts": "2", "score": 1.0, "step": 4} for each in rollouts]
    write_lines(path, lines)


def skyrl_batch(rollouts: Rollouts) -> dict[str, Any]:
    """A TrainingInputBatch as plain lists: everything padded on the left."""
    width = max(map(len, rollouts)) + 2
    tail = max(len(rollout) - rollout.num_prompt for rollout in rollouts)

    def left(values: np.ndarray, length: int) -> list[Any]:
        pad = np.zeros((length - len(values), *values.shape[1:]), values.dtype)
        return np.concatenate([pad, values]).tolist()

    def responses(arrays: list[np.ndarray]) -> list[Any]:
        return [left(array[rollout.num_prompt :], tail) for array, rollout in zip(arrays, rollouts, strict=True)]

    routes = [
        np.concatenate([each.expert_ids, each.expert_ids[-1:]]) for each in rollouts if each.expert_ids is not None
    ]
    return {
        "sequences": [left(each.token_ids, width) for each in rollouts],
        "attention_mask": [left(np.ones(len(each), np.int64), width) for each in rollouts],
        "loss_mask": responses([each.sampled.astype(np.float32) for each in rollouts]),
        "response_mask": responses([np.ones(len(each), np.int64) for each in rollouts]),
        "rollout_logprobs": responses([each.rollout_logprobs for each in rollouts]),
        "action_log_probs": responses([each.trainer_logprobs["trainer"] for each in rollouts]),
        "rollout_expert_indices": [left(each, width) for each in routes],
    }


def write_skyrl(path: Path, rollouts: Rollouts) -> None:
    """Writes a pickle as SkyRL does with dump_data_batch."""
    path.write_bytes(pickle.dumps(skyrl_batch(rollouts)))


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
