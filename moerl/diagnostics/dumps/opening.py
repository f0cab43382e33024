"""Opens a dump of any format that is known: told by content, not by the file's name. Torch-free; any process."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moerl.contract.dump_columns import VERSION_KEY
from moerl.diagnostics.dumps import jsonl, minimal, nemo_rl, own, parquet, prime_rl, refused, sglang_raw, slime
from moerl.diagnostics.dumps.folders import files_of
from moerl.diagnostics.dumps.join import joined
from moerl.diagnostics.dumps.reading import Reading
from moerl.diagnostics.dumps.rollout import Dump, DumpedRollout, Unusable
from moerl.errors import ConfigError
from moerl.reading import open_regular

_ZIP = b"PK\x03\x04"
"""First bytes of a file of torch.save."""

_NUM_TRIED = 64
"""Lines that are tried until one tells the format."""


@dataclass(frozen=True, slots=True)
class Format:
    """Format of one file. name: for people. read: its rollouts. notes: what every dump of the format leaves open."""

    name: str
    read: Callable[[Path, Reading], Iterator[DumpedRollout]]
    notes: tuple[str, ...] = ()


def open_dump(
    path: Path,
    *,
    moe_layers: Sequence[int] | None = None,
    experts_per_token: int | None = None,
    load: slime.TorchFile | None = None,
) -> Dump:
    """Opens the one dump at `path`, as `open_dumps` does."""
    (dump,) = open_dumps([path], moe_layers=moe_layers, experts_per_token=experts_per_token, load=load)
    return dump


def open_dumps(
    paths: Sequence[Path],
    *,
    moe_layers: Sequence[int] | None = None,
    experts_per_token: int | None = None,
    load: slime.TorchFile | None = None,
) -> list[Dump]:
    """The rollouts of dumps, which are read when they are asked for; unusable ones are counted. Train data of slime and
    miles are joined to the rollouts of the other dumps.

    Args:
        paths: each a file, or a directory of them: a run directory, or one of files of one format, or of rollouts and
            train data of slime or miles.
        moe_layers: which layers of the model are MoE layers, ascending; picks them where a dump has routes of all.
        experts_per_token: for formats whose routes are flat.
        load: reads what torch.save wrote; `moerl.orchestration.torch_dumps.open_any_dumps` brings it.

    Raises:
        ConfigError: there is no dump, or it is of no known format, or refused, or train data have nothing of the
            trainer. While it is read also where a later file is damaged or of another format, and at the end if train
            data fit no rollout.
        ContractError: while it is read, where a dump of moerl is not sound.
    """
    if moe_layers is not None and (not moe_layers or min(moe_layers) < 0):
        raise ConfigError(
            "moe_layers: not layers of a model", seen=list(moe_layers), expected="at least one index, none negative"
        )
    opened: list[Dump] = []
    for path in paths:
        sets = files_of(path, lambda file: _format(file, load).name)
        for files in sets:
            first = _format(files.files[0], load)
            notes = [*first.notes, *([files.note] if files.note else [])]
            reading = Reading(moe_layers=moe_layers, experts_per_token=experts_per_token, notes=notes)
            opened.append(Dump(first.name, _read(files.files, first, reading, load), reading.unusable, reading.notes))
        kinds = [dump.format for dump in opened[-len(sets) :]]
        if len(kinds) > 1 and set(kinds) != {slime.ROLLOUTS, slime.TRAIN}:
            raise _several(path, kinds)
    return joined(opened)


def own_files(path: Path) -> list[Path]:
    """Returns the files of a dump of moerl in order, which can be read by themselves; none if it is of another format.

    Raises:
        ConfigError: there is no dump, or a file is damaged, or one is of another format than the first.
    """
    files = [file for each in files_of(path, lambda file: file.suffix) for file in each.files]
    if not _is_ours(files[0]):
        return []
    other = next((file for file in files if not _is_ours(file)), None)
    if other is not None:
        raise _other_format(other, "another format", own.FORMAT, files[0])
    return files


def needs_torch(path: Path) -> bool:
    """Returns True if the files of a dump were written by torch.save. Raises `ConfigError` if there is no dump."""
    with open_regular(files_of(path, lambda file: file.suffix)[0].files[0]) as stream:
        return stream.read(4) == _ZIP


def _is_ours(file: Path) -> bool:
    with open_regular(file) as stream:
        start = stream.read(4)
    return start == b"PAR1" and VERSION_KEY in parquet.footer_of(file).metadata


def _several(path: Path, kinds: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"DUMP: files of several formats in {path}",
        seen=", ".join(kinds),
        expected="files of one format, or rollouts and train data of slime or miles",
        remedy="name the files of one of them",
    )


def _read(
    files: Sequence[Path], first: Format | None, reading: Reading, load: slime.TorchFile | None
) -> Iterator[DumpedRollout]:
    """One file after the other; no more than one is held in memory."""
    name = ""
    for file in files:
        found, first = first or _format(file, load), None
        name = name or found.name
        if found.name != name:
            raise _other_format(file, found.name, name, files[0])
        yield from found.read(file, reading)


def _other_format(file: Path, seen: str, name: str, first: Path) -> ConfigError:
    return ConfigError(
        f"DUMP: files of several formats in {file.parent}",
        seen=f"{file.name}: {seen}",
        expected=f"{name}, as {first.name} is",
        remedy="name one of the files, or move those of the other format",
    )


def _format(file: Path, load: slime.TorchFile | None) -> Format:
    with open_regular(file) as stream:
        start = stream.read(4096)
    if start.startswith(b"PAR1"):
        return _parquet(file)
    if start.startswith(_ZIP):
        return _zip(file, load)
    if start[:1] == b"\x80":
        raise refused.pickled(file)
    if start.lstrip()[:1] in (b"{", b"["):
        return _json(file)
    raise refused.unknown(file, f"a file that starts with {start[:16]!r}" if start else "an empty file")


def _parquet(file: Path) -> Format:
    if VERSION_KEY in parquet.footer_of(file).metadata:
        return Format(own.FORMAT, own.read)
    columns = parquet.columns_of(file)
    if slime.COLUMNS_REQUIRED.issubset(columns):
        return Format(slime.COLUMNS, slime.read_columns, slime.NOTES[slime.COLUMNS])
    if minimal.REQUIRED.issubset(columns):
        return Format(minimal.FORMAT, minimal.read)
    raise refused.unknown(file, f"columns {', '.join(columns)}"[:300])


def _zip(file: Path, load: slime.TorchFile | None) -> Format:
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise refused.unknown(file, f"a damaged zip file: {error}") from error
    if not any(name.endswith("data.pkl") for name in names):
        raise refused.unknown(file, f"a zip file of {', '.join(names[:5])}"[:300])
    if load is None:
        raise ConfigError(
            f"DUMP: {file} needs torch to be read",
            seen="a file of torch.save",
            expected="a file that is read without",
            remedy="open it with moerl.orchestration.torch_dumps.open_any_dumps, as moerl diagnose does",
        )
    payload = load(file)
    kind = slime.kind_of(payload, file)
    return Format(kind, partial(slime.read, payload), slime.NOTES[kind])


def _json(file: Path) -> Format:
    unread = Unusable()
    keys: list[str] = []
    for tried, (_, row) in enumerate(jsonl.rows(file, unread)):
        if found := _format_of_row(row, file):
            return found
        keys = keys or list(row)
        if tried + unread.counts.total() >= _NUM_TRIED:
            break
    seen = f"JSON with the keys {', '.join(keys[:12])}"[:300] if keys else f"no JSON object: {unread.examples}"[:300]
    raise refused.unknown(file, seen)


def _format_of_row(row: jsonl.Row, file: Path) -> Format | None:
    keys = row.keys()
    if keys >= minimal.REQUIRED:
        return Format(minimal.FORMAT, minimal.read)
    if keys >= nemo_rl.REQUIRED:
        return Format(nemo_rl.FORMAT, nemo_rl.read, nemo_rl.NOTES)
    if keys >= prime_rl.EXPORT_REQUIRED:
        return Format(prime_rl.EXPORT, prime_rl.read_exports, prime_rl.EXPORT_NOTES)
    if "traces" in keys or "nodes" in keys:
        return Format(prime_rl.TRACES, prime_rl.read_traces, prime_rl.TRACE_NOTES)
    if "meta_info" in keys:
        return Format(sglang_raw.FORMAT, sglang_raw.read, sglang_raw.NOTES)
    if {"input", "output"} <= keys and keys & {"score", "gts", "step", "uid"}:
        raise refused.texts_only(file)
    return None
