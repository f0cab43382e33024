"""Findings about the mismatch of a run, the verdict from them, and headlines, from its numbers. Pure; torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moerl.diagnostics.report.data import Decomposition, Evidence, Finding, Headline, Interval, Level, Verdict
from moerl.diagnostics.report.words import brief, number, percent

Row = Mapping[str, float]

GAP_NOTE, GAP_FAULT = 0.02, 0.1
"""Mean |d| as trained, nats, from which it is noted, and from which it is a fault. A bfloat16 sampler and a float32
trainer of the same routes are at 0.001 to 0.02."""
FAR_SHARE = 0.1
"""F(2): share of tokens more than a factor of two apart, from which it is a fault."""
PART_FAULT = 0.1
"""Share of the gap that a guarantee would remove, from which leaving it off is a fault."""
RISE_NOTE, RISE_FAULT, MIN_RANK_CORRELATION, MIN_STEPS = 1.5, 2.0, 0.5, 10
"""Gap of the last fifth of the steps over that of the first; rank correlation of gap and step; steps needed."""
RECENT = 5
"""Steps whose mean is the value of "now"."""
ACCURACIES = (("heldout/accuracy", "held-out problems"), ("accuracy/mean", "dev problems"))
"""Metrics of evaluations, the most telling first, and the names of their problems."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a run; None if they are not known."""

    routing: str | None = None
    """`keep_routing.mode`."""
    masks: bool | None = None
    """`keep_sampling_mask.enabled`."""
    precision: str | None = None
    """The coarser dtype of sampler and trainer."""
    max_age: int | None = None
    """The bound on the age of a token, versions."""
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Records by reason."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Sources of findings."""

    rows: Sequence[Row]
    """Rows of the stage rl, by step."""
    settings: RunSettings
    """Settings of the run."""
    gap: Decomposition | None
    """Decomposition with nothing kept; None without a mismatch table."""
    trained: Sequence[float]
    """Mean |d| as trained, nats, of the steps that measured it."""
    trained_at_table: float | None = None
    """Mean |d| as trained of the table's step, nats; None without a table or a value."""

    def values(self, metric: str) -> list[float]:
        """Returns the values of all steps that have this metric."""
        return [row[metric] for row in self.rows if metric in row]

    def part(self, cause: str) -> float:
        """Returns the nats of a part of the gap with nothing kept; 0 without a table."""
        shares = self.gap.shares if self.gap else ()
        return next((share.nats.value for share in shares if share.cause == cause), 0.0)

    @property
    def total(self) -> float:
        """The gap with nothing kept, nats; as trained if there is no table."""
        return self.gap.total.value if self.gap else self.now

    @property
    def now(self) -> float:
        """The gap as trained, nats, mean of the latest steps."""
        return float(np.mean(self.trained[-RECENT:])) if self.trained else 0.0


def certain(value: float) -> Interval:
    """Returns a value without an interval."""
    return Interval(value, value, value)


def _finding(
    cause: str,
    level: Level,
    texts: tuple[str, str],
    evidence: Sequence[Evidence],
    *,
    nats: float = 0.0,
    total: float = 0.0,
) -> Finding:
    title, remedy = texts
    share = nats / total if total > 0.0 else 0.0
    return Finding(cause, level, "certain", title, remedy, certain(nats), share, tuple(evidence))


def _left_off(seen: Seen, cause: str, texts: tuple[str, str], evidence: Sequence[Evidence]) -> Finding:
    """Returns the finding on a guarantee that was not kept: a fault if it would remove a clear part of the gap."""
    part = seen.part(cause)
    is_fault = seen.total > 0.0 and part / seen.total >= PART_FAULT and part >= GAP_NOTE / 10
    return _finding(cause, "fault" if is_fault else "note", texts, evidence, nats=max(0.0, part), total=seen.total)


def routing(seen: Seen) -> Finding | None:
    """Tells whether the recorded experts were enforced, and proved."""
    verified, unproved = sum(seen.values("replay/rows_verified")), sum(seen.values("replay/updates_unproved"))
    if not seen.values("replay/rows_verified"):
        return None
    mode = seen.settings.routing or ("rollout" if verified or unproved else "off")
    part = seen.part("routing")
    evidence = [Evidence("rows proved (times layers and phases)", f"{verified:,.0f}", "above 0")]
    evidence += [Evidence("updates without a proof", f"{unproved:,.0f}", "0")]
    if seen.gap:
        seen_part = f"{number(part)} nats, {percent(max(0.0, part / seen.total)) if seen.total else '0%'}"
        evidence.append(Evidence("what routing makes of the gap with nothing kept", seen_part))
    if tokens := seen.values("mismatch/tokens_with_different_experts"):
        what = "tokens whose experts the trainer would not have chosen, at last"
        evidence.append(Evidence(what, percent(tokens[-1])))
    if mode == "rollout":
        if unproved:
            texts = ("Some updates were not proved to use the recorded experts", "Set keep_routing.verify=every.")
            return _finding("routing", "note", texts, evidence)
        texts = ("The recorded experts were enforced, and proved before every update", "Nothing to change here.")
        return _finding("routing", "good", texts, evidence)
    what = "its own experts of the first pass" if mode == "trainer" else "experts of its own in each pass"
    texts = (f"The trainer used {what}, not those of the sampler", "Set keep_routing.mode=rollout.")
    return _left_off(seen, "routing", texts, evidence)


def masks(seen: Seen) -> Finding | None:
    """Tells whether tokens were scored inside of the sets that they were drawn from."""
    sizes = seen.values("kept/size_mean")
    if not sizes:
        return None
    evidence = [Evidence("mean size of a kept set, at last", f"{number(sizes[-1])} ids")]
    if seen.gap:
        evidence.append(Evidence("what masks make of the gap with nothing kept", f"{number(seen.part('masks'))} nats"))
    if seen.settings.masks is not False:
        texts = ("Tokens were scored inside of the sets that they were drawn from", "Nothing to change here.")
        return _finding("masks", "good", texts, evidence)
    texts = (
        "Tokens were drawn from kept sets, and scored over the full vocabulary",
        "Set keep_sampling_mask.enabled=true, or sample without top-p, top-k and min-p.",
    )
    return _left_off(seen, "masks", texts, evidence)


def coverage(seen: Seen) -> Finding | None:
    """Tells of rows whose experts no engine reported."""
    live = seen.values("routing/live_rows")
    if not sum(live):
        return None
    evidence = [
        Evidence("rows without captured routing, times layers", f"{sum(live):,.0f}", "0"),
        Evidence("steps with such rows", f"{sum(each > 0 for each in live):,} of {len(live):,}"),
    ]
    texts = (
        "Some rows had no captured routing, and the trainer's router chose",
        "Let the engine report experts of every row, or set keep_routing.mode=trainer, which covers all rows.",
    )
    return _finding("coverage", "note", texts, evidence)


def far_tokens(seen: Seen) -> Finding | None:
    """Tells of an F(2) above a tenth."""
    shares = seen.values("mismatch/share_above_ln2")
    now = float(np.mean(shares[-RECENT:])) if shares else 0.0
    if now <= FAR_SHARE:
        return None
    what = f"F(2), mean of the last {len(shares[-RECENT:])} steps"
    evidence = [Evidence(what, percent(now), f"at most {percent(FAR_SHARE)}")]
    texts = (
        "More than a tenth of the tokens are apart by more than a factor of two",
        "Run `moerl verify` on a dump of rollouts, and see which implementation differs.",
    )
    return _finding("far tokens", "fault", texts, evidence, nats=seen.now, total=seen.now)


def remaining(seen: Seen) -> Finding | None:
    """Tells of a large gap while the run trains."""
    now = seen.now
    if now < GAP_NOTE:
        return None
    level = "fault" if now >= GAP_FAULT else "note"
    evidence = [Evidence("mean |d| as trained, latest steps", f"{number(now)} nats", f"below {GAP_NOTE} nats")]
    if seen.gap:
        evidence.append(Evidence("with both guarantees, last table", f"{number(seen.part('unexplained'))} nats"))
    advice = "Run `moerl verify` on a dump of rollouts: it says whether the engine or the trainer differs."
    oldest = max(seen.values("staleness/age_max"), default=0.0)
    if oldest:
        evidence.append(Evidence("oldest token that was trained", f"{oldest:.0f} versions", "0, for a gap without age"))
        advice = (
            "Run `moerl diagnose` on a dump of rollouts, with two versions of the model: it says what age makes of it."
        )
    texts = ("Sampler and trainer are far apart as the run trains", advice)
    found = _finding("gap", level, texts, evidence, nats=now, total=max(seen.total, now))
    return replace(found, confidence="likely" if level == "fault" else "possible")


def rising(seen: Seen) -> Finding | None:
    """Tells of a gap as trained that grows with the steps."""
    values = np.asarray(seen.trained, np.float64)
    if len(values) < MIN_STEPS:
        return None
    fifth = max(2, len(values) // 5)
    first, last = float(values[:fifth].mean()), float(values[-fifth:].mean())
    ranks = np.argsort(np.argsort(values)).astype(np.float64)
    correlation = float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])
    if first <= 0.0 or last < RISE_NOTE * first or correlation < MIN_RANK_CORRELATION or last < GAP_NOTE / 20:
        return None
    evidence = [
        Evidence(f"mean |d|, first {fifth} steps and last {fifth}", f"{number(first)}, then {number(last)} nats"),
        Evidence("rank correlation with the step", f"{correlation:.2f}", f"below {MIN_RANK_CORRELATION}"),
    ]
    for metric in ("policy/entropy", "mismatch/tokens_with_different_experts", "mismatch/both/logprob_abs_mean"):
        if len(meanwhile := seen.values(metric)) > 1:
            evidence.append(Evidence(metric, f"{number(meanwhile[0])}, then {number(meanwhile[-1])}"))
    level: Level = "fault" if last >= RISE_FAULT * first and last >= GAP_NOTE else "note"
    texts = (
        f"The gap grows while the run trains, by a factor of {last / first:.1f}",
        "See over steps which scorer grows with it: if `both` does, look at weights and precision, not at routing.",
    )
    found = _finding("drift", level, texts, evidence, nats=max(0.0, last - first), total=last)
    return replace(found, confidence="likely")


def quarantine(seen: Seen) -> Finding | None:
    """Tells of records that broke the data contract."""
    counts = seen.values("quarantine/count")
    if not counts or not counts[-1]:
        return None
    evidence = [Evidence("trajectories in quarantine", f"{counts[-1]:,.0f}", "0")]
    evidence += [Evidence(reason, f"{count:,}") for reason, count in sorted(seen.settings.quarantined.items())]
    texts = (
        "Some rollouts broke the data contract, and were not trained on",
        "Read the reasons in RUN_DIR/quarantine.",
    )
    return _finding("quarantine", "note", texts, evidence)


def _versions(count: float) -> str:
    return f"{count:.0f} version" if count == 1.0 else f"{count:.0f} versions"


def age(seen: Seen) -> Finding | None:
    """Tells of tokens that older weights sampled."""
    largest, mean = seen.values("staleness/age_max"), seen.values("staleness/age_mean")
    if not largest or not max(largest):
        return None
    evidence = [Evidence("oldest token that was trained", _versions(max(largest)))]
    if mean:
        evidence.append(Evidence("mean over trajectories, of all steps", f"{number(float(np.mean(mean)))} versions"))
    bound = seen.settings.max_age
    if bound is not None and max(largest) > bound:
        evidence.append(Evidence("bound that the configuration sets", _versions(bound)))
        texts = (
            "Some tokens were sampled by older weights than the configuration allows",
            "Report it, with the run directory: buffer.max_staleness and buffer.window bound the age of every token.",
        )
        return _finding("age", "note", texts, evidence)
    texts = (
        f"Tokens are up to {_versions(max(largest))} old, which the configuration allows",
        "Nothing to change here: ages are part of the gap as trained, and buffer.max_staleness=0 would leave none.",
    )
    return _finding("age", "good", texts, evidence)


def findings_of(seen: Seen) -> tuple[Finding, ...]:
    """Returns all findings, faults first."""
    checks = (routing, masks, far_tokens, rising, remaining, coverage, quarantine, age)
    found = [finding for check in checks if (finding := check(seen)) is not None]
    order = ("fault", "note", "good")
    return tuple(sorted(found, key=lambda each: (order.index(each.level), -each.nats.value)))


def verdict_of(findings: Sequence[Finding], seen: Seen) -> Verdict:
    """Returns the box on top, from findings in the order of `findings_of`."""
    size = f"log-probs differ by {brief(seen.now)} nats on average as trained (healthy: below {GAP_NOTE:g} nats)"
    first = findings[0] if findings else None
    if first is not None and first.level != "good":
        return Verdict(first.level, f"{first.title} ({first.confidence}); {size}.", first.remedy)
    proved = any(each.cause == "routing" for each in findings)
    replay = "; the recorded experts were proved before every update" if proved else ""
    kept = f", instead of {brief(seen.total)} with nothing kept" if seen.gap else ""
    more = "" if seen.gap else " Set mismatch.every=1 to see what each guarantee is worth."
    return Verdict("good", f"Sampler and trainer agree: {size}{kept}{replay}.", f"Nothing.{more}")


def headlines(rows: Sequence[Mapping[str, Any]], seen: Seen) -> tuple[Headline, ...]:
    """Returns reward, accuracy, and the mismatch gap with values to compare it with, without those that the run did not
    measure.

    Args:
        rows: of `metrics.jsonl`, all stages. seen: of the stage rl.
    """
    found = (_reward(seen), _accuracy(rows), _gap(seen))
    return tuple(headline for headline in found if headline is not None)


def _reward(seen: Seen) -> Headline | None:
    values = seen.values("reward/mean")
    if not values:
        return None
    many = min(RECENT, len(values))
    first, last = sum(values[:many]) / many, sum(values[-many:]) / many
    return Headline("Reward", f"{last:.3f}", (f"mean of the last {many} steps; {first:.3f} in the first {many}",))


def _accuracy(rows: Sequence[Mapping[str, Any]]) -> Headline | None:
    evaluations = [row for row in rows if row["stage"] == "evaluation"]
    for metric, where in ACCURACIES:
        found = [(row["step"], row[metric]) for row in evaluations if metric in row]
        if found:
            (first_step, first), (last_step, last) = found[0], found[-1]
            before = f"; {first:.3f} after step {first_step}" if len(found) > 1 else ""
            return Headline("Accuracy", f"{last:.3f}", (f"greedy, {where}, after step {last_step}{before}",))
    return None


def _gap(seen: Seen) -> Headline | None:
    if not seen.trained:
        return None
    level: Level = "fault" if seen.now >= GAP_FAULT else "note" if seen.now >= GAP_NOTE else "good"
    rounding = f"16-bit rounding makes 0.001 to {GAP_NOTE:g} nats"
    if seen.settings.precision == "float32":
        rounding = "float32 rounding of the same weights makes about 1e-07 nats"
    notes = [f"mean |log-prob difference| of trainer and sampler; healthy below {GAP_NOTE:g} nats", rounding]
    floor = seen.part("unexplained")
    if seen.gap and seen.settings.routing != "off" and seen.settings.masks:
        # With both kept, the gap is its own floor: "1.0 times its floor" would say nothing.
        notes.insert(1, f"with nothing kept it would be {brief(seen.total)} nats")
    elif floor > 0.0 and seen.trained_at_table is not None:
        times = seen.trained_at_table / floor
        notes.insert(1, f"{times:.1f} times its floor: {brief(floor)} nats remain with routing and masks kept")
    return Headline("Mismatch gap", f"{brief(seen.now)} nats", tuple(notes), level)
