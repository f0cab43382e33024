"""Kinds of servers that a run can sample with, by `kind` of their section `rollout`. Runs in the controller and in
trainer ranks."""

from __future__ import annotations

from collections.abc import Mapping

from moerl.rollout.fleet.backend import ServerKind
from moerl.rollout.sglang.kind import SGLANG

SERVER_KINDS: Mapping[str, ServerKind] = {"sglang": SGLANG}
