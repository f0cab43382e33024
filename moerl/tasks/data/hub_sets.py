"""Commits of data sets of the hub, in the cache that all programs of a user share. Torch-free; any process."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def commit_of_set(name: str, revision: str | None) -> str:
    """Returns the commit of a data set; if the hub does not answer, the one that the cache has for the revision."""
    import huggingface_hub

    # Files that every set has one of: the cache then knows the commit.
    files = ["README.md", ".gitattributes"]
    folder = huggingface_hub.snapshot_download(
        name, repo_type="dataset", revision=revision, allow_patterns=files, tqdm_class=silent_bars()
    )
    return Path(folder).name


def silent_bars() -> type[Any]:
    """Returns a class of the library's progress bars that draws nothing: its own draw without a terminal, too."""
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

    return Silent
