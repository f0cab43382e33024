"""Ranks as actors of a Ray cluster: placed on its nodes, given commands, watched, and ended. Runs in the controller.

Commands and replies are the same byte strings as those of child processes. A frame goes into Ray's object store, and
each rank's node fetches its own. If a rank, an actor or a node is lost, or a rank is silent until the deadline of a
command, the controller raises one error that names the rank, and ends the others. Actors die with the controller,
however it dies.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from moerl.config.ranks import RankConfig
from moerl.contract.commands import Start, decode_reply
from moerl.errors import ConfigError, TrainerError, undoing
from moerl.ranks.away import CLOSING_SECONDS, GRACE_SECONDS, RankAway, RanksAway, rank_variables
from moerl.ranks.on_ray.actor import RankActor
from moerl.ranks.on_ray.cluster import Cluster, abandon_all, has_gpus
from moerl.ranks.on_ray.library import ActorUnavailableError, GetTimeoutError, RayError, first_line, ray, start_actor
from moerl.ranks.on_ray.messages import NodeFacts, RankProcessSettings, Versions
from moerl.ranks.on_ray.shared import note_ranks

START_SECONDS = 300.0
"""Seconds for all actors to start; the first imports come from a file system that others use, too."""
NODE_SECONDS = 40.0
"""Seconds for Ray to notice that a node is gone."""
END_SECONDS = 15.0
"""Seconds for processes that were killed to be gone."""
_POLL_SECONDS = 1.0
"""Seconds between checks for a signal or a deadline."""
_POLL_END_SECONDS = 0.05


class _Rank(RankAway):
    """The controller's side of one actor."""

    def __init__(self, rank: int, log: Path, options: dict[str, Any]) -> None:
        super().__init__(rank, log)
        self.actor = start_actor(RankActor, **options)
        self.facts: NodeFacts | None = None
        self.stream: Any = None

    def describe_end(self, live_nodes: Callable[[], set[str]]) -> str:
        """Returns how the rank ended, and on which node."""
        assert self.facts is not None
        node = self.facts.node
        try:
            how = ray.get(self.actor.how_ended.remote(), timeout=2 * GRACE_SECONDS).decode()
        except ActorUnavailableError as error:
            how = f"its actor ended: {first_line(error)}"
            # Ray does not know yet whether the node is gone.
            until = time.monotonic() + NODE_SECONDS
            while self.facts.node_id in live_nodes() and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
        except RayError as error:
            how = f"its actor ended: {first_line(error)}"
        return f"{how}, on {node}" if self.facts.node_id in live_nodes() else f"{node} has left the cluster"


class Actors(RanksAway[_Rank]):
    """`moerl.ranks.port.Ranks` as actors. Arguments as in `RanksAway`."""

    def __init__(self, config: RankConfig, watch: Callable[[int, int], None]) -> None:
        super().__init__(config, watch)
        # Ranks of a run before, whose controller was killed, end within seconds.
        held = _wait_until_free(sorted((config.run_dir / "logs").glob("rank-*.log")))
        if held:
            raise TrainerError(
                "a rank of this run directory is still at work", seen=f"{held[0]} is locked", remedy="end it first"
            )
        self._cluster = Cluster(config)
        with undoing(self._end):  # an interrupt, too, leaves none behind
            for rank, options in enumerate(self._cluster.reserve(len(self._logs))):
                self._ranks.append(_Rank(rank, self._logs[rank], options))
            self._start(config)

    # --- the start ---------------------------------------------------------------------------------------------------

    def _start(self, config: RankConfig) -> None:
        for rank, answer in zip(self._ranks, self._call("facts", START_SECONDS), strict=True):
            rank.facts = msgspec.json.decode(answer, type=NodeFacts)
            _check_node(rank.rank, rank.facts)
        note_ranks([rank.facts for rank in self._ranks if rank.facts is not None])
        rendezvous = self._call("listen", START_SECONDS, only=1)[0].decode()
        # A rank with a GPU of its own sees no other.
        on_gpus, text = has_gpus(), config.model_dump_json()
        shared = [[rank] if on_gpus else self._sharing(rank) for rank in self._ranks]
        places: list[bytes] = []
        for rank, sharing in zip(self._ranks, shared, strict=True):
            variables = rank_variables(config, rank.rank, sharing.index(rank))
            places.append(msgspec.json.encode(RankProcessSettings(str(rank.log.absolute()), variables)))
        self._call("start", START_SECONDS, places)
        self._tell([Start(text, rank, rendezvous, len(sharing)) for rank, sharing in enumerate(shared)])
        self.replies()

    def _sharing(self, rank: _Rank) -> list[_Rank]:
        """Returns the ranks on a rank's node, itself included."""
        assert rank.facts is not None
        node_id = rank.facts.node_id
        return [each for each in self._ranks if each.facts is not None and each.facts.node_id == node_id]

    def _call(
        self, method: str, seconds: float, arguments: Sequence[bytes] = (), only: int | None = None
    ) -> list[bytes]:
        """Calls a method that is no command of the first `only` actors, or of all, and returns the answers."""
        asked = self._ranks[:only]
        calls = [
            getattr(rank.actor, method).remote(*arguments[rank.rank : rank.rank + 1 if arguments else 0])
            for rank in asked
        ]
        until, answers = time.monotonic() + seconds, list[bytes]()
        for rank, call in zip(asked, calls, strict=True):
            try:
                answers.append(ray.get(call, timeout=max(0.0, until - time.monotonic())))
            except GetTimeoutError as error:
                raise self._lost(rank, method, f"no answer within {seconds:g} s", "an answer") from error
            except RayError as error:
                raise self._lost(rank, method, first_line(error), "an answer") from error
        return answers

    # --- one command -------------------------------------------------------------------------------------------------

    def _send(self, rank: _Rank, message: bytes, frame: bytes) -> None:
        # An argument by reference: the rank's node fetches it, and it is gone with the command.
        rank.stream = rank.actor.run.options(num_returns="streaming").remote(message, ray.put(frame) if frame else b"")

    def _exchange(self, command: str) -> None:
        until = time.monotonic() + self._seconds
        has_failed = False
        while waiting := [rank for rank in self._ranks if rank.is_waited_for]:
            left = until - time.monotonic()
            ready, _ = ray.wait([rank.stream for rank in waiting], timeout=max(0.0, min(left, _POLL_SECONDS)))
            if not ready and left <= 0:
                raise self._failure(command)
            for rank in waiting:
                if not any(rank.stream is stream for stream in ready):
                    continue
                try:
                    reply = decode_reply(ray.get(next(rank.stream)))
                except (StopIteration, RayError):
                    rank.is_gone = True
                else:
                    self._note(rank, reply)
            if not has_failed and self._has_failure():
                has_failed, until = True, min(until, time.monotonic() + GRACE_SECONDS)

    def _how_ended(self, rank: _Rank) -> str:
        for other in self._ranks:
            if other is not rank:
                ray.kill(other.actor)
        return rank.describe_end(self._cluster.live_nodes)

    def _where(self, rank: _Rank) -> str:
        assert rank.facts is not None
        return f", on {rank.facts.node}"

    def _await_ends(self) -> None:
        self._call("finish", CLOSING_SECONDS + GRACE_SECONDS)

    def _end(self) -> None:
        self._has_ended = True
        abandon_all()
        # Skipped if the cluster was left before. Killing an actor that is gone does nothing.
        for rank in self._ranks if ray.is_initialized() else ():
            ray.kill(rank.actor)
        _wait_until_free([log for log in self._logs if log.exists()])
        self._cluster.close()
        self._remove_empty_logs()


def _check_node(rank: int, facts: NodeFacts) -> None:
    """Raises `ConfigError` if a node has other versions than this one, or its Ray needs no token."""
    here = Versions.here()
    if facts.versions != here:
        raise ConfigError(
            f"launch: rank {rank}: {facts.node} has other versions than the controller",
            seen=facts.versions,
            expected=here,
            remedy="have all nodes use one environment",
        )
    if not facts.asks_token:
        raise ConfigError(
            f"launch: rank {rank}: the Ray of {facts.node} runs the code of anybody who reaches it",
            seen="no token authentication",
            expected="RAY_AUTH_MODE=token",
            remedy="start all nodes as docs/ray.md says",
        )


def _wait_until_free(logs: Sequence[Path]) -> list[Path]:
    """Waits until no process locks these logs; returns those that are still locked after `END_SECONDS`."""
    held, until = list(logs), time.monotonic() + END_SECONDS
    while held and time.monotonic() < until:
        held = [log for log in held if _is_held(log)]
        if held:
            time.sleep(_POLL_END_SECONDS)
    return held


def _is_held(log: Path) -> bool:
    with log.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
