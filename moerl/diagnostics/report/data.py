"""Contents of a routing-mismatch report: `report.json`, whose schema is stable, and the page that is drawn from it.

The page has no other numbers but published ones of others. Torch-free; any process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from moerl.diagnostics.conversations import SpokenSession
from moerl.reading import read_file

SCHEMA = "moerl-report-1"

Confidence = Literal["certain", "likely", "possible"]
Level = Literal["good", "note", "fault"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95% interval (bootstrap over rollouts)."""

    value: float
    """The value itself, in the unit of the field that holds the interval."""
    low: float
    """Lower end; equal to `value` if there is no interval."""
    high: float
    """Upper end; equal to `value` if there is no interval."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a gap."""

    cause: str
    """Key of `moerl.diagnostics.causes.texts.CAUSES`."""
    label: str
    """The cause in a few words."""
    nats: Interval
    """Mean |d| that it adds; negative if it makes the gap smaller."""


@dataclass(frozen=True, slots=True)
class Decomposition:
    """A gap and its parts, which add up to it."""

    name: str
    """Name: "nothing kept" (own routing, full vocabulary), "as recorded" (routes and kept sets enforced as the dump has
    them), "as dumped" (the log-probs of the trainer that the dump brings), or "as trained" (as a step of a run did)."""
    total: Interval
    """Mean |d|, nats."""
    shares: tuple[Share, ...]
    """Parts, in the order in which they are drawn."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One measured fact."""

    what: str
    """Name of the quantity."""
    seen: str
    """The value for people, with its unit."""
    expected: str = ""
    """The sound value for people, with its unit; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause that was found."""

    cause: str
    """Key of `moerl.diagnostics.causes.texts.CAUSES`, or of a check of a run ("drift")."""
    level: Level
    """Weight of the finding; "good" says that something was checked and is in order."""
    confidence: Confidence
    """Sureness of the cause."""
    title: str
    """The fault in one short sentence."""
    remedy: str
    """The change to make, in one short sentence."""
    nats: Interval
    """Mean |d| that the cause makes."""
    share: float
    """`nats` as a part of the whole gap, in [0, 1]."""
    evidence: tuple[Evidence, ...] = ()
    """Measurements behind it."""
    rollouts: tuple[str, ...] = ()
    """Names of the rollouts that have it; empty if all have it, or if it is not about rollouts."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The box on top of a page."""

    level: Level
    """Colour of the box."""
    text: str
    """The faults and how sure they are, in a sentence or a few."""
    advice: str
    """The change to make."""


@dataclass(frozen=True, slots=True)
class Headline:
    """One number at the top of the page of a run."""

    name: str
    """Name of the number."""
    value: str
    """For people, with its unit."""
    notes: tuple[str, ...] = ()
    """Values to compare it with; one short sentence each."""
    level: Level | None = None
    """None if nothing says which values are good."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One response of a run. Long texts are cut in the middle, and say so."""

    why: str
    """Reason of the choice, with the reward ("Highest reward, 1")."""
    prompt: str
    """Text."""
    response: str
    """Text."""
    sessions: tuple[SpokenSession, ...] = ()
    """Conversation of an episode in several turns; empty for a single response."""


@dataclass(frozen=True, slots=True)
class ReportStep:
    """One training step of a run or of a dump."""

    step: int
    """Number of the step."""
    metrics: dict[str, float]
    """By name of `moerl.telemetry.metrics`, without those that are missing."""


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Routing by MoE layer and position, step or turn."""

    name: str
    """Quantity of the columns: "position", "step" or "turn"; of a repaired dump with ", repaired"."""
    columns: tuple[str, ...]
    """Labels, in order."""
    differing: tuple[tuple[float | None, ...], ...]
    """[layers][columns], share of rows whose experts differ; None without rows."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One MoE layer over all rows."""

    layer: int
    """Number among the MoE layers, from 0."""
    differing: float
    """Share of rows whose experts differ."""
    jaccard: float
    """Mean overlap of the two sets of experts."""
    margin_at_flips: float | None = None
    """Mean score gap of the last chosen expert to the next, over rows that differ; None without any."""
    margin_elsewhere: float | None = None
    """The same over rows that do not differ."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Two experts of a layer that replace one another."""

    layer: int
    """Number among the MoE layers, from 0."""
    recorded: int
    """Expert of the record."""
    own: int
    """Expert that the model's own router chose instead."""
    count: int
    """Rows."""
    share: float
    """Share of the layer's rows that differ."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of a quantity in bins."""

    name: str
    """Quantity, with its unit."""
    edges: tuple[float, ...]
    """Ascending; one more than counts."""
    counts: dict[str, tuple[int, ...]]
    """Counts of all bins, by series."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens of one kind."""

    by: str
    """Criterion: "kind" (prompt, response), "turn", "token class", "engine", "age", "prefix age" or "position"; of a
    repaired dump with ", repaired"."""
    name: str
    """Name of the kind."""
    num_tokens: int
    """Sampled tokens; rows of routing if no gap was measured."""
    gap: Interval | None = None
    """Mean |d|, nats; None if not measured."""
    differing: float | None = None
    """Share of rows whose experts differ in some layer; None without routes."""


@dataclass(frozen=True, slots=True)
class StripToken:
    """One token of a strip."""

    text: str
    """Decoded, or its id."""
    sampled: bool
    """False for given tokens, which have no `d`, `logprob`, `kept` and `version`."""
    d: float | None = None
    """Trainer log-prob less rollout log-prob, nats, of the strip's scorer."""
    logprob: float | None = None
    """Rollout log-prob, nats."""
    layers: int | None = None
    """Number of MoE layers whose experts differ in the row that predicts it; None without routes."""
    kept: int | None = None
    """Size of its kept set, 0 for the full vocabulary; None without kept sets."""
    version: int | None = None
    """Policy version that sampled it; None if not said."""


@dataclass(frozen=True, slots=True)
class StripTurn:
    """Beginning of a turn in a strip."""

    at: int
    """First token, from 0."""
    name: str
    """Author, with the number of a turn of the policy."""


@dataclass(frozen=True, slots=True)
class Strip:
    """One trajectory, token by token."""

    name: str
    """Name of the rollout."""
    why: str
    """Reason of the choice ("largest gap", "typical")."""
    tokens: tuple[StripToken, ...]
    """In order; long rollouts are cut."""
    turns: tuple[StripTurn, ...] = ()
    """Turns and texts between them; empty for a single turn."""


@dataclass(frozen=True, slots=True)
class Unread:
    """Rows that could not be used, for one reason."""

    reason: str
    """Short sentence."""
    count: int
    """Rows."""
    example: str
    """The first of them, or the place that lists them."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything on a page."""

    title: str
    """Title of the page."""
    subtitle: str
    """Line below the title."""
    verdict: Verdict
    """Box on top."""
    facts: tuple[tuple[str, str], ...]
    """Names and values, in order (model, dump, tokens, scorer)."""
    decompositions: tuple[Decomposition, ...] = ()
    """Gaps; the first is that with nothing kept, if it is known."""
    findings: tuple[Finding, ...] = ()
    """Causes that were found."""
    scorers: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics by scorer: `moerl.telemetry.metrics.SCORERS`, "trainer" (the log-probs that the dump brings), "repaired",
    "floor", or "trained" (as a step trained); names of metrics without their prefix (`logprob_abs_mean`, `k3`, ...), of
    the run's last table or the whole dump."""
    steps: tuple[ReportStep, ...] = ()
    """In order; of a long run each metric has a part of its values."""
    layers: tuple[Layer, ...] = ()
    """All MoE layers; empty without routes."""
    maps: tuple[LayerMap, ...] = ()
    """Routing by layer and another quantity."""
    swaps: tuple[Swap, ...] = ()
    """Commonest swaps."""
    histograms: tuple[Histogram, ...] = ()
    """Histograms of d and of router margins."""
    slices: tuple[Slice, ...] = ()
    """Gaps and routing by kind of token."""
    strips: tuple[Strip, ...] = ()
    """A few trajectories."""
    unusable: tuple[Unread, ...] = ()
    """Rows left out, by reason."""
    notes: tuple[str, ...] = ()
    """Sentences on limits of the numbers."""
    headlines: tuple[Headline, ...] = ()
    """Numbers on top of the page; of runs alone."""
    samples: tuple[Sample, ...] = ()
    """Responses; of runs alone."""
    samples_from: str = ""
    """Source of the samples, or why there are none; of runs alone."""
    schema: str = SCHEMA
    """Version of this schema."""


def encode_report(report: object) -> bytes:
    """Returns the bytes of `report.json`, or of another report's: indented, every number finite."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def read_report(path: Path) -> Report:
    """Returns the report of a `report.json`.

    Raises:
        msgspec.ValidationError: it is not one. FileNotFoundError: there is none.
    """
    return msgspec.json.decode(read_file(path), type=Report)
