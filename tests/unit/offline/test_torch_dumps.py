"""Dumps of slime and miles as torch.save writes them, and files that would run code."""

from __future__ import annotations

import io
import os
import pickle
import runpy
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_dumps import (
    make_dumped,
    open_any_dump,
    open_dump,
    same,
    write_miles,
    write_miles_columns,
    write_miles_train,
    write_nemo_rl,
    write_slime,
    write_slime_train,
)

from moerl.diagnostics.dumps.refused import CONVERTER
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.errors import ConfigError
from moerl.offline.torch_dumps import open_any_dumps

MODEL = (4, (1, 3))
UNSAID = ("name", "temperatures", "top_ps", "step")
NO_ROUTES = (*UNSAID, "policy_versions", "expert_ids", "routed", "kept", "group", "prompt", "response")


def two() -> list[DumpedRollout]:
    rng = np.random.default_rng(5)
    return [make_dumped(rng, name="a"), make_dumped(rng, name="b", spans=(4, 2, 3, 6))]


class Harm:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_rollouts_of_slime_keep_everything_that_is_written_of_them(tmp_path: Path) -> None:
    rollouts = two()
    write_slime(tmp_path / "4.pt", rollouts, model=MODEL)
    dump = open_any_dump(tmp_path / "4.pt", moe_layers=MODEL[1])
    found = list(dump.rollouts)
    for left, right in zip(found, rollouts, strict=True):
        same(left, right, but=(*UNSAID, "trainer_logprobs"))
    assert [(each.name, each.step) for each in found] == [("4/0", 4), ("4/1", 4)]
    assert dump.format == "slime or miles rollouts"
    assert not dump.unusable.counts


def test_rollouts_of_miles_have_their_numpy_routes(tmp_path: Path) -> None:
    rollouts = two()
    write_miles(tmp_path / "4.pt", rollouts, model=MODEL)
    for left, right in zip(open_any_dump(tmp_path / "4.pt", moe_layers=MODEL[1]).rollouts, rollouts, strict=True):
        same(left, right, but=(*UNSAID, "trainer_logprobs", "kept"))


def test_without_a_model_all_layers_are_left(tmp_path: Path) -> None:
    write_miles(tmp_path / "4.pt", two(), model=MODEL)
    assert {
        each.expert_ids.shape[1] for each in open_any_dump(tmp_path / "4.pt").rollouts if each.expert_ids is not None
    } == {4}


@pytest.mark.parametrize("write", [write_slime_train, write_miles_train])
def test_train_data_has_the_log_probs_of_the_trainer(tmp_path: Path, write: Any) -> None:
    rollouts = two()
    write(tmp_path / "4_0.pt", rollouts)
    dump = open_any_dump(tmp_path / "4_0.pt")
    for left, right in zip(dump.rollouts, rollouts, strict=True):
        same(left, right, but=NO_ROUTES)
    assert dump.format == "slime or miles train data"


def test_routes_of_one_dump_and_log_probs_of_the_other_come_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    rollouts = [*two(), make_dumped(rng, name="c", spans=(2, 2))]
    write_slime(tmp_path / "4.pt", rollouts)
    write_slime_train(tmp_path / "train.pt", rollouts[1::-1])
    (dump,) = open_any_dumps([tmp_path / "4.pt", tmp_path / "train.pt"])
    found = list(dump.rollouts)
    for left, right in zip(found[:2], rollouts[:2], strict=True):
        same(left, right, but=UNSAID)
    assert not found[2].trainer_logprobs
    assert dump.notes[-1] == "1 of 3 rollouts is not in the train data"


def _write_details(folder: Path, rollouts: list[DumpedRollout], step: int = 4) -> None:
    """Writes dumps as slime's --dump-details does."""
    for name in ("rollout_data", "train_data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_slime(folder / "rollout_data" / f"{step}.pt", rollouts, rollout_id=step)
    write_slime_train(folder / "train_data" / f"{step}.pt", rollouts, rollout_id=step)


def test_a_folder_of_details_brings_rollouts_and_train_data_together(tmp_path: Path) -> None:
    for step in (9, 10):
        _write_details(tmp_path, two(), step)
    dump = open_any_dump(tmp_path)
    assert [each.step for each in dump.rollouts if each.trainer_logprobs] == [9, 9, 10, 10]
    assert dump.format == "slime or miles rollouts, with slime or miles train data"
    assert not any("train data" in note for note in dump.notes)


def test_one_folder_with_rollouts_and_train_data_under_two_names_is_told_apart(tmp_path: Path) -> None:
    for step in (4, 5):
        write_slime(tmp_path / f"data_{step}.pt", two(), rollout_id=step)
        write_slime_train(tmp_path / f"train_{step}.pt", two(), rollout_id=step)
    assert [each.step for each in open_any_dump(tmp_path).rollouts if each.trainer_logprobs] == [4, 4, 5, 5]


def test_evaluations_in_a_folder_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    _write_details(tmp_path, two())
    write_slime(tmp_path / "rollout_data" / "eval_4.pt", two())
    dump = open_any_dump(tmp_path)
    assert len(list(dump.rollouts)) == 2
    assert "left out: 1 file of evaluations (eval_4.pt), read if named" in dump.notes
    assert len(list(open_any_dump(tmp_path / "rollout_data" / "eval_4.pt").rollouts)) == 2


def test_rollouts_of_two_systems_in_one_folder_are_refused_with_the_names_of_their_files(tmp_path: Path) -> None:
    write_slime(tmp_path / "rollout_12.pt", two())
    write_nemo_rl(tmp_path / "train_data_step12.jsonl", two())
    with pytest.raises(ConfigError, match=r"several formats.*rollout_12\.pt.*train_data_step12\.jsonl.*name the files"):
        open_any_dump(tmp_path)


def test_files_that_are_no_dumps_are_left_out_and_named(tmp_path: Path) -> None:
    write_slime(tmp_path / "12.pt", two())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "batch.pkl").write_bytes(pickle.dumps(1))
    said: list[str] = []
    (dump,) = open_any_dumps([tmp_path], notify=said.append)
    assert len(list(dump.rollouts)) == 2
    note = "left out: 2 files of no known format (batch.pkl, config.json)"
    assert note in dump.notes
    assert said == [f"{tmp_path}: {note}"]


def test_a_damaged_file_in_a_folder_is_an_error_and_not_left_out(tmp_path: Path) -> None:
    write_slime(tmp_path / "rollout_12.pt", two())
    (tmp_path / "train_12.pt").write_bytes((tmp_path / "rollout_12.pt").read_bytes()[:900])
    with pytest.raises(ConfigError, match=r"train_12\.pt.*damaged zip file"):
        open_any_dump(tmp_path)


def test_dumps_in_another_folder_of_a_run_are_left_out_and_named(tmp_path: Path) -> None:
    _write_details(tmp_path, two())
    (tmp_path / "dashboard_columns").mkdir()
    write_miles_columns(tmp_path / "dashboard_columns" / "rollout_4.parquet", two())
    torch.save({"model": {}}, tmp_path / "model.pt")
    (tmp_path / "cut.json").write_text("{")
    dump = open_any_dump(tmp_path)
    assert len(list(dump.rollouts)) == 2
    (note,) = (note for note in dump.notes if note.startswith("left out: "))
    assert note.endswith("dashboard_columns (rollout_4.parquet), read if named")
    assert "model.pt" not in note


def test_train_data_alone_count_samples_of_several_ranks_once(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_miles_train(tmp_path / f"4_{rank}.pt", two())
    write_miles_train(tmp_path / "4_2.pt", [make_dumped(np.random.default_rng(9), name="c")])
    dump = open_any_dump(tmp_path)
    assert len(list(dump.rollouts)) == 3
    assert "samples that several ranks wrote count once: 2 of 4_1.pt were read before" in dump.notes


def test_train_data_of_no_rollout_are_counted(tmp_path: Path) -> None:
    write_slime(tmp_path / "rollout.pt", two()[:1])
    write_slime_train(tmp_path / "train.pt", two())
    dump = open_any_dump(tmp_path)
    assert len(list(dump.rollouts)) == 1
    assert "1 sample is in the train data alone, and left out" in dump.notes


def test_ranks_of_miles_that_hold_the_same_samples_or_none_of_the_trainer_are_joined_once(tmp_path: Path) -> None:
    rollouts = two()
    write_miles(tmp_path / "4.pt", rollouts)
    for rank in (0, 1):
        write_miles_train(tmp_path / f"4_{rank}.pt", rollouts)
    bare = [replace(rollout, trainer_logprobs={"trainer": rollout.rollout_logprobs}) for rollout in rollouts]
    write_miles_train(tmp_path / "4_2.pt", bare)
    loaded = torch.load(tmp_path / "4_2.pt", weights_only=False)
    del loaded["rollout_data"]["log_probs"]
    torch.save(loaded, tmp_path / "4_2.pt")
    for left, right in zip(open_any_dump(tmp_path).rollouts, rollouts, strict=True):
        same(left, right, but=(*UNSAID, "kept"))
    with pytest.raises(ConfigError, match=r"train data without log-probs of the trainer.*2 samples without log_probs"):
        open_any_dumps([tmp_path / "4.pt", tmp_path / "4_2.pt"])


def test_two_samples_with_the_same_tokens_and_log_probs_keep_their_own(tmp_path: Path) -> None:
    one = two()[0]
    other = replace(one, trainer_logprobs={"trainer": one.trainer_logprobs["trainer"] - one.sampled.astype(np.float32)})
    write_slime(tmp_path / "rollout.pt", [one, other])
    write_slime_train(tmp_path / "train.pt", [one, other])
    (dump,) = open_any_dumps([tmp_path / "train.pt", tmp_path / "rollout.pt"])
    for left, right in zip(dump.rollouts, (one, other), strict=True):
        same(left, right, but=UNSAID)


def _of_another_step(rollouts: list[DumpedRollout]) -> tuple[list[DumpedRollout], int]:
    return rollouts, 5


def _of_another_engine(rollouts: list[DumpedRollout]) -> tuple[list[DumpedRollout], int]:
    return [replace(each, rollout_logprobs=each.rollout_logprobs * np.float32(1.5)) for each in rollouts], 4


def _of_other_tokens(rollouts: list[DumpedRollout]) -> tuple[list[DumpedRollout], int]:
    return [replace(each, token_ids=each.token_ids + 1) for each in rollouts], 4


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (_of_another_step, "rollouts of rollout_id 4, train data of rollout_id 5, no sample in both"),
        (_of_another_engine, "2 rollouts have the tokens of a sample and other log-probs of the engine"),
        (_of_other_tokens, "rollouts of rollout_id 4, train data of rollout_id 4, no sample in both"),
    ],
)
def test_train_data_that_do_not_fit_the_rollouts_are_refused(tmp_path: Path, changed: Any, said: str) -> None:
    write_slime(tmp_path / "rollout.pt", two())
    theirs, step = changed(two())
    write_slime_train(tmp_path / "train.pt", theirs, rollout_id=step)
    (dump,) = open_any_dumps([tmp_path / "rollout.pt", tmp_path / "train.pt"])
    with pytest.raises(ConfigError, match=f"do not fit together.*{said}.*the same rollout_id"):
        list(dump.rollouts)


def test_train_data_of_miles_under_context_parallelism_is_refused(tmp_path: Path) -> None:
    write_miles_train(tmp_path / "4_0.pt", two(), cp_size=2)
    with pytest.raises(ConfigError, match="cp_size 2"):
        list(open_any_dump(tmp_path / "4_0.pt").rollouts)


def test_a_directory_of_steps_is_read_in_order(tmp_path: Path) -> None:
    for step in (10, 9):
        write_slime(tmp_path / f"{step}.pt", two(), rollout_id=step)
    assert [each.step for each in open_any_dump(tmp_path).rollouts] == [9, 9, 10, 10]


def test_files_that_need_no_torch_are_read_too(tmp_path: Path) -> None:
    write_nemo_rl(tmp_path / "train_data_step1.jsonl", two())
    assert len(list(open_any_dump(tmp_path / "train_data_step1.jsonl").rollouts)) == 2


def test_a_class_in_a_dump_is_named_and_refused_and_nothing_of_it_runs(tmp_path: Path) -> None:
    torch.save({"rollout_id": 1, "samples": [{"adapter": Harm(tmp_path / "harm")}]}, tmp_path / "1.pt")
    with pytest.raises(ConfigError, match=r"more than data.*GLOBAL posix.mkdir.*converter\.py\.txt"):
        open_any_dump(tmp_path / "1.pt")
    assert not (tmp_path / "harm").exists()


def test_an_array_of_objects_is_refused(tmp_path: Path) -> None:
    torch.save({"samples": [{"tokens": np.array([1, "a"], object)}]}, tmp_path / "1.pt")
    with pytest.raises(ConfigError, match="more than data"):
        open_any_dump(tmp_path / "1.pt")


def test_arrays_of_numpy_1_and_scalars_of_numpy_are_read(tmp_path: Path) -> None:
    rollouts = two()
    write_miles(tmp_path / "new.pt", rollouts)
    with zipfile.ZipFile(tmp_path / "new.pt") as new, zipfile.ZipFile(tmp_path / "old.pt", "w") as old:
        for name in new.namelist():
            data = new.read(name)
            assert b"numpy._core" in data or not name.endswith("data.pkl")
            old.writestr(name, data.replace(b"numpy._core", b"numpy.core"))
    assert len(list(open_any_dump(tmp_path / "old.pt").rollouts)) == 2
    torch.save({"samples": [{"response_length": np.int64(2), "reward": np.float64(1)}]}, tmp_path / "1.pt")
    dump = open_any_dump(tmp_path / "1.pt")
    assert not list(dump.rollouts)
    assert dump.unusable.counts == {"token ids: missing": 1}


def test_an_old_torch_file_is_refused_as_the_pickle_that_it_is(tmp_path: Path) -> None:
    torch.save({"samples": []}, tmp_path / "1.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError, match="is a pickle"):
        open_any_dump(tmp_path / "1.pt")


@pytest.mark.parametrize("loaded", [{"model": {}}, [1], torch.zeros(2), {"samples": 3}])
def test_another_file_of_torch_is_refused_by_name(tmp_path: Path, loaded: Any) -> None:
    torch.save(loaded, tmp_path / "1.pt")
    with pytest.raises(ConfigError, match="no dump of slime or miles"):
        open_any_dump(tmp_path / "1.pt")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "1.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    with pytest.raises(ConfigError, match="is compressed"):
        open_any_dump(tmp_path / "1.pt")


def test_a_file_that_is_cut_or_changed_is_refused_or_counted(tmp_path: Path) -> None:
    stream = io.BytesIO()
    write_slime(stream, two())  # pyright: ignore[reportArgumentType]
    data, rng, refused = stream.getvalue(), np.random.default_rng(3), 0
    for trial in range(120):
        changed = bytearray(data)
        if trial % 3:
            changed[int(rng.integers(2500))] = int(rng.integers(256))
        else:
            del changed[int(rng.integers(len(data))) :]
        (tmp_path / "1.pt").write_bytes(changed)
        try:
            list(open_any_dump(tmp_path / "1.pt").rollouts)
        except ConfigError:
            refused += 1
    assert refused > 40


def test_a_tensor_that_has_no_array_is_counted(tmp_path: Path) -> None:
    sample = {"tokens": torch.zeros(3).to_sparse(), "response_length": 1}
    torch.save({"samples": [sample, 3, {"tokens": torch.zeros(2, 2)}]}, tmp_path / "1.pt")
    dump = open_any_dump(tmp_path / "1.pt")
    assert not list(dump.rollouts)
    assert dump.unusable.counts.total() == 3


def test_the_converter_reads_a_dump_with_classes_where_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = two()
    write_slime(tmp_path / "4.pt", rollouts)
    loaded = torch.load(tmp_path / "4.pt")
    loaded["samples"][0]["adapter"] = Path("a class that weights_only refuses")
    torch.save(loaded, tmp_path / "4.pt")
    with pytest.raises(ConfigError, match="more than data"):
        open_any_dump(tmp_path / "4.pt")
    (tmp_path / "converter.py").write_text(CONVERTER.read_text())
    monkeypatch.setattr(sys, "argv", ["converter.py", str(tmp_path / "4.pt"), str(tmp_path / "4.jsonl")])
    runpy.run_path(str(tmp_path / "converter.py"), run_name="__main__")
    for left, right in zip(open_dump(tmp_path / "4.jsonl").rollouts, rollouts, strict=True):
        same(left, right, but=(*UNSAID, "policy_versions", "routed", "trainer_logprobs", "prompt", "response"))


def test_what_other_libraries_allow_is_not_allowed_in_a_dump_and_stays_allowed_elsewhere(tmp_path: Path) -> None:
    torch.save({"samples": [Path("a class")]}, tmp_path / "1.pt")
    with torch.serialization.safe_globals([type(Path())]):
        before = set(torch.serialization.get_safe_globals())
        with pytest.raises(ConfigError, match="more than data"):
            open_any_dump(tmp_path / "1.pt")
        assert set(torch.serialization.get_safe_globals()) == before


def test_a_pickle_named_pt_is_never_unpickled(tmp_path: Path) -> None:
    (tmp_path / "1.pt").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    with pytest.raises(ConfigError, match="is a pickle"):
        open_any_dump(tmp_path / "1.pt")
    assert not (tmp_path / "harm").exists()
