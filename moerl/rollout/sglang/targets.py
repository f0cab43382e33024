"""Servers as a process that sends weights sees them: one at a time, or all side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.rollout.sglang.weights import WeightLink

MESSAGE_BYTES = 256 << 20
"""Tensors are sent together until they reach this."""


def messages(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors; each message but the last reaches `MESSAGE_BYTES`."""
    message: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        message.append((name, tensor))
        size += tensor.numel() * tensor.element_size()
        if size >= MESSAGE_BYTES:
            yield message
            message, size = [], 0
    if message:
        yield message


def attempt(step: Callable[[WeightLink], None], link: WeightLink | None) -> WeightSyncError | None:
    """A step of an update on one server; why it failed."""
    if link is None:
        return WeightSyncError("weight update: the server was lost meanwhile")
    try:
        step(link)
    except WeightSyncError as error:
        return error
    except (RuntimeError, OSError, ValueError) as error:  # of torch's process groups, of a client closed meanwhile
        return WeightSyncError(f"weight update: {type(error).__name__}", seen=error, expected="a whole update")
    return None


def attempt_all[K](step: Callable[[WeightLink], None], links: dict[K, WeightLink]) -> dict[K, WeightSyncError]:
    """A step on several servers side by side; those that failed are taken out of `links` and left."""
    if not links:
        return {}
    with ThreadPoolExecutor(len(links)) as pool:
        errors = dict(zip(links, pool.map(lambda link: attempt(step, link), links.values()), strict=True))
    failed = {key: error for key, error in errors.items() if error is not None}
    for key in failed:
        links.pop(key).abandon()
    return failed
