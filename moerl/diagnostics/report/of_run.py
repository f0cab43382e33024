"""The report of a run from the rows of `metrics.jsonl` and `layers.jsonl`. Pure; torch-free; any process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moerl.diagnostics.report.data import Decomposition, Layer, LayerMap, Report, ReportStep, Share, Unread
from moerl.diagnostics.report.run_findings import RECENT, RunSettings, Seen, certain, findings_of, headlines, verdict_of
from moerl.diagnostics.report.thinning import joined_columns, thinned_steps
from moerl.diagnostics.report.words import brief
from moerl.telemetry.metrics import SCORERS

TRAINED = "trained"
"""Scorer of a report: as the step trains."""
LABELS = {"routing": "experts not kept", "masks": "sampling masks not kept", "unexplained": "the rest, with both kept"}
_GAP = "logprob_abs_mean"
MAX_STEPS = 400
"""Values of each metric, and columns of the map over steps, that a page can show. The files of the run have all."""
_LEFT_OUT = ("seconds/", "memory/", "lengths/", "data/", "packing/", "weights/", "waiting/", "throughput/", "tokens/")
"""Metrics that do not concern the mismatch."""
EVALUATED = {
    "accuracy/mean": "evaluation/accuracy/mean",
    "reward/mean": "evaluation/reward/mean",
    "heldout/accuracy": "heldout/accuracy",
}
"""Metrics of evaluations, and their names among those of a step."""


def report_of_run(
    rows: Sequence[Mapping[str, Any]],
    layers: Sequence[Mapping[str, Any]],
    titles: tuple[str, str],
    settings: RunSettings,
    facts: Sequence[tuple[str, str]] = (),
) -> Report | None:
    """Returns the report, without samples; None if no step of reinforcement learning is done.

    Args:
        rows: of `metrics.jsonl`, in order. layers: of `layers.jsonl`.
        titles: title and subtitle of the page.
        settings: those that findings need.
        facts: names and values, above those from the rows.
    """
    rl = [row for row in rows if row["stage"] == "rl"]
    if not rl:
        return None
    table = next((row for row in reversed(rl) if _has_table(row)), None)
    gap = None if table is None else nothing_kept(table)
    trained = [row[f"mismatch/{_GAP}"] for row in rl if f"mismatch/{_GAP}" in row]
    seen = Seen(rl, settings, gap, trained, None if table is None else table.get(f"mismatch/{_GAP}"))
    findings = findings_of(seen)
    return Report(
        title=titles[0],
        subtitle=titles[1],
        verdict=verdict_of(findings, seen),
        facts=(*facts, *_facts(rl, trained)),
        headlines=headlines(rows, seen),
        decompositions=() if table is None or gap is None else (gap, *as_trained(table, settings)),
        findings=findings,
        scorers=_scorers(rl[-1] if table is None else table),
        steps=thinned_steps(_steps(rows), MAX_STEPS),
        layers=_layers(layers),
        maps=_maps(layers),
        unusable=tuple(
            Unread(reason, count, "see RUN_DIR/quarantine") for reason, count in sorted(settings.quarantined.items())
        ),
        notes=_notes(table, len(rl)),
    )


def _has_table(row: Mapping[str, Any]) -> bool:
    return all(f"mismatch/{scorer}/{_GAP}" in row for scorer in SCORERS)


def _parts(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Returns the nats of routing, of masks, and of the rest: each guarantee is added first and last, and the mean is
    taken."""
    neither, kept_sets, experts, both = (float(row[f"mismatch/{scorer}/{_GAP}"]) for scorer in SCORERS)
    return ((neither - experts) + (kept_sets - both)) / 2, ((neither - kept_sets) + (experts - both)) / 2, both


def nothing_kept(row: Mapping[str, Any]) -> Decomposition:
    """Returns the gap of a row with a mismatch table, own routing and full vocabulary."""
    names = zip(LABELS.items(), _parts(row), strict=True)
    shares = tuple(Share(cause, label, certain(nats)) for (cause, label), nats in names)
    return Decomposition("nothing kept", certain(float(row[f"mismatch/neither/{_GAP}"])), shares)


def as_trained(row: Mapping[str, Any], settings: RunSettings) -> tuple[Decomposition, ...]:
    """Returns the gap of the same row as it was trained: the parts of guarantees that were not kept, and the rest of
    it; none if the settings are not known."""
    total = row.get(f"mismatch/{_GAP}")
    if total is None or settings.routing is None or settings.masks is None:
        return ()
    routing, masks, _ = _parts(row)
    routing *= settings.routing != "rollout"
    masks *= not settings.masks
    shares = zip(LABELS.items(), (routing, masks, total - routing - masks), strict=True)
    parts = tuple(Share(cause, label, certain(part)) for (cause, label), part in shares if part != 0.0)
    return (Decomposition("as trained", certain(float(total)), parts),)


def _facts(rl: Sequence[Mapping[str, Any]], trained: Sequence[float]) -> list[tuple[str, str]]:
    last = rl[-1]
    facts = [("Steps", f"{len(rl):,}, the last is {last['step']:,}")]
    if "tokens/trained" in last:
        facts.append(("Tokens trained", f"{last['tokens/trained']:,.0f}"))
    if trained:
        facts.append(("Gap as trained, first and last step", f"{brief(trained[0])} → {brief(trained[-1])} nats"))
        recent = trained[-RECENT:]
        facts.append((f"Gap as trained, mean of the last {len(recent)}", f"{brief(sum(recent) / len(recent))} nats"))
    tables = [row["step"] for row in rl if _has_table(row)]
    facts.append(("Mismatch tables", f"{len(tables):,}, the last at step {tables[-1]:,}" if tables else "none"))
    return facts


def _scorers(row: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns metrics by scorer, names without their prefix."""
    found: dict[str, dict[str, float]] = {TRAINED: {}} | {scorer: {} for scorer in SCORERS}
    for name, value in row.items():
        first, *rest = name.split("/")
        if first == "mismatch" and rest:
            scorer = rest[0] if len(rest) == 2 else TRAINED
            found[scorer][rest[-1]] = float(value)
    return {scorer: values for scorer, values in found.items() if values}


def _steps(rows: Sequence[Mapping[str, Any]]) -> list[ReportStep]:
    """Returns a step for each row of reinforcement learning; numbers of evaluations join their step under names of
    their own."""
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["stage"] == "rl":
            values = {name: float(value) for name, value in row.items() if name not in ("stage", "step")}
            own = {name: value for name, value in values.items() if not name.startswith(_LEFT_OUT)}
            steps.setdefault(row["step"], {}).update(own)
        elif row["stage"] == "evaluation":
            found = {EVALUATED[name]: float(row[name]) for name in EVALUATED if name in row}
            steps.setdefault(row["step"], {}).update(found)
    return [ReportStep(step, metrics) for step, metrics in sorted(steps.items())]


def _layers(layers: Sequence[Mapping[str, Any]]) -> tuple[Layer, ...]:
    """Returns means over steps; margins at flips weigh each step by its flips."""
    if not layers:
        return ()
    differing, jaccard, at_flips, elsewhere = (
        np.array([row[name] for row in layers], np.float64)
        for name in ("disagreement", "jaccard", "margin_at_flips", "margin_elsewhere")
    )
    flips = differing.sum(0)
    weighted = (at_flips * differing).sum(0)
    return tuple(
        Layer(
            layer,
            float(differing[:, layer].mean()),
            float(jaccard[:, layer].mean()),
            float(weighted[layer] / flips[layer]) if flips[layer] else None,
            float(elsewhere[:, layer].mean()),
        )
        for layer in range(differing.shape[1])
    )


def _maps(layers: Sequence[Mapping[str, Any]]) -> tuple[LayerMap, ...]:
    if not layers:
        return ()
    columns = tuple(str(row["step"]) for row in layers)
    by_layer = zip(*(row["disagreement"] for row in layers), strict=True)
    each = LayerMap("step", columns, tuple(tuple(map(float, row)) for row in by_layer))
    return (joined_columns(each, MAX_STEPS),)


def _notes(table: Mapping[str, Any] | None, num_steps: int) -> tuple[str, ...]:
    notes = ["The run wrote no mismatch table (mismatch.every), so the gap cannot be split into routing and masks."]
    if table is not None:
        notes = [
            f"Scorers and parts are those of step {table['step']}, the last with a mismatch table; they have no"
            " intervals, because metrics are means.",
            "The gap as trained is measured while updates go on, so with several minibatches it holds their drift.",
        ]
    notes.append("Made from metrics alone: routes of single tokens need the rollouts and a model.")
    if num_steps > MAX_STEPS:
        notes.append(
            f"Of {num_steps:,} steps each metric has at most {MAX_STEPS} here, the smallest and the largest of each"
            " stretch; metrics.jsonl has all."
        )
    return tuple(notes)
