"""Groups from dumps: what makes a step, what is refused, and that the run goes on where it stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import SPEC, make_trajectory
from foreign_dumps import make_dumped, write_slime

from moerl.cli import main
from moerl.config.architecture import describe_model
from moerl.config.checks import check_run
from moerl.config.load import load_config
from moerl.config.schema import RunConfig
from moerl.contract.disk import write_parquet
from moerl.contract.quarantine import Quarantine
from moerl.contract.trajectory import Lineage, ModelSpec, Trajectory
from moerl.diagnostics.dumps.minimal import write_minimal
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.errors import CheckpointError, ConfigError, ContractError, MoerlError
from moerl.orchestration.dump_source import DumpSource
from moerl.orchestration.engines import dump_source

FOREIGN = ModelSpec(num_moe_layers=2, experts_per_token=2, num_experts=8, vocab_size=100_000)
KEYS = ("rl.prompts_per_step=2", "rl.group_size=2", "rl.steps=9", "quarantine.max_rate=0.5")


def config_of(path: Path, *keys: str) -> RunConfig:
    return load_config(
        ["recipe=tiny", "rollout=dumps", f"rollout.path='{path}'", f"run_dir='{path.parent / 'run'}'", *KEYS, *keys],
        command="train",
    )


def rollout(step: int, group: int, number: int, *, version: int = 0, **changes: Any) -> Trajectory:
    made = make_trajectory(np.random.default_rng([step, group, number]), version=version)
    name = f"rl-{step:06d}/p{group}"
    changes.setdefault("rewards", {"reward": float(number), "accuracy": 0.0})
    return replace(made, lineage=Lineage(f"{name}/{number}", f"p{group}", name), **changes)


def batch_of(step: int, **changes: Any) -> list[Trajectory]:
    """Two groups of two, as step `step` of a run trained them, from 1."""
    return [rollout(step, group, number, version=step - 1, **changes) for group in (0, 1) for number in (0, 1)]


def write_steps(folder: Path, steps: Mapping[int, Sequence[Trajectory]]) -> Path:
    for step, trajectories in steps.items():
        write_parquet(folder / f"rollouts/step-{step:06d}.parquet", trajectories)
    return folder


def open_source(path: Path, *keys: str, spec: ModelSpec = SPEC, said: list[str] | None = None) -> DumpSource:
    # A recipe's top-k counts for dumps of others, which do not say theirs.
    config = config_of(path, *keys, *(["rollout.top_k=null"] if spec is FOREIGN else []))
    quarantine = Quarantine(path.parent / "quarantine", config.quarantine.max_rate, spec=spec)
    model = replace(describe_model(config.model), spec=spec)
    source = dump_source(config, model, quarantine, ([] if said is None else said).append)
    source.restore({}, 0)
    return source


def names(trajectories: Sequence[Trajectory]) -> list[str]:
    return [trajectory.lineage.rollout_id for trajectory in trajectories]


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    """A run that dumped its steps 1, 2 and 11."""
    return write_steps(tmp_path / "dumped", {step: batch_of(step) for step in (1, 2, 11)})


def test_a_step_takes_the_groups_of_a_step_of_the_dump_in_order(dumped: Path):
    source, ages = open_source(dumped), list[float]()
    assert source.num_steps == 3
    for step in (1, 2, 11):
        assert names(source.batch()) == names(batch_of(step))
        ages.append(source.metrics["staleness/age_max"])
        source.trained()
    assert ages == [0, 0, 0]
    assert (source.ledger.issued, source.ledger.trained, source.ledger.pending) == (12, 12, 0)
    assert any("end after step 3" in line for line in source.describe())


def test_a_run_goes_on_behind_the_groups_that_were_trained_a_second_time_too(dumped: Path):
    snapshot: dict[str, Any] = {}
    for done, step in enumerate((1, 2, 11)):
        source = open_source(dumped)
        source.restore(snapshot, done)
        assert names(source.batch()) == names(batch_of(step))
        source.trained()
        snapshot = source.snapshot()
    assert snapshot["ledger"]["trained"] == 12


def test_a_dump_that_has_changed_is_refused_by_a_run_that_goes_on(dumped: Path):
    source = open_source(dumped)
    source.batch()
    source.trained()
    snapshot = source.snapshot()
    (dumped / "rollouts/step-000001.parquet").unlink()
    with pytest.raises(CheckpointError, match="the dump has changed"):
        open_source(dumped).restore(snapshot, 1)


def test_a_dump_without_steps_is_cut_into_batches_and_grows_older_by_each(tmp_path: Path):
    trajectories = [rollout(0, group, number) for group in range(5) for number in (0, 1)]
    path = tmp_path / "rollouts.parquet"
    write_parquet(path, trajectories)
    source = open_source(path)
    assert source.num_steps == 2
    assert "the last 1 groups" in " ".join(source.describe())
    assert names(source.batch()) == names(trajectories[:4])
    source.trained()
    with pytest.raises(MoerlError, match=r"older than the settings allow.*set buffer.max_staleness=1"):
        source.batch()
    source = open_source(path, "buffer.max_staleness=1")
    for first in (0, 4):
        assert names(source.batch()) == names(trajectories[first : first + 4])
        source.trained()


def test_what_breaks_the_contract_is_in_quarantine_by_reason_and_in_the_ledger(tmp_path: Path):
    wrong = [
        rollout(1, 0, 0),
        rollout(1, 0, 1, version=7),
        rollout(1, 1, 0, rewards={"accuracy": 0.0}),
        rollout(1, 1, 1),
    ]
    said: list[str] = []
    source = open_source(write_steps(tmp_path / "dumped", {1: wrong}), said=said)
    assert names(source.batch()) == names([wrong[0], wrong[3]])
    source.trained()
    assert source.ledger.quarantined == {"version_from_the_future": 1, "missing_field": 1}
    assert source.ledger.trained == 2
    assert said[0].startswith("step 1: 2 of 4 rollouts refused; the first: version_from_the_future")
    assert len(list((tmp_path / "quarantine").iterdir())) == 2


def test_a_step_of_which_nothing_is_left_ends_the_run(tmp_path: Path):
    dump = write_steps(tmp_path / "dumped", {1: batch_of(1, rewards={"reward": 1.0})})
    with pytest.raises(MoerlError, match=r"all 2 groups filtered by rl\.filters"):
        open_source(dump, "rl.filters=[equal_rewards]").batch()


def test_a_damaged_file_ends_the_run(dumped: Path):
    file = dumped / "rollouts/step-000001.parquet"
    content = bytearray(file.read_bytes())
    source = open_source(dumped)
    content[len(content) // 3] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(ContractError, match="file_corrupt"):
        source.batch()


def test_settings_that_the_dump_does_not_fit_are_refused_with_the_value_to_set(dumped: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"2 groups in step 1.*set rl.prompts_per_step=2"):
        open_source(dumped, "rl.prompts_per_step=3")
    larger = write_steps(tmp_path / "larger", {1: [*batch_of(1), rollout(1, 1, 2)]})
    with pytest.raises(ConfigError, match=r"rl.group_size: a group of the dump is larger.*set rl.group_size=3"):
        open_source(larger)
    with pytest.raises(ConfigError, match=r"a rollout of the dump is longer.*set trainer.microbatch_tokens=8"):
        open_source(dumped, "trainer.microbatch_tokens=7", "rollout.max_new_tokens=2")


SCORED = ("algorithm=custom", "algorithm.loss=policy_rows:policy_rows", "algorithm.scores=[teacher]")


def test_a_dump_without_scores_that_the_algorithm_needs_is_refused(dumped: Path):
    with pytest.raises(ConfigError, match=r"algorithm\.scores: the dump does not have.*seen: no scores.*score_teacher"):
        open_source(dumped, *SCORED)


def test_a_rollout_without_a_score_is_in_quarantine(tmp_path: Path):
    batch = batch_of(1, scores={"teacher": np.ones(8, np.float32)})
    batch[2] = replace(batch[2], scores={})
    source = open_source(write_steps(tmp_path / "dump", {1: batch}), *SCORED)
    source.restore({}, 0)
    assert all(trajectory.scores["teacher"].all() for trajectory in source.batch())
    assert dict(source.ledger.quarantined) == {"missing_field": 1}


def test_scores_that_nothing_gives_are_refused_before_an_engine_starts():
    with pytest.raises(ConfigError, match=r"algorithm\.scores: nothing gives these scores.*rollout=dumps"):
        check_run(load_config(["recipe=tiny", *SCORED], command="train"))


def test_a_dump_of_another_model_is_refused(dumped: Path):
    with pytest.raises(ConfigError, match=r"of another model; seen: 3 MoE layers, 2 of 8 experts"):
        open_source(dumped, spec=replace(SPEC, num_experts=16))


def test_a_rollout_that_is_there_twice_is_refused(dumped: Path):
    write_steps(dumped, {12: batch_of(11)})
    with pytest.raises(ConfigError, match="rollout 'rl-000011/p0/0' twice"):
        open_source(dumped)


@pytest.mark.parametrize("command", ["sft", "rollout", "eval"])
def test_commands_that_need_an_engine_refuse_dumps(command: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"moerl {command} needs an engine"):
        load_config(["recipe=tiny", "rollout=dumps", f"rollout.path='{tmp_path}'"], command=command)


@pytest.mark.parametrize("plan", ["weights", "run"])
def test_plans_of_engines_refuse_dumps(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", plan, "recipe=tiny", "rollout=dumps", f"rollout.path='{tmp_path}'"]) == 2
    assert f"rollout: moerl plan {plan} needs an engine" in capsys.readouterr().err


# --- dumps of others -------------------------------------------------------------------------------------------------


def foreign(**changes: Any) -> list[DumpedRollout]:
    """Two groups of two, versions from 3 on."""
    same: dict[str, Any] = {"kept": None, "top_ps": np.ones(8, np.float32), "finish_reason": "stop", **changes}
    return [
        make_dumped(np.random.default_rng(i), name=f"r{i}", group=f"{i // 2}", rewards={"reward": float(i)}, **same)
        for i in range(4)
    ]


def test_files_of_a_directory_that_are_left_out_are_said(tmp_path: Path):
    folder, said = tmp_path / "rollouts", list[str]()
    folder.mkdir()
    for name in ("1.pt", "eval_1.pt"):
        write_slime(folder / name, foreign())
    open_source(folder, spec=FOREIGN, said=said)
    assert [line for line in said if "left out" in line] == [
        f"{folder}: left out: 1 file of evaluations (eval_1.pt), read if named"
    ]


def test_a_dump_of_others_has_no_scores(tmp_path: Path):
    path = tmp_path / "others.parquet"
    write_minimal(path, foreign())
    with pytest.raises(ConfigError, match=r"algorithm\.scores: .*dumps of other systems have no scores"):
        open_source(path, *SCORED, spec=FOREIGN)


def test_the_minimal_schema_is_trained_as_it_says(tmp_path: Path):
    path, rollouts = tmp_path / "dump.parquet", foreign()
    write_minimal(path, rollouts)
    source = open_source(path, spec=FOREIGN)
    for dumped, trajectory in zip(rollouts, source.batch(), strict=True):
        assert trajectory.lineage == Lineage(dumped.name, dumped.group, dumped.group)
        assert trajectory.rewards == dumped.rewards
        assert trajectory.turns[1].sampling is not None
        assert trajectory.turns[1].sampling.temperature == 0.75
        np.testing.assert_array_equal(trajectory.rollout_logprobs, dumped.rollout_logprobs)
        np.testing.assert_array_equal(trajectory.expert_ids, dumped.expert_ids)
    assert source.metrics["staleness/age_max"] == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"finish_reason": ""}, "missing_field"),
        ({"version": -1}, "version_negative"),
        ({"kept": make_dumped(np.random.default_rng(0)).kept}, "missing_field"),
        ({"top_ps": np.full(8, 0.5, np.float32)}, "kept_set_missing"),
        # As bytes they would be 1 and 2.
        ({"expert_ids": np.tile(np.array([257, 258], np.int32), (7, 2, 1))}, "expert_id_out_of_range"),
    ],
)
def test_what_a_dump_of_others_lacks_is_refused_by_name(changes: dict[str, Any], reason: str, tmp_path: Path):
    path = tmp_path / "dump.parquet"
    write_minimal(path, foreign(**changes))
    with pytest.raises(MoerlError, match=f"4 of 4 rollouts refused; the first: {reason}"):
        open_source(path, spec=FOREIGN).batch()


def test_a_dump_without_routes_counts_as_not_captured(tmp_path: Path):
    path = tmp_path / "dump.parquet"
    write_minimal(path, foreign(expert_ids=None, routed=None))
    assert not any(trajectory.routed.any() for trajectory in open_source(path, spec=FOREIGN).batch())


def test_a_dump_without_groups_or_with_a_group_in_two_places_is_refused(tmp_path: Path):
    path = tmp_path / "dump.parquet"
    write_minimal(path, [replace(each, group="") for each in foreign()])
    with pytest.raises(ConfigError, match="rollouts without a group"):
        open_source(path, spec=FOREIGN)
    first, second, third, fourth = foreign()
    write_minimal(path, [first, third, second, fourth])
    with pytest.raises(ConfigError, match="group '0' in several places"):
        open_source(path, spec=FOREIGN)


def test_rows_that_cannot_be_used_are_refused_beyond_the_rate_and_said_below(tmp_path: Path):
    path, (first, *rest) = tmp_path / "dump.parquet", foreign()
    none = replace(first, rollout_logprobs=np.full(8, np.nan, np.float32))
    write_minimal(path, [none, *rest])
    with pytest.raises(ConfigError, match=r"too many rows of the dump cannot be used.*one is not finite"):
        open_source(path, "quarantine.max_rate=0.1", spec=FOREIGN)
    assert any("1 log-probs" in line for line in open_source(path, spec=FOREIGN).describe())


def test_a_dump_of_slime_is_trained_with_its_rewards_and_the_sampling_of_the_settings(tmp_path: Path):
    path = tmp_path / "3.pt"
    write_slime(path, foreign(temperatures=np.ones(8, np.float32)), rollout_id=3)
    source = open_source(path, "rollout.temperature=0.5", spec=FOREIGN)
    assert any("rollout.temperature = 0.5" in line for line in source.describe())
    batch = source.batch()
    assert [trajectory.rewards["reward"] for trajectory in batch] == [0.0, 1.0, 2.0, 3.0]
    assert {turn.sampling.temperature for t in batch for turn in t.turns if turn.sampling} == {0.5}
