"""`moerl diagnose`: dumps of any known system, scored again, and the causes of differing log-probs, as a report.

Runs in one process, but for chat templates. The causes are searched in a sample of the rollouts, spread evenly over the
dumps; without a model all rollouts are compared that have log-probs of both policies.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.files import writing
from moerl.diagnostics.causes.diagnosis import Diagnosis, diagnose
from moerl.diagnostics.causes.texts import OPEN
from moerl.diagnostics.checkpoints import HuggingFaceCheckpoint, split_version
from moerl.diagnostics.dump_report import DumpFacts, report_of_diagnosis, report_of_policies
from moerl.diagnostics.dumps.join import TRAINER_ELSEWHERE
from moerl.diagnostics.dumps.rollout import Dump, DumpedRollout, Unusable
from moerl.diagnostics.report.data import Report
from moerl.diagnostics.report.page import write_report
from moerl.diagnostics.rollout_table import write_rollout_table
from moerl.diagnostics.tallies import Tallies
from moerl.diagnostics.trainer_side import FACT, sampled_gaps
from moerl.errors import ConfigError
from moerl.machine.model_tensors import check_weights
from moerl.models.description import CONFIG_FILE, ModelDescription, read_model
from moerl.offline.torch_dumps import open_any_dumps
from moerl.orchestration.prompt_edits import prompt_edits
from moerl.printable import printable
from moerl.telemetry.progress import ProgressDisplay, make_progress

UNEXPLAINED = 3
"""Exit status if a gap is not explained; 2 is that of a wrong command line, or files that are wrong or unreadable."""
_ELSEWHERE = "make room or mend what is named, or name another page with --output, and diagnose again"
"""Remedy if the page, or a file next to it, cannot be written."""
_BACKENDS = {"hf": "transformers", "trainer": "the Megatron trainer"}


def run_diagnose(options: argparse.Namespace) -> int:
    """Writes the report, `options.output`, its JSON next to it, and a table of rollouts if there is a model; prints the
    verdict.

    Args:
        options: options of `moerl.launch.diagnose`, checked.

    Returns:
        Exit status: 0 if all is in order, 1 if a fault was found, `UNEXPLAINED` if no fault was found and not all of
        the gap is rounding.

    Raises:
        ConfigError: there is no dump or no model, or nothing in the dumps can be used.
        ContractError: a dump of ours is damaged. EngineError, ReplayError: the model cannot be scored with.
    """
    with make_progress() as progress:
        report, output = _write(options, progress)
        progress.end()
    _print(report, output)
    if report.verdict.level == "fault":
        return 1
    return UNEXPLAINED if any(finding.cause in OPEN for finding in report.findings) else 0


def _write(options: argparse.Namespace, progress: ProgressDisplay) -> tuple[Report, Path]:
    """Writes the page and the files next to it; returns the report and the path of the page."""
    progress.begin_part("reading, rollouts")
    models = [_described(HuggingFaceCheckpoint(*split_version(named))) for named in options.model]
    opened = open_any_dumps(
        options.dumps,
        moe_layers=models[0][1].moe_layers if models else None,
        experts_per_token=models[0][1].spec.experts_per_token if models else None,
        notify=progress.note,
    )
    output, found = options.output.resolve(), None
    if models:
        report, found = _by_model(opened, models, options, progress)
    else:
        report = _by_policies(opened, options, progress)
    with writing(output, _ELSEWHERE):  # makes the folder
        write_report(report, output)
    if found is not None:
        with writing(output.with_suffix(".parquet"), _ELSEWHERE):
            write_rollout_table(found, output.with_suffix(".parquet"))
    return report, output


def _described(checkpoint: HuggingFaceCheckpoint) -> tuple[HuggingFaceCheckpoint, ModelDescription]:
    if not (checkpoint.folder / CONFIG_FILE).is_file():
        raise ConfigError(
            "--model: no Hugging Face model", seen=checkpoint.folder, expected="a directory with a config.json"
        )
    check_weights(checkpoint.folder)
    return checkpoint, read_model(checkpoint.folder)


# --- with a model ----------------------------------------------------------------------------------------------------


def _by_model(
    dumps: Sequence[Dump],
    models: Sequence[tuple[HuggingFaceCheckpoint, ModelDescription]],
    options: argparse.Namespace,
    progress: ProgressDisplay,
) -> tuple[Report, Diagnosis]:
    # Torch loads only if there is a model: a dump with both policies needs none.
    from moerl.offline.dump_scorers import Models
    from moerl.ranks.libraries import quiet_libraries
    from moerl.rollout.tokenizers import find_tokenizer
    from moerl.trainer.model import DTYPES

    quiet_libraries()
    model, unusable = models[0][1], Unusable()
    positions = int(model.hf_config.get("max_position_embeddings") or 1 << 30)
    fits = _fitting(_all(dumps), model.spec.vocab_size, positions, unusable)
    sample, total = _spread(fits, options.rollouts, options.tokens)
    sample = [_drawn_so(rollout, options.temperature, options.top_p) for rollout in sample]
    _require_some(sample, dumps, unusable)
    # Checkpoints whose version no rollout names come behind the others: rounding is measured on the first one.
    named = {None, *(int(rollout.policy_versions.max()) for rollout in sample)}
    models = sorted(models, key=lambda each: each[0].version not in named)
    name = options.dtype or str(model.hf_config.get("dtype") or model.hf_config.get("torch_dtype") or "float32")
    if name not in DTYPES:
        raise ConfigError("--dtype: of the scorer", seen=name, expected=f"one of {', '.join(DTYPES)}")
    tokenizer = find_tokenizer(models[0][0].folder)
    progress.note(f"{len(sample)} of {total} rollouts, {sum(map(len, sample)):,} tokens, {name}")
    loaded = Models(models, options.backend, name, max(map(len, sample)), progress)
    progress.begin_part("causes")
    with loaded.scorers() as scorers:
        found = diagnose(sample, scorers, loaded.finer(), prompt_edits(tokenizer), half=loaded.half())
    progress.begin_part("writing the report")
    facts = _facts(dumps, options.dumps, unusable, len(sample), total)
    said = [each.folder.name + ("" if each.version is None else f" (version {each.version})") for each, _ in models]
    texts, classes = _texts(tokenizer, model.spec.vocab_size)
    facts = replace(
        facts,
        facts=(*facts.facts, ("model", ", ".join(said)), ("scored by", f"{_BACKENDS[options.backend]}, {name}")),
        texts=texts,
        classes=classes,
    )
    return report_of_diagnosis(found, facts), found


def _drawn_so(rollout: DumpedRollout, temperature: float | None, top_p: float | None) -> DumpedRollout:
    """Returns the rollout with the command line's temperature and top-p in place of the dump's, if they are given."""
    changes: dict[str, Any] = {}
    if temperature is not None:
        changes["temperatures"] = np.where(rollout.sampled, temperature, 1.0).astype(np.float32)
        changes["says_temperature"] = True
    if top_p is not None:
        changes["top_ps"] = np.where(rollout.sampled, top_p, 1.0).astype(np.float32)
    return replace(rollout, **changes) if changes else rollout


def _all(dumps: Sequence[Dump]) -> Iterator[DumpedRollout]:
    """Yields the rollouts of all dumps; a number is added to a name that came before."""
    seen: dict[str, int] = {}
    for dump in dumps:
        for rollout in dump.rollouts:
            count = seen[rollout.name] = seen.get(rollout.name, 0) + 1
            yield rollout if count == 1 else replace(rollout, name=f"{rollout.name} ({count})")


def _fitting(
    rollouts: Iterator[DumpedRollout], vocab_size: int, positions: int, unusable: Unusable
) -> Iterator[DumpedRollout]:
    """Yields the rollouts that the model can take."""
    for rollout in rollouts:
        if len(rollout) - 1 > positions:
            unusable.add("longer than the model's positions", f"{rollout.name}: {len(rollout)} tokens of {positions}")
        elif int(rollout.token_ids.max()) >= vocab_size:
            largest = int(rollout.token_ids.max())
            unusable.add("tokens beyond the model's vocabulary", f"{rollout.name}: token {largest} of {vocab_size}")
        else:
            yield rollout


def _spread(rollouts: Iterator[DumpedRollout], count: int, num_tokens: int) -> tuple[list[DumpedRollout], int]:
    """Draws at most `count` rollouts, and `num_tokens` tokens, each as likely as any other (reservoir sampling, one
    seed), in their order; returns them, and how many there were."""
    rng, kept, total = np.random.default_rng(0), list[tuple[int, DumpedRollout]](), 0
    for total, rollout in enumerate(rollouts, 1):
        if len(kept) < count:
            kept.append((total, rollout))
        elif (place := int(rng.integers(total))) < count:
            kept[place] = total, rollout
    order = rng.permutation(len(kept))
    within = np.cumsum([len(kept[i][1]) for i in order]) <= num_tokens
    within[:1] = True
    chosen = sorted(kept[i][0] for i in order[within])
    by_number = dict(kept)
    return [by_number[number] for number in chosen], total


def _require_some(sample: Sequence[DumpedRollout], dumps: Sequence[Dump], unusable: Unusable) -> None:
    if sample:
        return
    reasons = [reason for each in (*(dump.unusable for dump in dumps), unusable) for reason in each.counts]
    raise ConfigError(
        "DUMP: no rollout that can be used",
        seen="; ".join(reasons) or "an empty dump",
        expected="at least one rollout with log-probs",
        remedy="docs/dump_formats.md says what a dump must hold",
    )


# --- without one -----------------------------------------------------------------------------------------------------


def _by_policies(dumps: Sequence[Dump], options: argparse.Namespace, progress: ProgressDisplay) -> Report:
    tallies: Tallies | None = None
    unusable, sample, total, num_tokens = Unusable(), list[DumpedRollout](), 0, 0
    differing: dict[str, NDArray[np.int64]] = {}
    for rollout in _all(dumps):
        if not rollout.trainer_logprobs:
            unusable.add("no log-probs of the trainer, and no model to score with", rollout.name)
            continue
        tallies = tallies or Tallies(0, 1, 1)
        if rollout.trainer_expert_ids is not None and rollout.expert_ids is not None:
            if not tallies.num_rows:
                tallies.size(*_sizes(rollout.trainer_expert_ids, rollout.expert_ids))
            if not (tallies.holds(rollout.trainer_expert_ids) and tallies.holds(rollout.expert_ids)):
                unusable.add("routes of other sizes than those of the first rollout that has them", rollout.name)
                continue
        layers = tallies.add(rollout, rollout.trainer_expert_ids, sampled_gaps(rollout))
        total += 1
        num_tokens += len(rollout)
        progress.within(total, 0, num_tokens)
        if len(sample) < options.rollouts:
            sample.append(replace(rollout, expert_ids=None, routed=None, trainer_expert_ids=None))
            if layers is not None:
                differing[rollout.name] = layers
    if tallies is None:
        if not unusable.counts:
            _require_some([], dumps, unusable)
        elsewhere = dict.fromkeys(note for dump in dumps for note in dump.notes if note in TRAINER_ELSEWHERE)
        raise ConfigError(
            "--model: the dump has no log-probs of the trainer",
            seen="; ".join(unusable.counts),
            expected="a model to score with",
            remedy="; or ".join(["name the Hugging Face directory of the policy with --model", *elsewhere]),
        )
    return report_of_policies(sample, tallies, _facts(dumps, options.dumps, unusable, total, total), differing)


def _sizes(ids: NDArray[np.integer], others: NDArray[np.integer]) -> tuple[int, int, int]:
    """Returns layers, experts and experts per token of routes [S - 1, L, K]. A dump does not say how many experts there
    are: as many as the ids need, rounded up to a power of two, 256 at least."""
    largest = max(int(ids.max(initial=0)), int(others.max(initial=0)))
    return ids.shape[1], max(256, 1 << largest.bit_length()), ids.shape[2]


# --- facts -----------------------------------------------------------------------------------------------------------


def _facts(dumps: Sequence[Dump], paths: Sequence[Path], unusable: Unusable, used: int, total: int) -> DumpFacts:
    for dump in dumps:
        unusable.counts.update(dump.unusable.counts)
        unusable.examples |= dump.unusable.examples
    formats = ", ".join(dict.fromkeys(dump.format for dump in dumps))
    names = ", ".join(printable(path.name) for path in paths)
    rows = ("rollouts", f"{used:,} scored of {total:,} usable; {sum(unusable.counts.values()):,} unusable")
    notes = tuple(dict.fromkeys(note for dump in dumps for note in dump.notes))
    return DumpFacts(names, (("dump", names), ("format", formats), rows), notes, unusable)


def _texts(tokenizer: Any, vocab_size: int) -> tuple[list[str], list[str]]:
    """Returns the text of every token, and the class of each; none without a tokenizer."""
    if tokenizer is None:
        return [], []
    texts = [tokenizer.decode([token]) for token in range(min(vocab_size, len(tokenizer)))]
    special = set(tokenizer.all_special_ids)
    return texts, [_class_of(text, token in special) for token, text in enumerate(texts)]


def _class_of(text: str, is_special: bool) -> str:
    stripped = text.strip()
    if is_special:
        return "special"
    if not stripped:
        return "space"
    if stripped.isdigit():
        return "digits"
    if stripped.isalpha():
        return "letters"
    return "punctuation" if not any(map(str.isalnum, stripped)) else "mixed"


def _print(report: Report, output: Path) -> None:
    print(report.verdict.text)
    print(report.verdict.advice)
    for decomposition in report.decompositions:
        parts = ", ".join(
            f"{share.label} {share.nats.value:.1e}" for share in decomposition.shares if abs(share.nats.value) > 0
        )
        print(f"gap {decomposition.name}: {decomposition.total.value:.1e} nats" + (f" = {parts}" if parts else ""))
    for name, value in report.facts:
        if name == FACT:
            print(f"{name}: {value}")
    if report.unusable:
        print("unusable rows: " + "; ".join(f"{each.count} {each.reason}" for each in report.unusable))
    print(f"report: {output}")
