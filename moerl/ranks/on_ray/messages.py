"""Messages between the controller and the actor of a rank that are no commands: JSON, no pickle of ours."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Self

import msgspec


class Versions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Versions that all processes of a run must have in common."""

    python: str
    """Version of Python."""
    ray: str
    """Version of Ray."""
    moerl: str
    """Version of moerl."""
    torch: str
    """Version of torch."""

    @classmethod
    def here(cls) -> Self:
        return cls(platform.python_version(), version("ray"), version("moerl"), version("torch"))

    def __str__(self) -> str:
        return f"Python {self.python}, Ray {self.ray}, moerl {self.moerl}, torch {self.torch}"


class NodeFacts(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Facts about the node that an actor is on."""

    node_id: str
    """Ray's id of the node."""
    address: str
    """IP address of the node."""
    host: str
    """Host name of the node."""
    versions: Versions
    """Versions that the actor's process has."""
    asks_token: bool
    """True if Ray on this node lets nobody in without a token."""
    # A default, because a node with another version of moerl may not send it; the error is then about the versions.
    gpus: str = ""
    """GPUs that Ray shows the actor, as CUDA_VISIBLE_DEVICES names them."""

    @property
    def node(self) -> str:
        return f"node {self.address} ({self.host})"


class RankProcessSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Settings of a rank's process."""

    log: str
    """Absolute path of the file for its output."""
    environment: dict[str, str]
    """Environment variables that are added to those of the node."""
