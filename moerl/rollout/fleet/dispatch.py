"""Choice of the server that gets a request. Pure; runs in the engine's event loop."""

from __future__ import annotations

from collections.abc import Mapping

from moerl.contract.fields import Lineage


class Homes:
    """Servers that have prefixes of the requests of one stream in their caches."""

    def __init__(self) -> None:
        self._of_sessions: dict[str, str] = {}
        self._of_groups: dict[str, str] = {}

    def find(self, lineage: Lineage) -> str | None:
        """Returns the server that got the latest turn of the session; without one the latest of the session that it
        forks from; without one the latest request of the group, which has the same prompt. None if there is none."""
        sessions = self._of_sessions
        return (
            sessions.get(lineage.session)
            or sessions.get(lineage.parent_rollout_id)
            or self._of_groups.get(lineage.group_id)
        )

    def chose(self, lineage: Lineage, name: str) -> None:
        """Records the server that gets a request."""
        self._of_sessions[lineage.session] = self._of_groups[lineage.group_id] = name


def choose_server(loads: Mapping[str, int], home: str | None, max_running: int) -> str | None:
    """Returns the least loaded server, or the one with a prefix of the request if that one is hardly busier.

    Args:
        loads: requests under way on each server that may get more, by name.
        home: the server of `Homes.find`.
        max_running: requests that a server works on side by side.

    Returns:
        The server's name; None if all are full.
    """
    free = {name: load for name, load in loads.items() if load < max_running}
    if not free:
        return None
    # A prefill saved is worth some waiting, not a server that idles while another is full.
    slack = max(1, max_running // 4)
    if home in free and free[home] <= min(free.values()) + slack:
        return home
    return min(free, key=lambda name: (free[name], name))
