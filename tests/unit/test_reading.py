"""Files that somebody else may have made: what is no regular file, too large or too deep is refused, and who reads
files in another way has a reason."""

from __future__ import annotations

import ast
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moerl.config.compose import config_groups
from moerl.contract.quarantine import read_quarantined
from moerl.diagnostics.dumps.opening import open_dumps
from moerl.diagnostics.report.read_run import numbers_of_directory, stored_report
from moerl.errors import MoerlError
from moerl.launch.slurm.attempts import _rows
from moerl.launch.slurm.site import load_site
from moerl.launch.status import run_status
from moerl.launch.sweeps.manifest import read_manifest
from moerl.machine.model_files import read_header
from moerl.models.description import read_model
from moerl.orchestration.ends import read_ends
from moerl.orchestration.history import read_history
from moerl.reading import MAX_DEPTH, find_irregular, open_regular, read_file, read_json, read_text
from moerl.rollout.tokenizers import read_tokenizer
from moerl.tasks.data.jsonl_rows import read_rows
from moerl.tasks.data.section import DataSet
from moerl.tasks.data.sources import read_set
from moerl.tasks.rewards.make import make_scorer
from moerl.tasks.rewards.section import JsonReward

ROOT = Path(__file__).parents[2]

OPENS_BY_ITSELF = {
    "moerl/reading.py": "is the reader",
    "moerl/cli.py": "opens /dev/null",
    "moerl/config/help_text.py": "reads files of this package",
    "moerl/machine/interfaces.py": "reads /proc",
    "moerl/buffer/journal.py": "opens a segment to write behind its last record",
    "moerl/contract/files.py": "syncs files that it has written, and hashes files whose kind was looked at",
    "moerl/contract/parquet.py": "is the reader of Parquet",
    "moerl/contract/seals.py": "reads back what it has written",
    "moerl/diagnostics/report/page.py": "reads files of this package",
    "moerl/launch/doctor/machine.py": "reads /proc, and files that it has written",
    "moerl/launch/checks/packages.py": "reads files of this package",
    "moerl/launch/doctor/servers.py": "reads /proc",
    "moerl/http/keys.py": "opens without waiting, and looks at the owner too",
    "moerl/launch/run_lock.py": "opens without waiting, and looks at the owner too",
    "moerl/user_function.py": "reads a module of the user as Python does",
    "moerl/rollout/shared_memory.py": "opens memory",
    "moerl/rollout/sglang/install.py": "reads files of this package and of its installation",
    "moerl/rollout/sglang/patches.py": "reads files of this package and of its installation",
    "moerl/rollout/sglang/server.py": "reads a log that it has made",
    "moerl/processes/host.py": "waits for a process, and opens logs to write",
    "moerl/tasks/rewards/code.py": "reads files that it has made, and /proc",
    "moerl/processes/parent.py": "reads /proc",
    "moerl/processes/guard.py": "reads /proc; imports the standard library alone",
    "moerl/tasks/rewards/sandbox/limits.py": "opens folders",
    "moerl/tasks/rewards/worker.py": "opens /dev/null",
    "moerl/weights/disk.py": "hashes files whose kind was looked at",
}
"""Modules that may open files to read without `moerl.reading`, and why."""

PARQUET = {
    *("ParquetFile", "ParquetDataset", "read_table", "read_schema", "read_metadata", "read_pandas"),
    *("read_row_group", "read_row_groups", "iter_batches"),  # in threads, unless told otherwise
}


def reads(tree: ast.AST) -> Iterator[int]:
    """The lines that open a file to read it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = [*node.args, *(each.value for each in node.keywords)]
        modes = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        reading = [mode for mode in modes if mode.startswith("r") and len(mode) <= 3]
        if isinstance(node.func, ast.Name):
            if node.func.id == "open" and (reading or not modes):
                yield node.lineno
        elif isinstance(node.func, ast.Attribute):
            name = node.func.attr
            is_os = isinstance(node.func.value, ast.Name) and node.func.value.id == "os"
            if name in {"read_text", "read_bytes", *PARQUET} or (name == "open" and (reading or is_os)):
                yield node.lineno


def test_files_are_opened_by_the_reader_or_for_a_reason():
    found = {
        str(path.relative_to(ROOT)): [*reads(ast.parse(path.read_text(encoding="utf-8")))]
        for path in sorted((ROOT / "moerl").rglob("*.py"))
    }
    by_themselves = {name: lines for name, lines in found.items() if lines}
    assert {name: lines for name, lines in by_themselves.items() if name not in OPENS_BY_ITSELF} == {}
    assert sorted(OPENS_BY_ITSELF.keys() - by_themselves.keys()) == [], "needs no exception any more"


@pytest.mark.parametrize("line", ["p.read_text()", "p.open('rb')", "open(p)", "os.open(p, 0)", "pq.read_table(p)"])
def test_the_rule_sees_every_way_to_open_a_file(line: str):
    assert [*reads(ast.parse(line))] == [1]


@pytest.mark.parametrize("line", ["p.open('ab')", "p.write_text(x)", "open(p, 'w')", "task.open()", "read_text(p)"])
def test_the_rule_lets_writing_and_the_reader_pass(line: str):
    assert [*reads(ast.parse(line))] == []


# --- the reader ------------------------------------------------------------------------------------------------------


@pytest.fixture
def irregular(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    listening = socket.socket(socket.AF_UNIX)

    def make(kind: str) -> Path:
        path = tmp_path / "file.json"
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a directory":
            path.mkdir()
        elif kind == "a device":
            path.symlink_to("/dev/zero")
        else:
            here = os.open(tmp_path, os.O_RDONLY)
            listening.bind(f"/proc/self/fd/{here}/file.json")  # the path itself may be longer than sockets take
            os.close(here)
        return path

    yield make
    listening.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["a pipe", "a directory", "a device", "a socket"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(irregular: Callable[[str], Path], kind: str):
    path = irregular(kind)
    for read in (open_regular, read_file, read_text, read_json):
        with pytest.raises(OSError, match="No such device" if kind == "a socket" else f"{kind}, not a regular file"):
            read(path)
    found = None if kind == "a directory" else f"{path}: {kind}"
    assert find_irregular(path.parent) == found


def test_links_to_files_and_links_to_nothing_are_regular(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"7")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "lost").symlink_to("nothing")
    assert find_irregular(tmp_path) is None
    assert read_json(tmp_path / "link") == 7


def test_a_file_of_more_bytes_than_the_limit_is_refused(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"1" * 101)
    assert read_file(tmp_path / "file", 101) == b"1" * 101
    with pytest.raises(ValueError, match="more than 100 bytes"):
        read_json(tmp_path / "file", 100)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 200_000])
def test_json_that_is_nested_too_deep_is_refused(tmp_path: Path, depth: int):
    (tmp_path / "file").write_text("[" * depth + "]" * depth)
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} lists and objects in one another"):
        read_json(tmp_path / "file")
    (tmp_path / "file").write_text("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    read_json(tmp_path / "file")


# --- who uses it -----------------------------------------------------------------------------------------------------


def _read_ends(path: Path) -> object:
    return read_ends(path.parent, SimpleNamespace(eos_token_id=1, chat_template=None), 8)  # pyright: ignore


def _read_tokenizer(path: Path) -> object:
    (path.parent / "tokenizer.json").write_text("{}")
    return read_tokenizer(path.parent)


def _read_model(path: Path) -> object:
    (path.parent / "config.json").write_text("{}")
    return read_model(path.parent)


def _read_groups(path: Path) -> object:
    return config_groups(path.parent.parent)


def _read_tensors(path: Path) -> object:
    return read_header(path)


def _read_lines(path: Path) -> object:
    return list(read_rows(path))


def _read_set(path: Path) -> object:
    return list(read_set(DataSet(name="", path=path.parent), "train", 0) or ())


def _read_schema(path: Path) -> object:
    return make_scorer({"r": JsonReward(kind="json", file=path)}, None)


def _open_dump(path: Path) -> object:
    return [list(dump.rollouts) for dump in open_dumps([path])]


def _read_status(path: Path) -> object:
    (path.parent / "config.yaml").touch()
    return run_status(path.parent)


def _read_rows(path: Path) -> object:
    return numbers_of_directory(path.parent)


def _read_report(path: Path) -> object:
    return stored_report(path)


def _read_manifest(path: Path) -> object:
    return read_manifest(path.parent)


def _read_site(path: Path) -> object:
    return load_site(path)


def _read_attempts(path: Path) -> object:
    return _rows(path)


def _read_quarantined(path: Path) -> object:
    return read_quarantined(path.parent)


def _read_history(path: Path) -> object:
    return read_history(path.parent)


READERS = {
    "generation_config.json": _read_ends,
    "tokenizer_config.json": _read_tokenizer,
    "added_tokens.json": _read_tokenizer,
    "recipe/mine.yaml": _read_groups,
    "special_tokens_map.json": _read_model,
    "model.safetensors": _read_tensors,
    "rows.jsonl": _read_lines,
    "train.parquet": _read_set,
    "state.json": _read_set,
    "schema.json": _read_schema,
    "step-1.parquet": _open_dump,
    "ledger.json": _read_status,
    "metrics.jsonl": _read_rows,
    "summary.json": _read_rows,
    "report.json": _read_report,
    "sweep.json": _read_manifest,
    "site.yaml": _read_site,
    "attempts.jsonl": _read_attempts,
    "record.json": _read_quarantined,
    "history.jsonl": _read_history,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", READERS)
def test_a_pipe_in_the_place_of_a_file_is_an_error_and_not_waited_for(name: str, tmp_path: Path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises((MoerlError, OSError)) as caught:
        READERS[name](tmp_path / name)
    assert any(told in str(caught.value) for told in ("a pipe", "DUMP: no rollouts"))


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "schema.json", "ledger.json"])
def test_a_file_of_deep_json_is_an_error(name: str, tmp_path: Path):
    (tmp_path / name).write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(MoerlError, match="lists and objects in one another"):
        READERS[name](tmp_path / name)
