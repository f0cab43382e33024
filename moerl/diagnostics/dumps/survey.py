"""A look over a dump that is to be trained on: its groups, in order, and which of them make a step. Any process.

Only a few columns are read of dumps of moerl, of others everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from moerl.algorithms.registry import AlgorithmConfig
from moerl.config.schema import QuarantineConfig, RLConfig
from moerl.config.training import TrainerConfig
from moerl.contract.dump_columns import SCORE, SPEC
from moerl.contract.trajectory import ModelSpec
from moerl.diagnostics.dumps import own
from moerl.diagnostics.dumps.opening import open_dumps, own_files
from moerl.diagnostics.dumps.parquet import columns, columns_of, damaged
from moerl.diagnostics.dumps.rollout import DumpedRollout, Unusable
from moerl.diagnostics.dumps.slime import TorchFile
from moerl.errors import ConfigError
from moerl.models.description import ModelDescription

_COLUMNS = ("rollout_id", "group_id", "num_tokens", *SPEC)


@dataclass(frozen=True, slots=True)
class DumpedGroup:
    """The responses to one prompt that follow each other in a dump."""

    step: int
    """Step of the run that wrote them; -1 if the dump does not say."""
    name: str
    """Name of the group."""
    size: int
    """Rollouts in it."""


@dataclass(slots=True)
class Survey:
    """Contents of a dump that training can use."""

    format: str
    """Name of the format, for people."""
    groups: list[DumpedGroup] = field(default_factory=list)
    """In the order of the dump."""
    longest: int = 0
    """Tokens of the longest rollout."""
    num_rollouts: int = 0
    """Rollouts that can be used."""
    specs: set[ModelSpec] = field(default_factory=set)
    """Models that dumps of moerl name; empty for other formats."""
    sizes: dict[Path, int] = field(default_factory=dict)
    """Rollouts by file of dumps of moerl; empty for other formats."""
    unusable: Unusable = field(default_factory=Unusable)
    """Rows that cannot be read; none in dumps of moerl, which are refused instead."""
    says_sampling: bool = True
    """False if a rollout does not say its temperature or top-p."""
    scores: frozenset[str] = frozenset()
    """Names of the side scores of which every file has a column; none in formats other than ours."""

    def add(self, step: int, group: str, num_tokens: int) -> None:
        """Adds the next rollout.

        Raises:
            ConfigError: it has no group, or steps fall, or some rollouts have a step and others none.
        """
        self.longest, self.num_rollouts = max(self.longest, num_tokens), self.num_rollouts + 1
        if not group:
            raise ConfigError(
                "rollout.path: rollouts without a group",
                seen=f"a {self.format} whose rollout {self.num_rollouts} names none",
                expected="the group of each rollout: advantages compare the responses to one prompt",
                remedy="write the minimal schema with its column `group`; see docs/dump_formats.md",
            )
        last = self.groups[-1] if self.groups else DumpedGroup(step, "", 0)
        if (last.step, last.name) == (step, group):
            self.groups[-1] = DumpedGroup(step, group, last.size + 1)
            return
        if (last.step < 0) != (step < 0):
            seen = f"step {step} behind step {last.step}, -1: none"
            raise _out_of_order(seen, "a step for each rollout, or for none")
        if last.step > step:
            raise _out_of_order(f"step {step} behind step {last.step}", "steps in ascending order")
        self.groups.append(DumpedGroup(step, group, 1))

    def check(self) -> None:
        """Raises `ConfigError` if nothing is there, or a group is in several places."""
        if not self.groups:
            raise ConfigError(
                "rollout.path: no rollout that can be used",
                seen="; ".join(f"{count} {why}" for why, count in self.unusable.counts.items()) or "an empty dump",
                expected="rollouts with log-probs",
                remedy="docs/dump_formats.md says what a dump must hold",
            )
        seen: set[tuple[int, str]] = set()
        for group in self.groups:
            if (group.step, group.name) in seen:
                where = f"group {group.name!r} in several places"
                raise _out_of_order(where, "the rollouts of a group one behind another")
            seen.add((group.step, group.name))


def survey(
    path: Path, model: ModelDescription, load: TorchFile | None = None, notify: Callable[[str], None] | None = None
) -> Survey:
    """Looks over a dump.

    Args:
        model: selects its MoE layers if a dump has routes of all layers.
        load: reads files of torch.save.
        notify: called with a line for a directory of which files are left out, unless it is a dump of moerl.

    Raises:
        ConfigError: there is no dump, it cannot be read, or its rollouts are in no order that can be trained.
    """
    files = own_files(path)
    found = Survey(own.FORMAT) if files else _survey_others(path, model, load, notify)
    names: set[str] = set()
    for file in files:
        rows = columns(file, _COLUMNS)
        for name, group, tokens in zip(*(rows[each] for each in _COLUMNS[:3]), strict=True):
            if name in names:
                raise _out_of_order(f"rollout {name!r} twice, again in {file.name}", "each rollout once")
            names.add(name)
            found.add(own.step_of(file), group, tokens)
        found.specs |= {_spec(file, values) for values in zip(*(rows[each] for each in SPEC), strict=True)}
        found.sizes[file] = len(rows["rollout_id"])
    found.scores = frozenset[str].intersection(*map(_scores, files)) if files else frozenset()
    found.check()
    return found


def rollouts_behind(
    path: Path, survey: Survey, model: ModelDescription, num_read: int, load: TorchFile | None = None
) -> Iterator[DumpedRollout]:
    """Yields the rollouts of a dump behind the first `num_read`. Files of ours that hold none of these are not opened.

    Raises:
        ConfigError, ContractError: while it is read, as `open_dumps`.
    """
    paths = [path]
    if survey.sizes:
        paths, sizes = [*survey.sizes], [*survey.sizes.values()]
        while paths and sizes[0] <= num_read:
            num_read -= sizes.pop(0)
            del paths[0]
    if not paths:
        return iter(())
    dumps = open_dumps(paths, moe_layers=model.moe_layers, experts_per_token=model.spec.experts_per_token, load=load)
    return islice(chain.from_iterable(dump.rollouts for dump in dumps), num_read, None)


def batches(survey: Survey, per_step: int) -> list[list[DumpedGroup]]:
    """Returns the groups of each step: those of a step of the dump, or `per_step` (`rl.prompts_per_step`) in order if
    it has no steps. What is left at the end of such a dump makes no batch.

    Raises:
        ConfigError: the dump does not fit the settings of the run.
    """
    by_step: dict[int, list[DumpedGroup]] = {}
    for index, group in enumerate(survey.groups):
        by_step.setdefault(group.step if group.step >= 0 else index // per_step, []).append(group)
    has_steps, found = survey.groups[0].step >= 0, list(by_step.values())
    if not has_steps and len(found) > 1 and len(found[-1]) < per_step:
        del found[-1]
    wrong = next((groups for groups in found if len(groups) != per_step), None)
    if wrong is not None:
        raise ConfigError(
            "rl.prompts_per_step: the dump has another number of groups in a step",
            seen=f"{len(wrong)} groups" + (f" in step {wrong[0].step}" if has_steps else ""),
            expected=f"rl.prompts_per_step = {per_step}",
            remedy=f"set rl.prompts_per_step={len(wrong)}",
        )
    return found


def check_fits(
    survey: Survey,
    model: ModelDescription,
    rl: RLConfig,
    trainer: TrainerConfig,
    algorithm: AlgorithmConfig,
    quarantine: QuarantineConfig,
) -> None:
    """Checks a dump against model and settings. Raises `ConfigError`."""
    largest, longest = max(survey.groups, key=lambda group: group.size), survey.longest
    if largest.size > rl.group_size:
        raise ConfigError(
            "rl.group_size: a group of the dump is larger",
            seen=f"{largest.size} rollouts in group {largest.name!r}",
            expected=f"at most rl.group_size = {rl.group_size}",
            remedy=f"set rl.group_size={largest.size}",
        )
    for key, most, remedy in (
        ("trainer.microbatch_tokens", trainer.microbatch_tokens, f"set trainer.microbatch_tokens={longest}"),
        ("rollout.path", model.max_positions, "train the model that sampled them"),
    ):
        if longest > most:
            raise ConfigError(
                f"{key}: a rollout of the dump is longer", seen=longest, expected=f"at most {most}", remedy=remedy
            )
    sizes = _sizes(model.spec)
    other = next((spec for spec in survey.specs if _sizes(spec) != sizes), None)
    if other is not None:
        raise ConfigError(
            "rollout.path: the dump is of another model",
            seen="{} MoE layers, {} of {} experts".format(*_sizes(other)),
            expected="{} MoE layers, {} of {} experts, as the model has".format(*sizes),
            remedy="train the model that sampled the rollouts",
        )
    missing = [name for name in algorithm.needs if name not in survey.scores]
    if missing:
        raise ConfigError(
            "algorithm.scores: the dump does not have these scores of tokens",
            seen=", ".join(sorted(survey.scores)) or "no scores",
            expected=", ".join(algorithm.needs),
            remedy=f"write a dump of moerl with a column {SCORE}{missing[0]}, a number for each token"
            " (docs/one_half.md); dumps of other systems have no scores",
        )
    lost = survey.unusable.counts.total()
    if lost > quarantine.max_rate * (lost + survey.num_rollouts):
        raise ConfigError(
            "quarantine.max_rate: too many rows of the dump cannot be used",
            seen=describe_unusable(survey.unusable),
            expected=f"at most a share of {quarantine.max_rate} of {lost + survey.num_rollouts} rows",
            remedy="correct the cause (docs/dump_formats.md), or raise quarantine.max_rate to train on the rest",
        )
    batches(survey, rl.prompts_per_step)


def describe_unusable(unusable: Unusable) -> str:
    """Returns how many rows of a dump cannot be used, by reason with an example; empty if all can."""
    return "; ".join(f"{count} {why} ({unusable.examples[why]})" for why, count in unusable.counts.items())


def _survey_others(
    path: Path, model: ModelDescription, load: TorchFile | None, notify: Callable[[str], None] | None
) -> Survey:
    dumps = open_dumps(
        [path], moe_layers=model.moe_layers, experts_per_token=model.spec.experts_per_token, load=load, notify=notify
    )
    found = Survey(dumps[0].format)
    for dump in dumps:
        for rollout in dump.rollouts:
            found.add(rollout.step, rollout.group, len(rollout))
            found.says_sampling &= rollout.says_temperature and rollout.says_top_p
        found.unusable.add_all(dump.unusable, "")
    return found


def _scores(file: Path) -> frozenset[str]:
    return frozenset(name.removeprefix(SCORE) for name in columns_of(file) if name.startswith(SCORE))


def _spec(file: Path, values: Sequence[Any]) -> ModelSpec:
    if [type(value) for value in values] != [int, int, int, int, str]:
        raise damaged(file, f"a model of {values}")
    return ModelSpec(*values)


def _sizes(spec: ModelSpec) -> tuple[int, int, int]:
    return spec.num_moe_layers, spec.experts_per_token, spec.num_experts


def _out_of_order(seen: str, expected: str) -> ConfigError:
    return ConfigError(
        "rollout.path: the rollouts of the dump are in no order that can be trained",
        seen=seen,
        expected=expected,
        remedy="name one dump of one run, or sort the rows",
    )
