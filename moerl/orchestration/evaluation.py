"""Evaluation of the engine's current weights: greedy, sampled, by set, kept as tables. Runs in the controller."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moerl.contract.dump_columns import SPANS
from moerl.contract.files import atomic_file, writing
from moerl.contract.ports import Prompt, WorkedTask
from moerl.contract.trajectory import SamplingParams, Trajectory
from moerl.diagnostics.scores import final_answer, interval, majority_at_k, pass_at_k, powers_up_to
from moerl.orchestration.rollouts import GREEDY, Collector
from moerl.orchestration.selection import accuracy_of
from moerl.telemetry.terminal import excerpt_lines

GREEDY_SAMPLE = -1
"""Number of a greedy response in a table; samples count from 0."""
SHOWN_CHARACTERS = 2000
"""Most characters of the prompt, and of the response, of a sample that is shown."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of one evaluation."""

    num_problems: int
    """Greedy responses that were admitted, one a problem."""
    accuracy: float
    """Share of the greedy responses that solve their problem: mean of `accuracy_of`."""
    length_mean: float
    """Mean of sampled tokens per greedy response."""
    rewards: dict[str, float]
    """Means by name, over the greedy responses that have the reward."""
    scores: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """By name (``accuracy``, ``pass@8``, ``majority@8``; of a set ``gsm8k accuracy``): value, and lower and upper end
    of its interval of 95 %."""
    samples: dict[str, str] = field(default_factory=dict)
    """By name of the set (``""`` if there is one only): the greedy response with the highest and the one with the
    lowest reward, with their prompts, as Markdown."""


def evaluate(collector: Collector, split: str, count: int, *, version: int, worked: bool = False) -> Evaluation:
    """Solves the first `count` problems of a split greedily, and held-out ones by samples if the collector's plan asks
    for them. The responses are kept as ``<split>-<version>.parquet``, the scores next to them as JSON.

    Args:
        version: policy version of the engine's weights.
        worked: True makes the model show its work, by starting each response with the task's `work_prefix`.
    """
    plan, task = collector.evaluations, collector.task
    prompts = task.prompts(split, count)
    if worked:
        assert isinstance(task, WorkedTask)
        prompts = [replace(prompt, prefix=task.work_prefix(prompt)) for prompt in prompts]
    name = f"{split}-{version:06d}{'-worked' if worked else ''}"

    def responses(run: str, count: int, sampling: SamplingParams) -> list[Trajectory]:
        requests = collector.requests(prompts, run=run, count=count, sampling=sampling)
        found = collector.collect(prompts, requests, f"evaluation on {split} problems", trainer_version=version)
        # Of an episode, its first session: that of the prompt, if anything was sampled there.
        first = {trajectory.lineage.episode: trajectory for trajectory in reversed(found)}
        return [trajectory for trajectory in found if first[trajectory.lineage.episode] is trajectory]

    trajectories = responses(f"evaluation-{name}", 1, GREEDY)
    rows = greedy = _rows(collector, prompts, trajectories, greedy=True)
    if plan.samples and split == "heldout" and not worked:
        sampled = responses(f"evaluation-{name}-sampled", plan.samples, plan.sampling)
        rows = [*greedy, *_rows(collector, prompts, sampled, greedy=False)]
    scores = score_rows(rows)
    if plan.folder is not None:
        _keep(plan.folder / name, rows, scores)
    names = sorted({name for trajectory in trajectories for name in trajectory.rewards})
    rewards = {name: float(np.mean([t.rewards[name] for t in trajectories if name in t.rewards])) for name in names}
    return Evaluation(
        num_problems=len(trajectories),
        accuracy=float(np.mean([accuracy_of(t) for t in trajectories])),
        length_mean=float(np.mean([t.num_sampled for t in trajectories])),
        rewards=rewards,
        scores=scores,
        samples=sample_texts(greedy),
    )


def _rows(
    collector: Collector, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], *, greedy: bool
) -> list[dict[str, Any]]:
    """Makes a row of the table for each response, in the order of the problems."""
    order = {prompt.prompt_id: number for number, prompt in enumerate(prompts)}
    rows = []
    for trajectory, spans in zip(trajectories, collector.spans(trajectories) or repeat(None), strict=False):
        prompt = prompts[order[trajectory.lineage.prompt_id]]
        sample = GREEDY_SAMPLE if greedy else int(trajectory.lineage.episode.rpartition("/")[2])
        rows.append(
            {
                "set": prompt.source,
                "prompt_id": prompt.prompt_id,
                "place": collector.task.place(prompt),
                "sample": sample,
                "correct": accuracy_of(trajectory) == 1.0,
                "num_sampled": trajectory.num_sampled,
                "finish_reason": str(trajectory.finish_reason),
                "prompt": prompt.text,
                "text": prompt.prefix + collector.response(trajectory),
                **({} if spans is None else {SPANS: [asdict(span) for span in spans]}),
                **{f"reward_{name}": value for name, value in trajectory.rewards.items()},
            }
        )
    return sorted(rows, key=lambda row: (order[row["prompt_id"]], row["sample"]))


def score_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float, float]]:
    """Computes the scores of a table of responses: of all problems, and of each set if there are several."""
    scores = _scores(rows, "")
    sets = sorted({row["set"] for row in rows})
    for name in sets if len(sets) > 1 else ():
        scores |= _scores([row for row in rows if row["set"] == name], f"{name} ")
    return scores


def _scores(rows: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, tuple[float, float, float]]:
    greedy = [float(row["correct"]) for row in rows if row["sample"] == GREEDY_SAMPLE]
    found = {"accuracy": greedy} if greedy else {}
    sampled = [row for row in rows if row["sample"] != GREEDY_SAMPLE]
    problems = [[*group] for _, group in groupby(sampled, lambda row: row["prompt_id"])]
    # A problem has fewer responses than asked for if rewards of some failed.
    for k in powers_up_to(max(map(len, problems))) if problems else ():
        enough = [problem for problem in problems if len(problem) >= k]
        right = [[bool(row["correct"]) for row in problem] for problem in enough]
        found[f"pass@{k}"] = [pass_at_k(len(each), sum(each), k) for each in right]
        if k > 2:
            answers = [[final_answer(row["text"]) for row in problem] for problem in enough]
            found[f"majority@{k}"] = [majority_at_k(a, r, k) for a, r in zip(answers, right, strict=True)]
    return {f"{prefix}{name}": (float(np.mean(values)), *interval(values)) for name, values in found.items()}


def sample_texts(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the `Evaluation.samples` of a table of greedy responses."""
    found = {}
    sets = sorted({row["set"] for row in rows})
    for name in sets:
        ranked = sorted((row for row in rows if row["set"] == name), key=lambda row: -row.get("reward_reward", 0.0))
        shown = [("highest", ranked[0])] + ([("lowest", ranked[-1])] if len(ranked) > 1 else [])
        found[name if len(sets) > 1 else ""] = "\n\n".join(_sample_text(title, row) for title, row in shown)
    return found


def _sample_text(title: str, row: Mapping[str, Any]) -> str:
    """Formats a response as Markdown; its texts are indented by four, so that nothing in them is read as Markdown."""
    rewards = ", ".join(f"{name.removeprefix('reward_')} {row[name]:g}" for name in row if name.startswith("reward_"))
    parts = [f"**{title}: {rewards}** ({row['num_sampled']} tokens, {row['finish_reason']})"]
    for what in ("prompt", "text"):
        lines = excerpt_lines(str(row[what]), SHOWN_CHARACTERS)
        parts.append("\n".join(f"    {line}" for line in lines))
    return "\n\n".join(parts)


def _keep(stem: Path, rows: Sequence[Mapping[str, Any]], scores: Mapping[str, Any]) -> None:
    columns = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: [row.get(name) for row in rows] for name in columns})
    table_path, scores_path = stem.with_name(f"{stem.name}.parquet"), stem.with_name(f"{stem.name}.json")
    with writing(table_path), atomic_file(table_path) as path:
        pq.write_table(table, path)
    with writing(scores_path), atomic_file(scores_path) as path:
        path.write_text(json.dumps({name: list(each) for name, each in scores.items()}, indent=1) + "\n")
