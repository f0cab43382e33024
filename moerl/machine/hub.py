"""Models by their names on the Hugging Face hub: the one place that turns a name into a directory. Torch-free.

Runs in the command line, before anything else starts; ranks and servers get the directory. The files are those of
`huggingface_hub`'s cache, which all programs of a user share: HF_HOME names its folder, HF_ENDPOINT the hub to ask;
HF_HUB_OFFLINE=1 forbids to ask any. Nothing is fetched but safetensors files and the small files of `SMALL_FILES`.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx

from moerl.errors import ConfigError
from moerl.machine.model_files import INDEX_FILE, SINGLE_FILE, weight_files
from moerl.printable import printable
from moerl.tasks.data.hub_sets import silent_bars
from moerl.telemetry.progress import HEARTBEAT_SECONDS, duration_text
from moerl.telemetry.terminal import excerpt

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    INDEX_FILE,
)
"""All of a model but its weights."""

ANSWER_SECONDS = 10.0
"""Longest time until the hub has answered which commit a name stands for."""

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*)(@(?P<revision>[A-Za-z0-9][\w.\-/]*))?", re.ASCII)
_GB = 1e9
_COPY = "or give the directory of a copy"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub at one commit."""

    name: str
    """Name that the user gave, OWNER/NAME or OWNER/NAME@REVISION."""
    commit: str
    """40 hexadecimal digits."""
    folder: Path
    """Snapshot of the commit in the cache; its weights may still be missing."""

    def __str__(self) -> str:
        return f"model {self.name} of the hub, commit {self.commit}: {self.folder}"


def hub_name(given: str) -> str | None:
    """Returns `given` if it is a name on the hub; None if it is a path: there is such a directory, or it has another
    form than OWNER/NAME or OWNER/NAME@REVISION. ``./OWNER/NAME`` is always a path."""
    match = _NAME.fullmatch(given)
    if match is None or ".." in given or Path(given).is_dir():
        return None
    return given


@cache
def locate(name: str, commit: str | None = None, key: str = "model.path") -> HubModel:
    """Returns the model, its small files in the cache; `fetch_weights` fetches its weights.

    If the hub does not answer, the commit that the cache has for the name is used, and standard error says so.

    Args:
        name: one for which `hub_name` is not None.
        commit: used whatever the name stands for by now; None = that of the name.
        key: the key or option that gave the name, for messages.

    Raises:
        ConfigError: The hub has no such model, does not give it to this user, or cannot be asked and it is not in the
            cache; or it has no safetensors files.
    """
    import huggingface_hub

    repo, _, asked = name.partition("@")
    revision = commit or asked or "main"
    with _explained(key, name):
        reached = _ask(repo, revision, key, name)
        folder = Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(SMALL_FILES),
                local_files_only=not reached,
                tqdm_class=silent_bars(),
            )
        )
    return HubModel(name, folder.name, folder)


def _ask(repo: str, revision: str, key: str, name: str) -> bool:
    """Asks the hub about a model; returns False if it may not be asked or does not answer. Raises `ConfigError` if the
    model has no safetensors files."""
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        about = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=ANSWER_SECONDS)
    except OfflineModeIsEnabled:
        return False
    except httpx.TransportError as error:
        notify(f"note: the hub does not answer ({type(error).__name__}); {name} is looked for in the cache")
        return False
    files = [each.rfilename for each in about.siblings or []]
    if not {SINGLE_FILE, INDEX_FILE} & set(files):
        weights = [each for each in files if each.endswith((".bin", ".pt", ".pth", ".safetensors", ".gguf"))]
        raise ConfigError(
            f"{key}: {name} has no weights in the form of transformers and safetensors",
            seen=", ".join(weights[:5]) or "no weights",
            expected=f"{SINGLE_FILE}, or several files and {INDEX_FILE}",
            remedy="convert it on a machine where its files are trusted, and give the directory",
        )
    return True


def missing_weights(folder: Path) -> list[str]:
    """Returns the names of files of weights that a snapshot lacks, by its index; none if it is whole."""
    return [name for name in weight_files(folder) if not (folder / name).is_file()]


def fetch_weights(model: HubModel, key: str = "model.path") -> None:
    """Fetches the weights, unless the cache has all of them; then the hub is not asked.

    Raises:
        ConfigError: as `locate`, or there is no room.
    """
    missing = missing_weights(model.folder)
    if not missing:
        return
    import huggingface_hub

    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    if not offline:
        with _explained(key, model.name), _progress(model, missing):
            bars = None if sys.stderr.isatty() else silent_bars()
            repo = model.name.partition("@")[0]
            huggingface_hub.snapshot_download(repo, revision=model.commit, allow_patterns=missing, tqdm_class=bars)
    lost = missing_weights(model.folder)
    if lost:
        raise ConfigError(
            f"{key}: the cache has not all weights of {model.name}" + (", and HF_HUB_OFFLINE is set" * offline),
            seen=f"{len(lost)} files are missing, first {lost[0]}, in {model.folder}",
            expected="all files of the model",
            remedy=f"start once without HF_HUB_OFFLINE, with the same HF_HOME, {_COPY}",
        )


def model_directory(given: str, key: str) -> Path:
    """Returns the absolute directory that an option names: a directory, or a model of the hub, which is fetched and
    named on standard error.

    Raises:
        ConfigError: as `locate` and `fetch_weights`; none for a directory that is missing.
    """
    name = hub_name(given)
    if name is None:
        return Path(given).resolve()
    model = locate(name, key=key)
    notify(str(model))
    fetch_weights(model, key)
    return model.folder


# --- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def _explained(key: str, name: str) -> Iterator[None]:
    """Raises errors of the library as `ConfigError`s. key: key or option that names the model, for messages."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except (HFValidationError, httpx.TransportError, OSError) as error:  # all others of the library are an OSError
        raise _explain(error, key, name) from error


def _explain(error: Exception, key: str, name: str) -> ConfigError:
    from huggingface_hub import constants, errors

    words = excerpt(" ".join(f"{type(error).__name__}: {error}".split()), 300)
    no_directory = f"no directory {Path(name).absolute()}"
    a_name = "a directory with config.json, or OWNER/NAME or OWNER/NAME@REVISION"
    match error:
        case errors.GatedRepoError():
            what, seen, expected = f"{name} is gated", words, "a model that this user may fetch"
            remedy = "accept its terms on its page, and log in with `hf auth login` or HF_TOKEN"
        case errors.RepositoryNotFoundError():
            what = f"{name} is neither a directory nor a model of the hub that this user can see"
            seen, expected = f"{no_directory}; {words}", a_name
            remedy = "check the name; a private model needs `hf auth login` or HF_TOKEN; ./DIR is always a directory"
        case errors.RevisionNotFoundError():
            what, seen, expected = "the model has no such revision", name, "a branch, a tag or a commit behind the @"
            remedy = "check it on the model's page, or leave it away for the branch main"
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            what = f"{name} is no directory here, nor is it whole in the cache of the hub, which " + (
                "HF_HUB_OFFLINE forbids to ask" if constants.HF_HUB_OFFLINE else "does not answer"
            )
            seen = f"{no_directory}; cache {constants.HF_HUB_CACHE}"
            expected = "a directory with config.json, or a model of the hub"
            repo, _, revision = name.partition("@")
            download = f"hf download {repo} --revision {revision}" if revision else f"hf download {repo}"
            remedy = f"fetch it on a machine with a network, into the HF_HOME of this one: {download}; {_COPY}"
        case errors.HFValidationError():
            what, seen, expected = f"{name} is neither a directory nor a name on the hub", words, a_name
            remedy = "check the name"
        case errors.HfHubHTTPError():
            what, seen, expected = f"the hub does not give {name}", words, "its files"
            remedy = f"try again later; what is in the cache is used with HF_HUB_OFFLINE=1; {_COPY}"
        case _:
            what, seen, expected = f"{name} could not be fetched", words, "its files in the cache of the hub"
            remedy = (
                "start again once network, room and permissions of HF_HOME are right; what is fetched already is kept"
            )
    return ConfigError(f"{key}: {what}", seen=seen, expected=expected, remedy=remedy)


# --- progress --------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(model: HubModel, files: Sequence[str]) -> Iterator[None]:
    """Prints lines at the beginning and the end. Between them the library draws bars if standard error is a terminal;
    if not, a thread prints a line every `HEARTBEAT_SECONDS`."""
    blobs, began, done = model.folder.parent.parent / "blobs", time.monotonic(), threading.Event()
    before = _bytes_in(blobs)
    notify(f"fetching {len(files)} files of weights of {model.name} into {blobs.parent}")

    def report() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            notify(f"fetching {model.name}: {(_bytes_in(blobs) - before) / _GB:.2f} GB, {_since(began)} so far")

    reporter = threading.Thread(target=report, daemon=True)
    if not sys.stderr.isatty():
        reporter.start()
    try:
        yield
    finally:
        done.set()
        if reporter.ident is not None:
            reporter.join()
    notify(f"fetched {model.name}: {(_bytes_in(blobs) - before) / _GB:.2f} GB in {_since(began)}")


def _since(began: float) -> str:
    return duration_text(time.monotonic() - began)


def _bytes_in(folder: Path) -> int:
    """Counts the bytes of the files in a folder; files that are renamed meanwhile count as nothing."""
    total = 0
    for name in os.listdir(folder) if folder.is_dir() else []:
        with suppress(FileNotFoundError):
            total += (folder / name).stat().st_size
    return total


def notify(text: str) -> None:
    """Prints a line on standard error, with control characters made visible."""
    print(printable(text), file=sys.stderr, flush=True)
