from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe
from factories import make_trajectory
from ranks import Ranks

from moerl.contract.disk import write_parquet
from moerl.contract.trajectory import Trajectory
from moerl.errors import ConfigError
from moerl.models.spec import spec_from_hf_config
from moerl.offline.verify import describe_dumped, read_dump, select_version


def trajectories(*versions: int, **overrides: Any) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    return [
        make_trajectory(rng, rollout_id=f"r{i}", version=version, **overrides) for i, version in enumerate(versions)
    ]


def names(chosen: list[Trajectory]) -> list[str]:
    return [trajectory.lineage.rollout_id for trajectory in chosen]


# --- the dump --------------------------------------------------------------------------------------------------------


def test_a_dump_is_a_file_or_all_files_of_a_directory(tmp_path: Path) -> None:
    first, second, third = trajectories(1, 1, 1)
    write_parquet(tmp_path / "step-000002.parquet", [third])
    write_parquet(tmp_path / "step-000001.parquet", [first, second])
    assert names(read_dump(tmp_path)) == ["r0", "r1", "r2"]
    assert names(read_dump(tmp_path / "step-000002.parquet")) == ["r2"]


def test_a_dump_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for dump in (tmp_path, tmp_path / "step-000001.parquet"):
        with pytest.raises(ConfigError, match="DUMP: no rollouts"):
            read_dump(dump)


# --- the policy version ----------------------------------------------------------------------------------------------


def test_the_only_version_of_a_dump_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert names(select_version(trajectories(4, 4), None)) == ["r0", "r1"]
    assert capsys.readouterr().out == "policy version 4, taken to be that of the model\n"


def test_several_versions_need_one_to_be_named() -> None:
    with pytest.raises(ConfigError, match="several policy versions") as raised:
        select_version(trajectories(1, 0, 2), None)
    assert raised.value.seen == "versions 0, 1, 2"


def test_trajectories_of_other_versions_are_left_out_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert names(select_version(trajectories(1, 0, 1, 2), 1)) == ["r0", "r2"]
    assert "left out: 2 of 4 trajectories with tokens of other policy versions" in capsys.readouterr().out


def test_a_trajectory_that_met_a_weight_update_is_left_out_whole() -> None:
    [whole] = trajectories(1)
    mixed_versions = np.where(whole.sampled, 1, -1).astype(np.int32)
    mixed_versions[-1] = 2
    [mixed] = trajectories(1, policy_versions=mixed_versions)
    assert select_version([mixed, whole], 1) == [whole]
    with pytest.raises(ConfigError, match="several policy versions"):
        select_version([mixed], None)


def test_a_version_without_trajectories_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trajectory was sampled by this policy version alone"):
        select_version(trajectories(1, 2), 3)


# --- the model -------------------------------------------------------------------------------------------------------


def of_model(path: Path) -> list[Trajectory]:
    """Two trajectories of the model at `path`, as far as its config goes."""
    spec = spec_from_hf_config(json.loads((path / "config.json").read_text()))
    rng = np.random.default_rng(1)
    return [make_trajectory(rng, spec, rollout_id=f"r{i}") for i in range(2)]


def test_the_model_is_read_in_the_dtype_that_its_config_records(untied: Path, tmp_path: Path) -> None:
    config = json.loads((untied / "config.json").read_text())
    for recorded, wanted in (("bfloat16", "bfloat16"), ("float32", "float32"), (None, "float32")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": recorded}))
        chosen = of_model(tmp_path)
        found, dtype = describe_dumped(tmp_path, chosen)
        assert (found.spec, dtype) == (chosen[0].spec, wanted)
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    with pytest.raises(ConfigError, match="--model: dtype"):
        describe_dumped(tmp_path, of_model(tmp_path))


def test_another_architecture_than_the_dumps_is_refused(untied: Path) -> None:
    [good, _] = of_model(untied)
    [bad] = trajectories(0)
    with pytest.raises(ConfigError, match="not the model that sampled the dump") as raised:
        describe_dumped(untied, [good, bad])
    assert "tiny of r0" in str(raised.value.expected)


# --- the trainer -----------------------------------------------------------------------------------------------------


def score(layout: Any, path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per trajectory, sampled log-probs by the trainer and by the judge of the tests."""
    import torch

    from moerl.offline.verify import trainer_logprobs

    samples = tiny_moe.make_samples(8, [40, 17, 33, 9])
    found = trainer_logprobs(tiny_moe.build(layout, path), [sample.trajectory for sample in samples])
    judge = tiny_moe.Judge(path)
    pairs = []
    for sample, ours in zip(samples, found, strict=True):
        t = sample.trajectory
        with torch.inference_mode():
            table = tiny_moe.support_logprobs(judge.logits(t.token_ids[:-1], t.expert_ids), sample).numpy()
        wanted = table[np.arange(len(t) - 1), t.token_ids[1:]]
        pairs.append((ours, np.concatenate([[0.0], np.where(t.sampled[1:], wanted, 0.0)])))
    return pairs


def test_the_trainers_log_probs_come_back_token_by_token(untied: Path, one_process: Ranks) -> None:
    [pairs] = one_process.run(score, untied)
    assert [len(ours) for ours, _ in pairs] == [40, 17, 33, 9]
    for ours, wanted in pairs:
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=2e-5)
