"""Quarantine: admitted, or kept whole with the reason; never dropped, never repaired."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from factories import SPEC
from quarantine_records import broken, gate, only_entry, record

from moerl.contract import files as files_module
from moerl.contract.ports import RolloutRecord
from moerl.contract.quarantine import Quarantine, read_quarantined
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import Lineage, Trajectory
from moerl.errors import ContractError, MoerlError


def test_a_good_record_becomes_a_trajectory(tmp_path: Path):
    quarantine = gate(tmp_path / "q", "r0")
    assert isinstance(quarantine.admit(record(), trainer_version=3), Trajectory)
    assert (quarantine.num_admitted, quarantine.num_refused, quarantine.rate) == (1, 0, 0.0)
    assert not (tmp_path / "q").exists()


def test_a_refused_record_is_kept_whole_with_the_reason(tmp_path: Path):
    quarantine = gate(tmp_path, "r0")
    bad = broken()
    assert quarantine.admit(bad, trainer_version=5) is None
    assert quarantine.counts == {"logprob_not_finite": 1}
    why, content = read_quarantined(only_entry(tmp_path))
    assert why["reason"] == "logprob_not_finite"
    assert why["field"] == "rollout_logprobs"
    assert "nan at index 4" in why["seen"]
    assert why["expected"] == "finite"
    identity = ("rollout_id", "engine_id", "policy_version", "trainer_version")
    assert [why[name] for name in identity] == ["r0", "engine-7", 3, 5]
    assert set(content) == set(bad.values)
    for name, value in bad.values.items():
        if isinstance(value, np.ndarray):
            assert content[name].dtype == value.dtype
            assert content[name].shape == value.shape
            assert content[name].tobytes() == value.tobytes()
    assert content["kept"]["ids"].tobytes() == bad.values["kept"].ids.tobytes()
    assert content["turns"][1]["sampling"]["top_k"] == 12
    assert content["lineage"]["rollout_id"] == "r0"


@pytest.mark.parametrize(
    ("reason", "bad"),
    [
        (Reason.UNKNOWN_FIELD, record(surprise=1)),
        (Reason.MISSING_FIELD, RolloutRecord("r0", "e", 3, {"spec": SPEC})),
        (Reason.WRONG_TYPE, record(token_ids=None)),
        (Reason.WRONG_DTYPE, record(expert_ids=np.array([object()]))),
        (Reason.ROLLOUT_ID_DISAGREES, record(lineage=Lineage("other", "p", "g"))),
        (Reason.ROLLOUT_ID_DISAGREES, record(lineage=None)),
        (Reason.WRONG_TYPE, dataclasses.replace(record(), rollout_id=cast(Any, ["r0"]))),
        (Reason.ROLLOUT_UNREQUESTED, record("r1")),
        (Reason.VERSION_FROM_THE_FUTURE, record(policy_versions=np.array([-1] * 3 + [9] * 5, np.int32))),
        (Reason.SPEC_MISMATCH, record(spec=dataclasses.replace(SPEC, vocab_size=101))),
        (Reason.FINGERPRINT_MISMATCH, record(spec=dataclasses.replace(SPEC, fingerprint="x"))),
    ],
    ids=lambda value: str(value) if isinstance(value, Reason) else "",
)
def test_records_are_refused_by_name(tmp_path: Path, reason: Reason, bad: RolloutRecord):
    quarantine = gate(tmp_path, "r0", spec=SPEC)
    assert quarantine.admit(bad, trainer_version=3) is None
    assert quarantine.counts == {str(reason): 1}
    assert read_quarantined(only_entry(tmp_path))[0]["reason"] == reason


def test_a_rollout_is_admitted_once(tmp_path: Path):
    quarantine = gate(tmp_path, "r0")
    assert quarantine.admit(record(), trainer_version=3) is not None
    assert quarantine.admit(record(), trainer_version=3) is None
    assert quarantine.counts == {"rollout_duplicate": 1}


def test_another_attempt_at_a_refused_rollout_is_welcome(tmp_path: Path):
    quarantine = gate(tmp_path, "r0")
    assert quarantine.admit(broken(), trainer_version=3) is None
    assert quarantine.admit(record(), trainer_version=3) is not None


def test_the_same_refusal_twice_keeps_both_records(tmp_path: Path):
    for _ in range(2):
        quarantine = gate(tmp_path, "r0")
        quarantine.admit(broken(), trainer_version=3)
        quarantine.admit(broken(), trainer_version=3)
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert len(names) == 4
    assert all(name.startswith("logprob_not_finite-") for name in names)


def test_the_run_stops_above_the_rate_and_not_before(tmp_path: Path):
    ids = [f"r{i}" for i in range(8)]
    quarantine = gate(tmp_path, *ids, max_rate=0.25, min_records=4)
    assert quarantine.admit(broken("r0"), trainer_version=3) is None
    for rollout_id in ids[1:4]:
        quarantine.admit(record(rollout_id), trainer_version=3)
    with pytest.raises(ContractError) as caught:
        quarantine.admit(broken("r4"), trainer_version=3)
    assert caught.value.reason == Reason.QUARANTINE_RATE_EXCEEDED
    assert "2 of 5" in str(caught.value)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "rollout_id", ["../../escape", "/etc/passwd", "a/b", "", "x" * 5000, "nul\0", "\ud800", "日本", ".", "a\nb"]
)
def test_hostile_rollout_ids_stay_in_the_folder(tmp_path: Path, rollout_id: str):
    folder = tmp_path / "q"
    bad = record(lineage=Lineage(rollout_id, "p", "g"))
    bad = dataclasses.replace(bad, rollout_id=rollout_id)
    assert gate(folder).admit(bad, trainer_version=3) is None
    assert list(tmp_path.iterdir()) == [folder]
    why, _ = read_quarantined(only_entry(folder))
    assert why["rollout_id"] == rollout_id


def test_a_failed_write_leaves_nothing_half_written_and_is_not_swallowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files_module.os, "fsync", fails)
    with pytest.raises(MoerlError, match=r"cannot write .*disk full"):
        gate(tmp_path, "r0").admit(broken(), trainer_version=3)
    assert list(tmp_path.iterdir()) == []


def test_a_rename_that_fails_for_another_reason_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[object] = []

    def fails(*paths: object) -> None:
        calls.append(paths)
        raise PermissionError("read-only") if len(calls) == 1 else AssertionError("tried another name")

    monkeypatch.setattr(files_module.os, "rename", fails)
    with pytest.raises(MoerlError, match="read-only"):
        gate(tmp_path, "r0").admit(broken(), trainer_version=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("max_rate", "min_records"), [(-0.1, 1), (1.1, 1), (0.5, 0)])
def test_impossible_settings_are_refused(tmp_path: Path, max_rate: float, min_records: int):
    with pytest.raises(ValueError, match="max_rate"):
        Quarantine(tmp_path, max_rate, min_records)


def test_an_admitted_record_whose_reward_fails_is_withdrawn_whole(tmp_path: Path):
    quarantine = gate(tmp_path, "r0")
    good = record()
    assert quarantine.admit(good, trainer_version=3) is not None
    failed = ContractError(Reason.REWARD_FAILED, field="rewards", seen="timeout", expected="finite rewards")
    quarantine.withdraw(good, failed, trainer_version=3)
    assert (quarantine.num_admitted, quarantine.counts) == (0, {"reward_failed": 1})
    assert read_quarantined(only_entry(tmp_path))[0]["seen"] == "timeout"


def test_withdrawn_records_count_towards_the_rate_that_stops_a_run(tmp_path: Path):
    quarantine = gate(tmp_path, "r0", max_rate=0.5, min_records=1)
    good = record()
    quarantine.admit(good, trainer_version=3)
    failed = ContractError(Reason.REWARD_FAILED, field="rewards", seen="timeout", expected="finite rewards")
    with pytest.raises(ContractError, match=Reason.QUARANTINE_RATE_EXCEEDED):
        quarantine.withdraw(good, failed, trainer_version=3)


def test_an_episode_is_admitted_whole_or_refused_whole(tmp_path: Path):
    quarantine = gate(tmp_path, "r0", "r1")
    admitted = quarantine.admit_episode("r0", [record("r0"), record("r0~1")], trainer_version=3)
    assert [t.lineage.rollout_id for t in admitted or ()] == ["r0", "r0~1"]
    assert quarantine.admit_episode("r1", [record("r1"), broken("r1~1")], trainer_version=3) is None
    assert (quarantine.num_admitted, quarantine.num_refused) == (2, 1), "a refused episode counts once"
    assert len(list(tmp_path.iterdir())) == 2
    assert quarantine.refusal_of("r1").reason in quarantine.counts
    # Only a request makes an episode's sessions known, and only once.
    assert quarantine.admit(record("r0~1"), trainer_version=3) is None
    assert quarantine.admit_episode("r0", [record("r0~5")], trainer_version=3) is None
    assert quarantine.refusal_of("r0").reason == "rollout_duplicate"


def test_an_episode_without_a_token_leaves_its_reason(tmp_path: Path):
    quarantine = gate(tmp_path, "r0")
    failed = ContractError(Reason.EPISODE_FAILED, field="episode", seen="KeyError: 'x'", expected="rewards")
    quarantine.refuse_episode("r0", [], failed, trainer_version=3)
    assert quarantine.counts == {"episode_failed": 1}
    assert read_quarantined(only_entry(tmp_path))[0]["seen"] == "KeyError: 'x'"


def test_an_answer_to_a_forgotten_request_is_refused(tmp_path: Path):
    quarantine = gate(tmp_path, "r0")
    quarantine.admit(record(), trainer_version=3)
    quarantine.forget(["r0"])
    assert quarantine.admit(record(), trainer_version=3) is None
    assert quarantine.counts == {"rollout_unrequested": 1}


def test_counters_survive_a_restart(tmp_path: Path):
    before = gate(tmp_path, "r0", "r1")
    before.admit(record("r0"), trainer_version=3)
    before.admit(broken("r1"), trainer_version=3)
    after = gate(tmp_path)
    after.restore(before.counters())
    assert (after.num_admitted, after.num_refused, after.rate) == (1, 1, 0.5)


def test_a_record_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    fsync, rename = files_module.os.fsync, files_module.os.rename

    def recorded_fsync(handle: int) -> None:
        done.append(f"fsync {Path(f'/proc/self/fd/{handle}').readlink().name}")
        fsync(handle)

    def recorded_rename(source: Path, target: Path) -> None:
        done.append(f"rename {source.name}")
        rename(source, target)

    monkeypatch.setattr(files_module.os, "fsync", recorded_fsync)
    monkeypatch.setattr(files_module.os, "rename", recorded_rename)
    gate(tmp_path / "q", "r0").admit(broken(), trainer_version=3)
    temporary = done[2].removeprefix("fsync ")
    assert temporary.startswith(".writing-")
    assert done == ["fsync record.json", "fsync record.msgpack", f"fsync {temporary}", f"rename {temporary}", "fsync q"]
