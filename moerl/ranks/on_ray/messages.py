"""Messages between the controller and the actor of a rank besides commands: JSON, no pickle of ours."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Self

import msgspec


class Versions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Versions that all processes of a run must have in common."""

    python: str
    ray: str
    moerl: str
    torch: str

    @classmethod
    def here(cls) -> Self:
        return cls(platform.python_version(), version("ray"), version("moerl"), version("torch"))

    def __str__(self) -> str:
        return f"Python {self.python}, Ray {self.ray}, moerl {self.moerl}, torch {self.torch}"


class NodeFacts(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Facts about the node that an actor is on. asks_token: Ray on this node lets nobody in without a token. gpus:
    those that Ray shows the actor, as CUDA_VISIBLE_DEVICES names them."""

    node_id: str
    address: str
    host: str
    versions: Versions
    asks_token: bool
    # A node with another version of moerl may not say it; that it is another is then what is said.
    gpus: str = ""

    @property
    def node(self) -> str:
        return f"node {self.address} ({self.host})"


class RankProcessSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Settings of a rank's process. log: file for its output. environment: its variables besides those of the node."""

    log: str
    environment: dict[str, str]
