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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx

from moerl.errors import ConfigError
from moerl.machine.hub_errors import HOW, hub_errors
from moerl.machine.model_files import INDEX_FILE, SINGLE_FILE, weight_files
from moerl.printable import printable
from moerl.tasks.data.hub_sets import silent_bars
from moerl.telemetry.progress import HEARTBEAT_SECONDS, duration_text

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


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub at one commit."""

    name: str
    """Name that the user gave, OWNER/NAME or OWNER/NAME@REVISION."""
    commit: str
    """40 hexadecimal digits."""
    folder: Path
    """Snapshot of the commit in the cache; its weights may still be missing."""

    @property
    def repo(self) -> str:
        return self.name.partition("@")[0]

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
    with hub_errors(key, name):
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
        say(f"note: the hub does not answer ({type(error).__name__}); {name} is looked for in the cache")
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
    with hub_errors(key, model.name):
        if not offline:
            with _progress(model, missing):
                bars = None if sys.stderr.isatty() else silent_bars()
                huggingface_hub.snapshot_download(
                    model.repo, revision=model.commit, allow_patterns=missing, tqdm_class=bars
                )
    lost = missing_weights(model.folder)
    if lost:
        raise ConfigError(
            f"{key}: the cache has not all weights of {model.name}" + (", and HF_HUB_OFFLINE is set" * offline),
            seen=f"{len(lost)} files are missing, first {lost[0]}, in {model.folder}",
            expected="all files of the model",
            remedy=f"start once without HF_HUB_OFFLINE, with the same HF_HOME, {HOW}",
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
    say(str(model))
    fetch_weights(model, key)
    return model.folder


# --- progress --------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(model: HubModel, files: Sequence[str]) -> Iterator[None]:
    """Prints lines at the beginning and the end. Between them the library draws bars if standard error is a terminal;
    if not, a thread prints a line every `HEARTBEAT_SECONDS`."""
    blobs, began, done = model.folder.parent.parent / "blobs", time.monotonic(), threading.Event()
    before = _bytes_in(blobs)
    say(f"fetching {len(files)} files of weights of {model.name} into {blobs.parent}")

    def tell() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            say(f"fetching {model.name}: {(_bytes_in(blobs) - before) / _GB:.2f} GB, {_since(began)} so far")

    teller = threading.Thread(target=tell, daemon=True)
    if not sys.stderr.isatty():
        teller.start()
    try:
        yield
    finally:
        done.set()
        if teller.ident is not None:
            teller.join()
    say(f"fetched {model.name}: {(_bytes_in(blobs) - before) / _GB:.2f} GB in {_since(began)}")


def _since(began: float) -> str:
    return duration_text(time.monotonic() - began)


def _bytes_in(folder: Path) -> int:
    """Counts the bytes of the files in a folder; files that are renamed meanwhile count as nothing."""
    total = 0
    for name in os.listdir(folder) if folder.is_dir() else []:
        try:
            total += (folder / name).stat().st_size
        except FileNotFoundError:
            continue
    return total


def say(text: str) -> None:
    """Prints a line on standard error, with control characters made visible."""
    print(printable(text), file=sys.stderr, flush=True)
