"""Folders of the repository that a wheel carries: configs, patches and templates; and a requirement that its metadata
cannot name. Torch-free."""

from __future__ import annotations

from pathlib import Path

import moerl

BRIDGE = "megatron-bridge==0.6.2"
"""A requirement that no metadata name: it is installed without its own requirements (requirements/bridge.in)."""


def shipped_folder(name: str) -> Path:
    """Returns the folder `name`: inside the package in a wheel, next to it in a checkout."""
    package = Path(moerl.__file__).resolve().parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name
