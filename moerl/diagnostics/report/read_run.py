"""Reports of run directories, and stored reports. Reads files alone; torch-free."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from moerl.buffer.ledger import LEDGER_FILE
from moerl.diagnostics.conversations import ShownLimits, conversation_of, episodes_of, is_conversation
from moerl.diagnostics.report.data import SCHEMA, Report, Sample, read_report
from moerl.diagnostics.report.of_run import report_of_run
from moerl.diagnostics.report.run_findings import RunSettings
from moerl.diagnostics.responses import REWARD, read_responses, response_files
from moerl.diagnostics.summary import SUMMARY_FILE
from moerl.errors import MoerlError
from moerl.reading import read_json, read_text
from moerl.telemetry.sinks import LAYERS_FILE, METRICS_FILE, read_rows
from moerl.telemetry.terminal import excerpt, excerpt_lines

_CONFIG_FILE = "config.yaml"
_KEYS = {
    "Recipe": "recipe",
    "Seed": "seed",
    "Model": "model.path",
    "Model on the hub": "model.hub",
    "Its commit": "model.commit",
    "Algorithm": "algorithm.name",
    "Sampler": "rollout.engine",
    "Sampler's precision": "rollout.dtype",
    "Routing kept": "keep_routing.mode",
    "Sampling masks kept": "keep_sampling_mask.enabled",
    "Largest staleness": "buffer.max_staleness",
}
"""Facts of a page and the keys that they are read from; those without a value are left out."""
_MAX_ROWS = 10_000
"""Responses that samples are chosen from."""
_PROMPT, _RESPONSE = 240, 480
"""Characters of a sample that are shown."""
_LIMITS = ShownLimits(sessions=6, turns=16, characters=_RESPONSE)


def report_of_directory(run_dir: Path) -> Report | None:
    """Returns the report of a run; None if no step of reinforcement learning is done.

    Raises:
        MoerlError: its files cannot be read.
    """
    with _reading(run_dir):
        path = run_dir / _CONFIG_FILE
        loaded = yaml.safe_load(read_text(path)) if path.exists() else None
        config: Mapping[str, Any] = loaded if isinstance(loaded, dict) else {}
        found = ((name, _value(config, key)) for name, key in _KEYS.items())
        facts = [(name, _said(value)) for name, value in found if value is not None]
        report = report_of_run(
            _rows(run_dir / METRICS_FILE),
            _rows(run_dir / LAYERS_FILE),
            (f"Run {run_dir.name}", str(run_dir)),
            _settings(config, run_dir / LEDGER_FILE),
            facts,
        )
        samples, samples_from = _samples(run_dir)
        return report and replace(report, samples=samples, samples_from=samples_from)


def numbers_of_directory(run_dir: Path) -> tuple[list[dict[str, Any]], float | None]:
    """Returns the rows of reinforcement learning of a run, and its final accuracy on held-out problems, None before the
    end.

    Raises:
        MoerlError: its files cannot be read.
    """
    with _reading(run_dir):
        summary = run_dir / SUMMARY_FILE
        accuracy = read_json(summary)["heldout_accuracy_final"] if summary.exists() else None
        return [row for row in _rows(run_dir / METRICS_FILE) if row["stage"] == "rl"], accuracy


@contextmanager
def _reading(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise MoerlError(
            f"report: the files of {run_dir} cannot be read",
            seen=f"{type(error).__name__}: {error}",
            expected="what a run wrote",
            remedy="restore the file from a copy; reports need metrics.jsonl, and use layers.jsonl and config.yaml",
        ) from error


def stored_report(path: Path) -> Report:
    """Returns the report of a `report.json`.

    Raises:
        MoerlError: it is none, or one of another build.
    """
    try:
        report = read_report(path)
    except (OSError, ValueError, RecursionError) as error:
        raise MoerlError(
            f"report: {path} cannot be read",
            seen=f"{type(error).__name__}: {error}",
            expected=f"a report.json ({SCHEMA})",
            remedy="write it again: moerl report RUN_DIR",
        ) from error
    if report.schema != SCHEMA:
        raise MoerlError(
            f"report: {path} is of another build",
            seen=report.schema,
            expected=SCHEMA,
            remedy="write it again: moerl report RUN_DIR",
        )
    return report


def _rows(path: Path) -> list[dict[str, Any]]:
    return read_rows(path) if path.exists() else []


def _settings(config: Mapping[str, Any], ledger: Path) -> RunSettings:
    routing = _value(config, "keep_routing.mode")
    dtypes = [_value(config, key) for key in ("rollout.dtype", "model.dtype")]
    coarser = next((dtype for dtype in dtypes if dtype != "float32"), "float32")
    quarantined = read_json(ledger)["quarantined"] if ledger.exists() else {}
    # What bounds the age of a token: docs/async.md.
    bounds = [_value(config, key) for key in ("buffer.max_staleness", "buffer.window", "rl.prompts_per_step")]
    return RunSettings(
        # YAML reads a bare off as False.
        routing="off" if routing is False else routing,
        masks=_value(config, "keep_sampling_mask.enabled"),
        precision=None if None in dtypes else coarser,
        max_age=None if None in bounds else bounds[0] + math.ceil((bounds[1] - 1) / bounds[2]),
        quarantined={str(reason): int(count) for reason, count in quarantined.items()},
    )


def _samples(run_dir: Path) -> tuple[tuple[Sample, ...], str]:
    """Returns the responses of the newest file with the highest and the lowest reward, and a sentence on their
    source."""
    files = response_files(run_dir)
    if not files:
        return (), "The run stored no responses: dump.rollouts_every=N dumps rollouts, evaluation.every=N evaluates."
    name = files[-1].relative_to(run_dir)
    try:
        rows = [row for row in itertools.islice(read_responses(files[-1]), _MAX_ROWS) if row.get(REWARD) is not None]
    except (OSError, ValueError, pa.ArrowException) as error:
        return (), f"{name} cannot be read: {excerpt(str(error), 200)}"
    if not rows:
        return (), f"{name} holds no response with a reward."
    ranked = sorted(episodes_of(rows), key=lambda episode: -episode[0][REWARD])
    chosen = {"Highest reward": ranked[0]} | ({"Lowest reward": ranked[-1]} if len(ranked) > 1 else {})
    samples = tuple(_sample(f"{why}, {episode[0][REWARD]:g}", episode) for why, episode in chosen.items())
    many = f"{len(rows):,} responses" + (f" in {len(ranked):,} episodes" if len(ranked) < len(rows) else "")
    return samples, f"Of {many} in {name}. More in a terminal: moerl samples {shlex.quote(str(run_dir))}"


def _sample(why: str, episode: Sequence[Mapping[str, Any]]) -> Sample:
    first = episode[0]
    sessions = conversation_of(episode, _LIMITS) if is_conversation(episode) else ()
    return Sample(why, _cut(first.get("prompt"), _PROMPT), _cut(first.get("text"), _RESPONSE), sessions)


def _cut(text: object, limit: int) -> str:
    return "\n".join(excerpt_lines(str(text or "").strip(), limit))


def _said(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Returns the value at a dotted path; None if there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
