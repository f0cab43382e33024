"""Duration of a step, and age of its tokens: a simulation of engines and a trainer around the real queue.

Time runs from event to event: a response ends, a batch is trained, engines hold new weights. Slots, window and batches
are those of `GroupQueue`, so ages and dropped groups are those that a run would have with these lengths and times. An
engine decodes one token of each of its n responses in ``decode_step + n decode_row`` seconds; it stands still while it
prefills, while it receives new weights, and while it computes interrupted responses again. A response may be an episode
of several turns: no engine has a place taken by it while its environment works. Pure; any process.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from moerl.buffer.queue import GroupQueue, GroupState, QueueLimits
from moerl.buffer.simulated_turns import Draw, SimulatedTurn


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of the parts of a step."""

    decode_step: float
    """Seconds of one token for all responses of an engine."""
    decode_row: float
    """Seconds more of one token for each response."""
    prefill_row: float
    """Seconds to prefill a prompt."""
    train_step: float
    """Seconds of training, whatever the batch is."""
    train_token: float
    """Seconds more for each trained token."""
    publish: float
    """Seconds from the end of training until engines hold the weights."""
    stall: float = 0.0
    """Seconds that an engine stands still for new weights."""
    recompute_token: float = 0.0
    """Seconds then for each token of a response in progress, if engines compute its keys and values again."""
    prefill_token: float = 0.0
    """Seconds to prefill a token behind the prompt: what the environment wrote, and with it all turns before if the
    engine does not have their keys and values any more."""


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Engines of a simulation."""

    engines: int
    """Engines that work at the same time."""
    max_running: int
    """Responses that an engine decodes together."""
    keeps_prefixes: bool = True
    """True if an engine keeps the keys and values of a turn for the next one, until weights change."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """Results of a simulated run; without its first quarter, unless a field says otherwise."""

    step_seconds: float
    """Mean seconds of a step."""
    tokens_per_second: float
    """Trained tokens in a second."""
    trainer_waits: float
    """Share of time in which the trainer has no batch."""
    engines_wait: float
    """Share of the whole run in which an engine has no response, mean over engines."""
    age_max: int
    """Largest age of a trained group by its oldest token, in versions."""
    age_mean: float
    """Mean of these ages."""
    left_out: float
    """Share of the tokens sampled in the whole run whose group was dropped."""


@dataclass(slots=True)
class _Response:
    """num_before: tokens of earlier turns, observations included. engine: of the latest turn. version: of the weights
    whose keys and values that engine keeps of it; -1 for none."""

    group: int
    turns: Sequence[SimulatedTurn]
    number: int = 0
    num_before: int = 0
    engine: int = -1
    version: int = -1

    @property
    def num_tokens(self) -> int:
        """Tokens of its present turn."""
        return self.turns[self.number].num_tokens

    def prefill_seconds(self, costs: StepCosts, version: int) -> float:
        """Returns the time of an engine with weights of this version to prefill its present turn."""
        if self.number and self.version == version:
            return costs.prefill_token * self.turns[self.number - 1].num_observed
        return costs.prefill_row + costs.prefill_token * self.num_before


@dataclass(slots=True)
class _Group:
    """Responses to one prompt. version: oldest version that sampled one of its tokens; -1 before there is a token."""

    num_tokens: int
    num_left: int
    version: int = -1


@dataclass(slots=True)
class _Engine:
    """State of an engine. tokens: number that a response would have that ran since time 0. stamp: number of its latest
    plan."""

    costs: StepCosts
    max_running: int
    tokens: float = 0.0
    running: list[tuple[float, int, _Response]] = field(default_factory=list[tuple[float, int, _Response]])
    waiting: deque[_Response] = field(default_factory=deque[_Response])
    now: float = 0.0
    ready_at: float = 0.0
    idle_seconds: float = 0.0
    stamp: int = 0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def token_seconds(self) -> float:
        return self.costs.decode_step + len(self.running) * self.costs.decode_row

    def advance(self, now: float) -> None:
        """Decodes, or waits, until `now`."""
        if not self.running:
            self.idle_seconds += now - self.now
        elif self.token_seconds > 0:
            self.tokens += max(0.0, now - max(self.now, self.ready_at)) / self.token_seconds
        elif now >= self.ready_at:
            # Tokens that cost nothing are there at once: a fit may say so if prompts cost all.
            self.tokens = max(self.tokens, self.running[0][0])
        self.now = now

    def admit(self, order: itertools.count[int], version: int) -> list[_Response]:
        """Gives places to waiting responses, and returns those that got one. version: of its weights."""
        admitted: list[_Response] = []
        while self.waiting and len(self.running) < self.max_running:
            response = self.waiting.popleft()
            heapq.heappush(self.running, (self.tokens + response.num_tokens, next(order), response))
            admitted.append(response)
        self.stand_still(sum(response.prefill_seconds(self.costs, version) for response in admitted))
        return admitted

    def stand_still(self, seconds: float) -> None:
        self.ready_at = max(self.ready_at, self.now) + seconds

    @property
    def tokens_under_way(self) -> float:
        """Tokens that its running responses have so far."""
        return sum(self.tokens - end + response.num_tokens + response.num_before for end, _, response in self.running)

    @property
    def next_end(self) -> float:
        """Time at which its next response ends, if nothing happens before."""
        return max(self.now, self.ready_at) + max(0.0, self.running[0][0] - self.tokens) * self.token_seconds


_TRAINER, _ENVIRONMENT = -1, -2
"""Sources of events besides engines."""


class _Simulation:
    def __init__(
        self, limits: QueueLimits, fleet: SimulatedFleet, costs: StepCosts, group_size: int, episode: Draw
    ) -> None:
        self.limits, self.costs, self.group_size, self.episode = limits, costs, group_size, episode
        self.fleet = fleet
        self.queue, self.groups = GroupQueue(limits), dict[int, _Group]()
        self.engines = [_Engine(costs, fleet.max_running) for _ in range(fleet.engines)]
        self.order = itertools.count()
        # Time, order, engine and the stamp of its plan; or `_TRAINER`; or `_ENVIRONMENT` and a key of `acting`.
        self.events: list[tuple[float, int, int, int]] = []
        # Episodes whose environments work.
        self.acting: dict[int, _Response] = {}
        # Versions of the trainer and of engines.
        self.version = self.engine_version = 0
        self.now = self.waiting_since = 0.0
        self.ages: list[tuple[int, int]] = []
        self.step_ends: list[float] = []
        self.waited: list[float] = []
        self.trained: list[int] = []
        self.sampled = self.left_out = 0
        self.is_training = False

    def run(self, num_steps: int) -> None:
        self._dispatch()
        while len(self.step_ends) < num_steps:
            self.now, _, source, stamp = heapq.heappop(self.events)
            if source == _TRAINER:
                self._end_step()
                self._train()
                continue
            if source == _ENVIRONMENT:
                has_finished = self._go_on(self.acting.pop(stamp))
            else:
                has_finished = stamp == self.engines[source].stamp and self._end_turn(source)
            if has_finished and not self.is_training:
                self._train()

    def _dispatch(self) -> None:
        if self.queue.num_free <= 0:
            return
        touched: set[int] = set()
        loads = [(engine.load, index) for index, engine in enumerate(self.engines)]
        heapq.heapify(loads)
        while self.queue.num_free > 0:
            number, episodes = self.queue.dispatch(), [self.episode() for _ in range(self.group_size)]
            self.groups[number] = _Group(sum(turn.num_tokens for each in episodes for turn in each), self.group_size)
            for turns in episodes:
                load, index = loads[0]
                heapq.heapreplace(loads, (load + 1, index))
                self.engines[index].waiting.append(_Response(number, turns, engine=index))
                touched.add(index)
        for index in sorted(touched):
            self._plan(index)

    def _plan(self, index: int) -> None:
        """Has an engine admit waiting responses, and queues the event of its next end of a response."""
        engine = self.engines[index]
        engine.advance(self.now)
        for response in engine.admit(self.order, self.engine_version):
            group = self.groups[response.group]
            # Versions only grow: the first token of a group is its oldest.
            group.version = self.engine_version if group.version < 0 else group.version
        engine.stamp += 1
        if engine.running:
            heapq.heappush(self.events, (engine.next_end, next(self.order), index, engine.stamp))

    def _end_turn(self, index: int) -> bool:
        """Ends the next turn of an engine; returns whether it was the last of its group."""
        engine = self.engines[index]
        engine.advance(self.now)
        _, _, response = heapq.heappop(engine.running)
        turn = response.turns[response.number]
        self.sampled += turn.num_tokens
        response.number += 1
        response.num_before += turn.num_tokens + turn.num_observed
        response.version = self.engine_version if self.fleet.keeps_prefixes else -1
        has_finished = False
        if turn.environment_seconds > 0:
            key = next(self.order)
            self.acting[key] = response
            heapq.heappush(self.events, (self.now + turn.environment_seconds, key, _ENVIRONMENT, key))
        else:
            has_finished = self._go_on(response)
        self._plan(index)
        return has_finished

    def _go_on(self, response: _Response) -> bool:
        """Asks for the next turn of an episode, or ends it; returns whether it was the last of its group."""
        if response.number < len(response.turns):
            index = self._engine_for(response)
            self.engines[index].waiting.append(response)
            self._plan(index)
            return False
        group = self.groups[response.group]
        group.num_left -= 1
        if not group.num_left:
            self.queue.finish(response.group)
        return not group.num_left

    def _engine_for(self, response: _Response) -> int:
        """Returns the engine for the next turn: that of the turn before, or the least loaded if that one is busier by
        more than a quarter of its places. Another one has nothing of the episode."""
        loads = [engine.load for engine in self.engines]
        if loads[response.engine] > min(loads) + max(1, self.fleet.max_running // 4):
            response.engine, response.version = loads.index(min(loads)), -1
        return response.engine

    def _train(self) -> None:
        if self.limits.drops:
            for number in self.queue.numbers(GroupState.FINISHED):
                if self.version - self.groups[number].version > self.limits.max_age:
                    self.queue.filter(number)
                    self.left_out += self.groups.pop(number).num_tokens
            self._dispatch()
        numbers = self.queue.take()
        if not numbers:
            return
        self.is_training = True
        self.waited.append(self.now - self.waiting_since)
        groups = [self.groups.pop(number) for number in numbers]
        num_tokens = sum(group.num_tokens for group in groups)
        self.ages += [(len(self.step_ends), self.version - group.version) for group in groups]
        self.trained.append(num_tokens)
        ends = self.now + self.costs.train_step + self.costs.train_token * num_tokens
        ends += self.costs.publish if self._is_update_due(self.version + 1) else 0.0
        heapq.heappush(self.events, (ends, next(self.order), _TRAINER, 0))

    def _end_step(self) -> None:
        """Ends the training of a batch; engines get its weights if an update is due."""
        self.is_training, self.waiting_since = False, self.now
        self.version += 1
        self.step_ends.append(self.now)
        if not self._is_update_due(self.version):
            return
        self.engine_version = self.version
        self.queue.release(self.queue.numbers(GroupState.TAKEN))
        for index, engine in enumerate(self.engines):
            engine.advance(self.now)
            if engine.running:
                engine.stand_still(self.costs.stall + self.costs.recompute_token * engine.tokens_under_way)
                self._plan(index)
        self._dispatch()

    def _is_update_due(self, version: int) -> bool:
        return version % self.limits.update_every == 0


def simulate(
    limits: QueueLimits, fleet: SimulatedFleet, costs: StepCosts, *, group_size: int, episode: Draw, num_steps: int = 32
) -> Simulated:
    """Simulates `num_steps` steps, and returns the results.

    Args:
        group_size: episodes of a prompt.
        episode: draws an episode.
        num_steps: at least 8.
    """
    simulation = _Simulation(limits, fleet, costs, group_size, episode)
    simulation.run(num_steps)
    first = num_steps // 4
    began = simulation.step_ends[first - 1]
    seconds = simulation.now - began
    ages = [age for step, age in simulation.ages if step >= first]
    idle = sum(engine.idle_seconds for engine in simulation.engines) / len(simulation.engines)
    return Simulated(
        step_seconds=seconds / (num_steps - first),
        tokens_per_second=sum(simulation.trained[first:num_steps]) / seconds,
        trainer_waits=sum(simulation.waited[first:num_steps]) / seconds,
        engines_wait=idle / simulation.now,
        age_max=max(ages),
        age_mean=sum(ages) / len(ages),
        left_out=simulation.left_out / max(1, simulation.sampled),
    )
