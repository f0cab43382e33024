"""The trainer of a run: commands to all ranks, and one report made of their replies. Runs in the controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.config.ranks import RankConfig
from moerl.contract import commands
from moerl.contract.commands import AnyCommand
from moerl.contract.parallel import RankCoordinates
from moerl.contract.ports import PolicyEngine, UpdateDone
from moerl.contract.trainer import DeviceUse, PassReport, Stage, Traced, sum_reports
from moerl.contract.trajectory import ModelSpec
from moerl.errors import ending
from moerl.ranks.port import Ranks
from moerl.ranks.senders import RanksInTurn
from moerl.ranks.updates import LedUpdates


class TrainerGroup:
    """`moerl.contract.trainer.Trainer` over any placement of its ranks."""

    def __init__(self, config: RankConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, RanksInTurn(ranks)
        self._updates: LedUpdates | None = None
        self.coordinates: Sequence[RankCoordinates] = ()
        self.notes: Sequence[str] = ()
        self.shares_prompts = False

    @property
    def peak_rss_bytes(self) -> Sequence[int]:
        return self._ranks.peak_rss_bytes

    def device_use(self) -> Sequence[DeviceUse]:
        return [reply.device for reply in self._ranks.ask(commands.UseOfDevice()) if reply.device is not None]

    def profile(self, step: int) -> None:
        self._ranks.ask(commands.Profile(step))

    def build(self, stage: Stage, model: Path, spec: ModelSpec, engine: PolicyEngine | None = None) -> None:
        self._close_updates()
        if engine is not None:
            self._updates = LedUpdates(self._config, self._ranks, engine)
        receiver = None if self._updates is None else self._updates.receiver
        replies = self._ranks.ask(commands.Build(stage, str(model), spec, receiver))
        self.coordinates = tuple(reply.coordinates for reply in replies if reply.coordinates is not None)
        if self._updates is not None:
            self._updates.tensors = replies[0].tensors
        # Ranks have devices of one kind.
        self.notes, self.shares_prompts = tuple(replies[0].notes), replies[0].shares_prompts

    def load(self, minibatches: Sequence[Sequence[bytes]]) -> None:
        for number, frames in enumerate(minibatches):
            self._ranks.ask(commands.Load(number), frames)

    def score(self, minibatch: int, *, enforce: bool, prove: bool, full: bool = False) -> PassReport:
        return self._report(commands.Score(minibatch, enforce, prove, full))

    def prepare(self, minibatch: int, *, prove: bool) -> PassReport:
        return self._report(commands.Prepare(minibatch, prove))

    def step(self, minibatch: int, *, prove: bool, advantages: NDArray[np.float32] | None = None) -> PassReport:
        return self._report(commands.Step(minibatch, prove, advantages))

    def trace(self, microbatch: int) -> Traced:
        tables = [reply.tables for reply in self._ranks.ask(commands.Trace(microbatch))]
        recorded = [each[1] for each in tables if len(each) > 1]
        return Traced(np.concatenate([each[0] for each in tables]), np.concatenate(recorded) if recorded else None)

    def give_back(self, *, stage: bool) -> None:
        self._ranks.ask(commands.GiveBack(stage))

    def publish(self, version: int, *, verify: bool, done: UpdateDone) -> Callable[[], dict[str, float]]:
        assert self._updates is not None, "a stage without an engine"
        return self._updates.publish(version, verify=verify, done=done)

    def save(self, name: str, state: dict[str, Any], corrupt: Sequence[str] = ()) -> None:
        self._ranks.ask(commands.Save(name, state, list(corrupt)))

    def poll_save(self, *, wait: bool = False) -> None:
        self._ranks.ask(commands.PollSave(wait))

    def restore(self, checkpoint: Path) -> None:
        self._ranks.ask(commands.Restore(str(checkpoint)))

    def export(self, folder: Path, like: Path) -> None:
        self._ranks.ask(commands.Export(str(folder), str(like)))

    def rewrite(self, model: Path, checkpoint: Path, folder: Path) -> None:
        self._ranks.ask(commands.Rewrite(str(model), str(checkpoint), str(folder)))

    def close(self) -> None:
        with ending(self._close_updates):
            self._ranks.close()

    def _close_updates(self) -> None:
        updates, self._updates = self._updates, None
        if updates is not None:
            updates.close()

    def _report(self, command: AnyCommand) -> PassReport:
        return sum_reports([reply.report for reply in self._ranks.ask(command) if reply.report is not None])
