"""Opens a dump of any known format: the content decides on the format, not the file's name. Torch-free; any process."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moerl.contract.dump_columns import VERSION_KEY
from moerl.diagnostics.dumps import jsonl, minimal, nemo_rl, own, parquet, prime_rl, refused, sglang_raw, slime
from moerl.diagnostics.dumps.folders import Files, files_of, names_of
from moerl.diagnostics.dumps.join import belong_together, is_joined, joined
from moerl.diagnostics.dumps.reading import Reading
from moerl.diagnostics.dumps.rollout import Dump, DumpedRollout, Unusable
from moerl.diagnostics.dumps.twice import SeenRollouts
from moerl.errors import ConfigError
from moerl.reading import open_regular

_ZIP = b"PK\x03\x04"
"""First bytes of a file of torch.save."""

_NUM_TRIED = 64
"""Lines that are tried until one tells the format."""


@dataclass(frozen=True, slots=True)
class Format:
    """Format of one file."""

    name: str
    """For people; equal for all files of one format."""
    read: Callable[[Path, Reading], Iterator[DumpedRollout]]
    """Yields the rollouts of a file."""
    notes: tuple[str, ...] = ()
    """Sentences on what no dump of the format says."""


def open_dumps(
    paths: Sequence[Path],
    *,
    moe_layers: Sequence[int] | None = None,
    experts_per_token: int | None = None,
    load: slime.TorchFile | None = None,
    notify: Callable[[str], None] | None = None,
) -> list[Dump]:
    """Returns dumps whose rollouts are read when they are asked for; unusable ones are counted. Train data of slime and
    miles are joined to the rollouts of the other dumps, token exports of prime-rl to its traces.

    Args:
        paths: each a file, or a directory of them: a run directory, or one of files of one format, or of rollouts and
            train data of slime or miles, or of traces and token exports of prime-rl.
        moe_layers: which layers of the model are MoE layers, ascending; selects them if a dump has routes of all
            layers.
        experts_per_token: for formats whose routes are flat.
        load: reads files of torch.save; `moerl.offline.torch_dumps.open_any_dumps` brings it.
        notify: called with a line for each path of which files are left out.

    Raises:
        ConfigError: there is no dump, or it is of no known format, or refused, or a file is named twice, or train data
            have nothing of the trainer. Raised while rollouts are read if a later file is damaged or of another format,
            or a rollout stands in two files, and at the end if train data fit no rollout.
        ContractError: raised while rollouts are read if a dump of moerl is not sound.
    """
    if moe_layers is not None and (not moe_layers or min(moe_layers) < 0):
        raise ConfigError(
            "moe_layers: not layers of a model", seen=list(moe_layers), expected="at least one index, none negative"
        )
    found: list[tuple[Path, Files, Format]] = []
    for path in paths:
        sets = [
            (path, files, _format(files.files[0], load))
            for files in files_of(path, lambda file: _format(file, load).name)
        ]
        formats = {format.name for *_, format in sets}
        if len(formats) > 1 and not belong_together(formats):
            raise ConfigError(
                f"DUMP: files of several formats in {path}",
                seen="; ".join(f"{format.name} ({names_of(files.files)})" for _, files, format in sets),
                expected="files of one format, or rollouts and train data of slime or miles, or traces and token"
                " exports of prime-rl",
                remedy="name the files of one of them",
            )
        found += sets
    _check_named_once(file for _, files, _ in found for file in files.files)
    formats, seen = {format.name for *_, format in found}, SeenRollouts()
    opened: list[Dump] = []
    for path, files, format in found:
        notes = [*format.notes, *([files.note] if files.note else [])]
        reading = Reading(moe_layers=moe_layers, experts_per_token=experts_per_token, notes=notes)
        is_trainer_side = format.name != slime.TRAIN and is_joined(format.name, formats)
        if notify is not None and files.note:
            notify(f"{path}: {files.note}")
        rollouts = _read(files.files, format, reading, load, None if is_trainer_side else seen)
        opened.append(Dump(format.name, rollouts, reading.unusable, reading.notes))
    return joined(opened)


def own_files(path: Path) -> list[Path]:
    """Returns the files of a dump of moerl in order, which can be read by themselves; none if it is of another format.

    Raises:
        ConfigError: there is no dump, or a file is damaged, or one is of another format than the first.
    """
    files = [file for each in files_of(path, _kind_without_torch) for file in each.files]
    if not _is_ours(files[0]):
        return []
    other = next((file for file in files if not _is_ours(file)), None)
    if other is not None:
        raise _other_format(other, "another format", own.FORMAT, files[0])
    return files


def needs_torch(path: Path) -> bool:
    """Returns True if files of a dump were written by torch.save. Raises `ConfigError` if there is no dump."""
    return any(_is_zip(each.files[0]) for each in files_of(path, _kind_without_torch))


def _kind_without_torch(file: Path) -> str:
    return "torch.save" if _is_zip(file) else _format(file, None).name


def _is_zip(file: Path) -> bool:
    return _start(file).startswith(_ZIP)


def _is_ours(file: Path) -> bool:
    return _start(file).startswith(parquet.MAGIC) and VERSION_KEY in parquet.footer_of(file).metadata


def _start(file: Path) -> bytes:
    """Returns the first bytes of a file."""
    with open_regular(file) as stream:
        return stream.read(4096)


def _check_named_once(files: Iterable[Path]) -> None:
    named: dict[Path, Path] = {}
    for file in files:
        if (target := file.resolve()) in named:
            raise ConfigError(
                "DUMP: a file is named twice",
                seen=f"{named[target]} and {file}",
                expected="each file once, by itself or by its directory",
                remedy="leave one of the two out",
            )
        named[target] = file


def _read(
    files: Sequence[Path], first: Format, reading: Reading, load: slime.TorchFile | None, seen: SeenRollouts | None
) -> Iterator[DumpedRollout]:
    """Reads one file after the other. first: format of the first file."""
    name = first.name
    for number, file in enumerate(files):
        found = _format(file, load) if number else first
        if found.name != name:
            raise _other_format(file, found.name, name, files[0])
        rollouts = found.read(file, reading)
        if seen is None:
            yield from rollouts
        elif name == slime.TRAIN:
            yield from seen.once(file, rollouts, reading.notes)
        else:
            yield from seen.checked(file, rollouts, reading.notes)


def _other_format(file: Path, seen: str, name: str, first: Path) -> ConfigError:
    return ConfigError(
        f"DUMP: files of several formats in {file.parent}",
        seen=f"{file.name}: {seen}",
        expected=f"{name}, as {first.name} is",
        remedy="name one of the files, or move those of the other format",
    )


def _format(file: Path, load: slime.TorchFile | None) -> Format:
    start = _start(file)
    if start.startswith(parquet.MAGIC):
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
        raise refused.damaged(file, f"a damaged zip file: {error}") from error
    if not any(name.endswith("data.pkl") for name in names):
        raise refused.unknown(file, f"a zip file of {', '.join(names[:5])}"[:300])
    if load is None:
        raise ConfigError(
            f"DUMP: {file} needs torch to be read",
            seen="a file of torch.save",
            expected="a file that is read without",
            remedy="open it with moerl.offline.torch_dumps.open_any_dumps, as moerl diagnose does",
        )
    payload = load(file)
    kind = slime.kind_of(payload, file)
    return Format(kind, partial(slime.read, payload), slime.NOTES[kind])


def _json(file: Path) -> Format:
    unread = Unusable()
    keys: list[str] = []
    for tried, (_, row) in enumerate(jsonl.rows(file, unread)):
        for required, format in _BY_KEYS:
            if row.keys() >= required:
                return format
        if {"input", "output"} <= row.keys() and row.keys() & {"score", "gts", "step", "uid"}:
            raise refused.texts_only(file)
        keys = keys or list(row)
        if tried + unread.counts.total() >= _NUM_TRIED:
            break
    seen = f"JSON with the keys {', '.join(keys[:12])}"[:300] if keys else f"no JSON object: {unread.examples}"[:300]
    raise (refused.damaged if jsonl.NOT_JSON in unread.counts else refused.unknown)(file, seen)


_TRACES = Format(prime_rl.TRACES, prime_rl.read_traces, prime_rl.TRACE_NOTES)
_BY_KEYS = (
    (minimal.REQUIRED, Format(minimal.FORMAT, minimal.read)),
    (nemo_rl.REQUIRED, Format(nemo_rl.FORMAT, nemo_rl.read, nemo_rl.NOTES)),
    (prime_rl.EXPORT_REQUIRED, Format(prime_rl.EXPORT, prime_rl.read_exports, prime_rl.EXPORT_NOTES)),
    ({"traces"}, _TRACES),
    ({"nodes"}, _TRACES),
    ({"meta_info"}, Format(sglang_raw.FORMAT, sglang_raw.read, sglang_raw.NOTES)),
)
"""Keys that a JSON object of a format has, and the format; the first counts."""
