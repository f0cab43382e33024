"""Calls of a weight update to one SGLang server: each succeeds in time, or its error names server, step and call.

Of one update, in this order: pause, take the memory of weights, flush the prefix cache, label the weights as nobody's,
begin; buckets (`channel`); end, label; take the memory of the cache, continue. Until the last two the trainer has its
weights on the same device (`moerl.machine.residence`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moerl.errors import EngineError, WeightSyncError
from moerl.http.client import MAX_SAID_BYTES
from moerl.rollout.sglang.handshake import UNSYNCED
from moerl.rollout.sglang.http import SGLangHttp

_WEIGHTS, _CACHE = "weights", "kv_cache"
"""SGLang's names of what it can give back."""
_OPEN_SESSION = "already open"
"""Part of what a server says to a second begin."""


class UpdateCalls:
    """Calls to one server.

    Args:
        name: of the server, for messages.
        seconds: that each call may take.
    """

    def __init__(self, name: str, http: SGLangHttp, seconds: float) -> None:
        self.name, self.http, self.seconds = name, http, seconds
        self._given: list[str] = []

    async def sleep(self) -> None:
        """Gives the memory of weights and prefix cache back until the next update. Raises as `post`."""
        await self.post("sleep", "/pause_generation", {"mode": "retract"})
        await self._label("sleep", UNSYNCED)
        # An update that was broken off has taken a part of it back; giving the rest twice would end the server.
        given = [tag for tag in (_WEIGHTS, _CACHE) if tag not in self._given]
        self._given = [_WEIGHTS, _CACHE]
        if given:
            await self.post("sleep", "/release_memory_occupation", {"tags": given})

    async def begin_update(self) -> None:
        """Stops sampling and opens an update; one that was broken off is closed first.

        Responses under way are computed again with the new weights and continued behind what they have.

        Raises:
            WeightSyncError: as `post`.
        """
        step = "begin"
        await self.post(step, "/pause_generation", {"mode": "retract"})
        # What is there again is not what was there; the update brings all of it.
        await self._take_back(step, _WEIGHTS)
        await self.post(step, "/flush_cache", {})
        await self._label(step, UNSYNCED)
        try:
            await self.post(step, "/begin_weight_update", {})
        except WeightSyncError as error:
            if _OPEN_SESSION not in str(error):
                raise
            await self.post(step, "/end_weight_update", {})
            await self.post(step, "/begin_weight_update", {})

    async def end_update(self, version: int) -> None:
        """Takes the new weights into use as `version`; sampling waits for `resume`. Raises as `post`."""
        await self.post("end", "/end_weight_update", {})
        await self._label("end", str(version))

    async def resume(self) -> None:
        """Has the server sample again. Raises as `post`."""
        await self._take_back("resume", _CACHE)
        await self.post("resume", "/continue_generation", {})

    async def post(self, step: str, path: str, body: Mapping[str, Any], seconds: float | None = None) -> None:
        """Makes one call.

        Raises:
            WeightSyncError: the server did not say in time that it succeeded.
        """
        try:
            content = await self.http.call_once(path, body, MAX_SAID_BYTES, seconds or self.seconds, admin=True)
        except EngineError as error:
            raise self.failed(step, path, str(error)) from error
        said = content[:500].decode(errors="replace")
        if content.startswith(b"{"):
            try:
                answer = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise self.failed(step, path, said) from error
            if answer.get("success") is False:
                raise self.failed(step, path, said)

    def failed(self, step: str, path: str, seen: str) -> WeightSyncError:
        return WeightSyncError(
            f"weight update: server {self.name!r}, {step}: {path} failed",
            seen=seen,
            expected=f"success within {self.seconds} s",
            remedy="look at the server's log; a server that no longer answers is started again",
        )

    async def _take_back(self, step: str, tag: str) -> None:
        if tag in self._given:
            await self.post(step, "/resume_memory_occupation", {"tags": [tag]})
            self._given.remove(tag)

    async def _label(self, step: str, version: str) -> None:
        await self.post(step, "/update_weight_version", {"new_version": version, "abort_all_requests": False})
