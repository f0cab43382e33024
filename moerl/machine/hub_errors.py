"""Errors of `huggingface_hub` as it looks for a model or fetches one, as `ConfigError`s. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from moerl.errors import ConfigError
from moerl.telemetry.terminal import excerpt

HOW = "or give the directory of a copy"


@contextmanager
def hub_errors(key: str, name: str) -> Iterator[None]:
    """Raises errors of the library as `ConfigError`s. key: key or option that names the model, for messages."""
    from huggingface_hub import errors

    kinds: tuple[tuple[type[Exception], Callable[[str, str, Any], ConfigError]], ...] = (
        (errors.GatedRepoError, _gated),
        (errors.RepositoryNotFoundError, _unknown),
        (errors.RevisionNotFoundError, _no_revision),
        (errors.LocalEntryNotFoundError, _not_cached),
        (errors.HFValidationError, _no_name),
        (errors.HfHubHTTPError, _refused),
        (errors.OfflineModeIsEnabled, _not_cached),
        (httpx.TransportError, _cut),
        (OSError, _cut),
    )
    try:
        yield
    except tuple(kind for kind, _ in kinds) as error:
        make = next(make for kind, make in kinds if isinstance(error, kind))
        raise make(key, name, error) from error


def _gated(key: str, name: str, error: Any) -> ConfigError:
    return ConfigError(
        f"{key}: {name} is gated",
        seen=_words(error),
        expected="a model that this user may fetch",
        remedy="accept its terms on its page, and log in with `hf auth login` or HF_TOKEN",
    )


def _unknown(key: str, name: str, error: Any) -> ConfigError:
    return ConfigError(
        f"{key}: {name} is neither a directory nor a model of the hub that this user can see",
        seen=f"no directory {Path(name).absolute()}; {_words(error)}",
        expected="a directory with config.json, or OWNER/NAME or OWNER/NAME@REVISION",
        remedy="check the name; a private model needs `hf auth login` or HF_TOKEN; ./DIR is always a directory",
    )


def _no_revision(key: str, name: str, error: Any) -> ConfigError:
    return ConfigError(
        f"{key}: the model has no such revision",
        seen=name,
        expected="a branch, a tag or a commit behind the @",
        remedy="check it on the model's page, or leave it away for the branch main",
    )


def _not_cached(key: str, name: str, error: Any) -> ConfigError:
    import huggingface_hub

    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    return ConfigError(
        f"{key}: {name} is no directory here, nor is it whole in the cache of the hub, which "
        + ("HF_HUB_OFFLINE forbids to ask" if offline else "does not answer"),
        seen=f"no directory {Path(name).absolute()}; cache {huggingface_hub.constants.HF_HUB_CACHE}",
        expected="a directory with config.json, or a model of the hub",
        remedy=f"fetch it on a machine with a network, into the HF_HOME of this one: hf download {_arguments(name)};"
        f" {HOW}",
    )


def _no_name(key: str, name: str, error: Any) -> ConfigError:
    return ConfigError(
        f"{key}: {name} is neither a directory nor a name on the hub",
        seen=_words(error),
        expected="a directory with config.json, or OWNER/NAME or OWNER/NAME@REVISION",
        remedy="check the name",
    )


def _refused(key: str, name: str, error: Any) -> ConfigError:
    return ConfigError(
        f"{key}: the hub does not give {name}",
        seen=_words(error),
        expected="its files",
        remedy=f"try again later; what is in the cache is used with HF_HUB_OFFLINE=1; {HOW}",
    )


def _cut(key: str, name: str, error: Any) -> ConfigError:
    return ConfigError(
        f"{key}: {name} could not be fetched",
        seen=_words(error),
        expected="its files in the cache of the hub",
        remedy="start again once network, room and permissions of HF_HOME are right; what is fetched already is kept",
    )


def _words(error: Exception) -> str:
    return excerpt(" ".join(f"{type(error).__name__}: {error}".split()), 300)


def _arguments(name: str) -> str:
    repo, _, revision = name.partition("@")
    return f"{repo} --revision {revision}" if revision else repo
