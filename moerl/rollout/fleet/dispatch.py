"""Choice of the server that gets a request. Pure; runs in the engine's event loop."""

from __future__ import annotations

from collections.abc import Mapping


def choose_server(loads: Mapping[str, int], home: str | None, max_running: int) -> str | None:
    """Returns the least loaded server, or the one with the prompt's prefix in its cache if that one is hardly busier.

    Args:
        loads: requests under way on each server that may get more, by name.
        home: the server that got the last request with the same prompt.
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
