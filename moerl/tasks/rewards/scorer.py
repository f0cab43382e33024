"""The rewards of a response, from one or several parts: each under its name, and their weighted sum. Runs in the
controller."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from moerl.contract.ports import Prompt
from moerl.errors import MoerlError, RewardError
from moerl.tasks.rewards.pool import RewardPool
from moerl.tasks.rewards.process import UNSCORED, MakeChild, Rewards
from moerl.telemetry.terminal import excerpt


class RewardPart(Protocol):
    """A source of rewards; its methods do not wait for rewards."""

    def submit(self, prompt: Prompt, response: str) -> Future[Rewards]:
        """Asks for named rewards, `reward` and `accuracy` among them; returns at once. The future raises `RewardError`
        if this response has none, `ConfigError` if no response can have one."""
        ...

    def close(self) -> None:
        """Ends its threads and processes. Calls under way fail, those that wait are cancelled."""


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One reward of several."""

    name: str
    """Name in `task.rewards`; empty for the only one, whose rewards are the task's as they are."""
    weight: float
    """Factor in the sum that is trained on; any sign, 0 = not trained on."""
    source: RewardPart
    """Gives the rewards."""


class RewardScorer:
    """All rewards of a task.

    Args:
        parts: at least one.
        accuracy: name of the part whose accuracy is reported.

    Attributes:
        num_processes: processes that functions of all parts run in, at most.
    """

    def __init__(self, parts: Sequence[WeightedReward], accuracy: str = "") -> None:
        self._parts, self._accuracy = parts, accuracy
        self._pools = [part.source for part in parts if isinstance(part.source, RewardPool)]
        self.num_processes = sum(pool.num_processes for pool in self._pools)

    def score(self, prompt: Prompt, place: str, response: str) -> Future[Rewards]:
        """Asks for the rewards of a response: `reward`, the weighted sum, `accuracy`, and each part under its name.
        Returns at once.

        If a part fails, the future raises `RewardError` with the part's name and the row: a sum without it would be
        another reward. No part sees half a surrogate pair, which is no text to a process or server.

        Args:
            place: place of the prompt's row, for messages.
        """
        text = response.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        asked = [part.source.submit(prompt, text) for part in self._parts]
        return _Sum(asked, lambda: self._total(asked, prompt, place, text))

    def _total(self, parts: Sequence[Future[Rewards]], prompt: Prompt, place: str, response: str) -> Rewards:
        """Returns the rewards of a response whose parts are all done. Raises as the future of `score`."""
        found = dict[str, Rewards]()
        for part, future in zip(self._parts, parts, strict=True):
            try:
                found[part.name] = future.result()
            except RewardError as error:
                raise _with_place(error, part.name, prompt, place, response) from error
            except MoerlError:
                raise
            except Exception as error:
                # The error comes from the part's own thread: it fails a sample, and not the waiting thread.
                seen = f"{type(error).__name__}: {excerpt(str(error))}"
                failed = RewardError("the reward raised", seen=seen, expected="a reward", remedy="look at the response")
                raise _with_place(failed, part.name, prompt, place, response) from error
        if "" in found:
            return found[""]
        rewards = {
            "reward": sum(_share(part.weight, found[part.name]) for part in self._parts),
            "accuracy": found[self._accuracy]["accuracy"],
        }
        for name, values in found.items():
            rewards[name] = values["reward"]
            rewards |= {f"{name}.{key}": each for key, each in values.items() if key not in ("reward", "accuracy")}
        return rewards

    def place(self, make_child: MakeChild) -> None:
        """Places the processes of all parts, as `RewardPool.place` does those of one."""
        for pool in self._pools:
            pool.place(make_child)

    def close(self) -> None:
        """Ends the threads and processes of all parts."""
        for part in self._parts:
            part.source.close()


def _share(weight: float, rewards: Rewards) -> float:
    """Returns the summand of a part; the least possible one if the response kept the part from scoring it, so that no
    response escapes a penalty."""
    return min(0.0, weight) if rewards.get(UNSCORED) else weight * rewards["reward"]


class _Sum(Future[Rewards]):
    """Future of all parts: done once they are done, with what `total` returns; its `cancel` cancels them."""

    def __init__(self, parts: Sequence[Future[Rewards]], total: Callable[[], Rewards]) -> None:
        super().__init__()
        self._parts, self._total, self._num_left = parts, total, len(parts)
        self._lock = threading.Lock()
        for part in parts:
            part.add_done_callback(self._count)

    def cancel(self) -> bool:
        for part in self._parts:
            part.cancel()
        return super().cancel()

    def _count(self, _: Future[Rewards]) -> None:
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last and any(part.cancelled() for part in self._parts):
            super().cancel()
        if not is_last or self.cancelled() or not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(self._total())
        except Exception as error:  # noqa: BLE001 - thread boundary: whoever asked for the reward gets it
            self.set_exception(error)


def _with_place(error: RewardError, name: str, prompt: Prompt, place: str, response: str) -> RewardError:
    row = excerpt(json.dumps(prompt.facts, ensure_ascii=False), 200)
    return RewardError(
        (f"reward {name}: " if name else "") + f"{error.what} at {place}",
        seen=f"{error.seen}; row: {row}; response: '{excerpt(response, 80)}'",
        expected=error.expected,
        remedy=error.remedy,
        reward=name,
    )
