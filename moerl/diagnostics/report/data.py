"""Contents of a routing-mismatch report: `report.json`, whose schema is stable, and the page that is drawn from it.

Every number of the page is one of these. Torch-free; any process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from moerl.reading import read_file

SCHEMA = "moerl-report-1"

Confidence = Literal["certain", "likely", "possible"]
Level = Literal["good", "note", "fault"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95% interval (bootstrap over rollouts); low = high = value where none can be had."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a gap. cause: key of `moerl.diagnostics.causes`, or "precision" or "unexplained". nats: mean |d|."""

    cause: str
    label: str
    nats: Interval


@dataclass(frozen=True, slots=True)
class Decomposition:
    """A gap and its parts, which add up to it.

    name: "nothing kept" (own routing, full vocabulary), "as recorded" (routes and kept sets enforced as the dump has
    them), "as dumped" (the log-probs of the trainer that the dump brings), or "as trained" (as a step of a run did).
    """

    name: str
    total: Interval
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One measured fact. seen, expected: for people, with units."""

    what: str
    seen: str
    expected: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause that was found. nats, share: of the gap that it makes, and that as a part of it in [0, 1].

    title: what is wrong. remedy: what to change. Both one short sentence.
    """

    cause: str
    level: Level
    confidence: Confidence
    title: str
    remedy: str
    nats: Interval
    share: float
    evidence: tuple[Evidence, ...] = ()
    rollouts: tuple[str, ...] = ()
    """Names of those that have it; empty for all, and where it is not of rollouts."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The box on top. text: what is wrong and how sure; advice: what to change. One sentence each."""

    level: Level
    text: str
    advice: str


@dataclass(frozen=True, slots=True)
class Headline:
    """One number at the top of the page of a run. value: with its unit. notes: what it is to be compared with; one
    short sentence each. level: None where nothing says what is good."""

    name: str
    value: str
    notes: tuple[str, ...] = ()
    level: Level | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One response of a run. why: it was chosen ("highest reward"), with its reward. Long texts are cut in the middle,
    which says so."""

    why: str
    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class ReportStep:
    """One training step, or one policy version of a dump. metrics: by name of `moerl.telemetry.metrics`, without
    those that are missing."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Routing by MoE layer and something else. name: "position", "step", "turn". columns: labels.

    differing: [layers][columns], share of rows whose experts differ, None where there are no rows.
    """

    name: str
    columns: tuple[str, ...]
    differing: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """One MoE layer over all rows. margin_*: score gap of the last chosen expert to the next, mean."""

    layer: int
    differing: float
    jaccard: float
    margin_at_flips: float | None = None
    margin_elsewhere: float | None = None


@dataclass(frozen=True, slots=True)
class Swap:
    """recorded, own: experts of a layer that replace one another. count: rows; share: of the layer's flips."""

    layer: int
    recorded: int
    own: int
    count: int
    share: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """name: of what, with its unit. edges: one more than counts. counts: by series."""

    name: str
    edges: tuple[float, ...]
    counts: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens of one kind. by: "kind" (prompt, response), "turn", "token class", "engine", "age", "prefix age",
    "position". differing: share of rows whose experts differ in some layer, None without routes."""

    by: str
    name: str
    num_tokens: int
    gap: Interval | None = None
    differing: float | None = None


@dataclass(frozen=True, slots=True)
class StripToken:
    """One token of a strip. text: decoded, or its id. sampled: d, logprob, kept and version are set only there.

    d: trainer log-prob less rollout log-prob, nats, of the strip's scorer. layers: MoE layers whose experts differ in
    the row that predicts it, None without routes. kept: size of its kept set, 0 for the full vocabulary.
    """

    text: str
    sampled: bool
    d: float | None = None
    logprob: float | None = None
    layers: int | None = None
    kept: int | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Strip:
    """One trajectory, token by token. why: it was chosen ("largest gap", "typical")."""

    name: str
    why: str
    tokens: tuple[StripToken, ...]


@dataclass(frozen=True, slots=True)
class Unread:
    """Rows that could not be used."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything. title, subtitle: of the page. facts: name and value, in order (model, dump, tokens, scorer).

    scorers: metrics by scorer: `moerl.telemetry.metrics.SCORERS`, "trainer" (the log-probs that the dump brings),
    "repaired", "floor", or "trained" (as a step trained); names of metrics without their prefix (`logprob_abs_mean`,
    `k3`, ...), for the run's last table or the whole dump.
    headlines, samples: of runs alone. samples_from: what the samples are, or why there are none.
    """

    title: str
    subtitle: str
    verdict: Verdict
    facts: tuple[tuple[str, str], ...]
    decompositions: tuple[Decomposition, ...] = ()
    findings: tuple[Finding, ...] = ()
    scorers: dict[str, dict[str, float]] = field(default_factory=dict)
    steps: tuple[ReportStep, ...] = ()
    layers: tuple[Layer, ...] = ()
    maps: tuple[LayerMap, ...] = ()
    swaps: tuple[Swap, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    slices: tuple[Slice, ...] = ()
    strips: tuple[Strip, ...] = ()
    unusable: tuple[Unread, ...] = ()
    notes: tuple[str, ...] = ()
    headlines: tuple[Headline, ...] = ()
    samples: tuple[Sample, ...] = ()
    samples_from: str = ""
    schema: str = SCHEMA


def encode_report(report: Report) -> bytes:
    """`report.json`: indented, every number finite."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def read_report(path: Path) -> Report:
    """The report of a `report.json`.

    Raises:
        msgspec.ValidationError: it is not one. FileNotFoundError: there is none.
    """
    return msgspec.json.decode(read_file(path), type=Report)
