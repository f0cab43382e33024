"""The simulation of a run: its times are those of arithmetic where that is easy, its ages those of the queue."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.buffer.queue import QueueLimits
from moerl.buffer.simulated_turns import Draw, SimulatedTurn, drawn_from, in_turns, long_tailed
from moerl.buffer.simulation import Simulated, SimulatedFleet, StepCosts, simulate

COSTS = StepCosts(decode_step=1.0, decode_row=0.0, prefill_row=0.0, train_step=30.0, train_token=0.0, publish=2.0)


def always(*lengths: int) -> Draw:
    endless = itertools.cycle(lengths)
    return lambda: [SimulatedTurn(next(endless))]


def test_without_staleness_a_step_is_the_sum_of_its_parts() -> None:
    found = simulate(QueueLimits(4), SimulatedFleet(1, 8), COSTS, group_size=2, episode=always(10, 20), num_steps=8)
    assert found.step_seconds == pytest.approx(20 + 30 + 2)
    assert found.trainer_waits == pytest.approx(20 / 52)
    assert found.engines_wait == pytest.approx(32 / 52)
    assert (found.age_max, found.age_mean, found.left_out) == (0, 0.0, 0.0)
    assert found.tokens_per_second == pytest.approx(4 * 30 / 52)


def test_what_a_response_adds_to_a_token_and_a_prompt_to_a_step_is_counted() -> None:
    costs = StepCosts(1.0, 0.5, 3.0, 1.0, 0.25, 0.0)
    found = simulate(QueueLimits(2), SimulatedFleet(1, 4), costs, group_size=2, episode=always(10), num_steps=8)
    # Four responses: 12 s of prompts, 10 tokens at 3 s, 40 trained tokens.
    assert found.step_seconds == pytest.approx(4 * 3 + 10 * (1 + 4 * 0.5) + 1 + 40 * 0.25)
    # Two at a time: each turn has 6 s of prompts and 10 tokens at 2 s.
    in_turns = simulate(QueueLimits(2), SimulatedFleet(1, 2), costs, group_size=2, episode=always(10), num_steps=8)
    assert in_turns.step_seconds == pytest.approx(2 * (2 * 3 + 10 * 2) + 1 + 10)


def test_what_an_update_interrupts_is_computed_again():
    limits = QueueLimits(1, max_staleness=1)

    def step_seconds(recompute_token: float) -> float:
        costs = StepCosts(1.0, 0.0, 0.0, 5.0, 0.0, 0.0, recompute_token=recompute_token)
        return simulate(
            limits, SimulatedFleet(1, 2), costs, group_size=1, episode=always(10), num_steps=16
        ).step_seconds

    # Two responses of 10 tokens are 5 s apart, and trained one after the other in 5 s each.
    assert step_seconds(0.0) == pytest.approx((10 + 5) / 2)
    # Every second update finds one of them with 5 tokens.
    assert step_seconds(0.5) == pytest.approx((10 + 5 + 5 * 0.5) / 2)


def test_steps_that_engines_are_not_told_of_take_no_time_for_weights_and_interrupt_nothing() -> None:
    costs = StepCosts(1.0, 0.0, 0.0, 5.0, 0.0, publish=2.0, stall=4.0)

    def run(update_every: int) -> Simulated:
        limits = QueueLimits(1, max_staleness=3, update_every=update_every)
        return simulate(limits, SimulatedFleet(1, 4), costs, group_size=1, episode=always(1), num_steps=16)

    # Engines wait for the trainer.
    assert [run(every).step_seconds for every in (1, 2, 4)] == pytest.approx([5 + 2, 5 + 2 / 2, 5 + (2 + 1) / 4])
    assert [run(every).age_max for every in (1, 2, 4)] == [3, 3, 3]
    assert [run(every).age_mean for every in (1, 2, 4)] == pytest.approx([3, 2.5, 1.5], abs=0.05)


def step_of(costs: StepCosts, fleet: SimulatedFleet, *episodes: Sequence[SimulatedTurn]) -> float:
    """Returns the time of sampling a group of these episodes, and of nothing else."""
    endless = itertools.cycle(episodes)
    found = simulate(QueueLimits(1), fleet, costs, group_size=len(episodes), episode=lambda: next(endless), num_steps=8)
    return found.step_seconds - costs.train_step - costs.publish


def test_an_episode_has_no_place_in_an_engine_while_its_environment_works() -> None:
    episode = [SimulatedTurn(10, environment_seconds=5.0), SimulatedTurn(10)]
    assert step_of(COSTS, SimulatedFleet(1, 1), episode) == pytest.approx(10 + 5 + 10)
    assert step_of(COSTS, SimulatedFleet(1, 2), episode, episode) == pytest.approx(10 + 5 + 10)
    # In one place, the other one's first turn takes the time in which the environment works.
    assert step_of(COSTS, SimulatedFleet(1, 1), episode, episode) == pytest.approx(4 * 10)
    last = [*episode[:1], SimulatedTurn(10, environment_seconds=7.0)]
    assert step_of(COSTS, SimulatedFleet(1, 1), last) == pytest.approx(10 + 5 + 10 + 7)


PREFILLS = StepCosts(1.0, 0.0, 3.0, 30.0, 0.0, 0.0, prefill_token=0.5)
"""3 s for a prompt, half a second for a token behind it."""


def test_a_turn_prefills_what_is_new_if_its_engine_keeps_prefixes_and_else_everything() -> None:
    episode = [SimulatedTurn(10, 4, 5.0), SimulatedTurn(10)]
    assert step_of(PREFILLS, SimulatedFleet(1, 1), episode) == pytest.approx(3 + 10 + 5 + 4 * 0.5 + 10)
    without = SimulatedFleet(1, 1, keeps_prefixes=False)
    assert step_of(PREFILLS, without, episode) == pytest.approx(3 + 10 + 5 + 3 + 14 * 0.5 + 10)


def test_an_engine_that_is_much_busier_loses_its_episode_and_the_other_one_has_nothing_of_it() -> None:
    long, short = [SimulatedTurn(10, 0, 0.5), SimulatedTurn(30)], [SimulatedTurn(1)]
    others = [SimulatedTurn(10)]
    # Two of the others wait for the first engine when the environment is done; the second engine idles.
    seconds = step_of(PREFILLS, SimulatedFleet(2, 1), long, short, others, short, others)
    assert seconds == pytest.approx(3 + 10 + 0.5 + 3 + 10 * 0.5 + 30)


def test_what_an_engine_keeps_of_an_episode_is_of_no_use_once_weights_have_changed() -> None:
    def two_steps(prefill_token: float) -> float:
        costs = StepCosts(1.0, 0.0, 0.0, 30.0, 0.0, 0.0, prefill_token=prefill_token)
        turns = [SimulatedTurn(10, 0, 100.0), SimulatedTurn(10)]
        limits = QueueLimits(1, max_staleness=1)
        found = simulate(limits, SimulatedFleet(1, 2), costs, group_size=1, episode=lambda: turns, num_steps=16)
        return 2 * found.step_seconds

    # Two episodes are 30 s apart; the first has its second turn behind the update that the second one's slot waits for.
    assert two_steps(0.0) == pytest.approx(30 + 10 + 100 + 10)
    assert two_steps(0.5) == pytest.approx(30 + 10 + 100 + 10 * 0.5 + 10)


def test_the_episodes_of_a_benchmark_take_as_long_as_was_measured() -> None:
    """`bench/agents.py`: 1,000 episodes of four turns of 250 ms in 64 places, and 100 ms of a tool behind each."""
    results = json.loads((Path(__file__).parents[3] / "bench/results/agents-cpu.json").read_text())
    (measured,) = (each["value"] for each in results if each["name"].startswith("1000 sessions at once, tools"))
    episode = [SimulatedTurn(16, environment_seconds=0.1)] * 4
    costs = StepCosts(0.25 / 16, 0.0, 0.0, 1.0, 0.0, 0.0)
    found = simulate(
        QueueLimits(1), SimulatedFleet(1, 64), costs, group_size=1000, episode=lambda: episode, num_steps=8
    )
    assert (found.step_seconds - 1.0) / (1000 * 4 * 0.25 / 64) == pytest.approx(measured, rel=0.02)


def test_turns_share_the_tokens_of_a_response() -> None:
    draw = in_turns(drawn_from_lengths(10, 3, 1), 4, 7, 2.0, seed=1)
    first, second, third = draw(), draw(), draw()
    assert [turn.num_tokens for turn in first] == [2, 3, 2, 3]
    assert [turn.num_tokens for turn in second] == [1, 1, 1]
    assert [turn.num_tokens for turn in third] == [1]
    assert [turn.num_observed for turn in first] == [7, 7, 7, 0]
    assert first[-1].environment_seconds == 0.0
    seconds = [turn.environment_seconds for _ in range(3000) for turn in draw()[:-1]]
    assert sum(seconds) / len(seconds) == pytest.approx(2.0, rel=0.1)


def drawn_from_lengths(*lengths: int) -> Callable[[], int]:
    endless = itertools.cycle(lengths)
    return lambda: next(endless)


def test_tokens_may_cost_nothing() -> None:
    """Covers fits to few steps, which may attribute all of the cost to prompts."""
    costs = StepCosts(0.0, 0.0, 3.0, 5.0, 0.0, 1.0)
    found = simulate(QueueLimits(2), SimulatedFleet(1, 4), costs, group_size=2, episode=always(10, 20), num_steps=8)
    assert found.step_seconds == pytest.approx(4 * 3 + 5 + 1)
    ahead = simulate(
        QueueLimits(2, max_staleness=1), SimulatedFleet(1, 4), costs, group_size=2, episode=always(10), num_steps=8
    )
    assert 12 <= ahead.step_seconds < found.step_seconds


def test_with_staleness_a_step_takes_as_long_as_the_slower_side() -> None:
    def step_seconds(tokens: int) -> float:
        limits = QueueLimits(4, max_staleness=1)
        return simulate(
            limits, SimulatedFleet(1, 16), COSTS, group_size=2, episode=always(tokens), num_steps=8
        ).step_seconds

    assert step_seconds(20) == pytest.approx(32)
    # Two steps' worth is sampled at once, 100 s for both.
    assert step_seconds(100) == pytest.approx(66, rel=0.01)


def test_a_slow_response_holds_up_less_with_a_window_and_nothing_where_the_old_are_dropped() -> None:
    def run(limits: QueueLimits) -> tuple[float, float]:
        found = simulate(
            limits, SimulatedFleet(1, 64), COSTS, group_size=1, episode=always(*[20] * 37, 150), num_steps=120
        )
        assert found.age_max <= limits.max_age
        return found.step_seconds, found.left_out

    strict, nothing = run(QueueLimits(4, 2))
    windowed, still_nothing = run(QueueLimits(4, 2, window=8))
    dropping, some = run(QueueLimits(4, 2, drops=True))
    assert nothing == still_nothing == 0.0 < some
    assert strict > windowed > dropping


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 4),
    st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=3), min_size=1, max_size=8),
    st.sampled_from([0.0, 50.0]),
)
def test_no_simulated_age_is_above_the_bound_and_no_time_is_lost(
    per_step: int,
    staleness: int,
    window: int,
    drops: bool,
    engines: int,
    running: int,
    every: int,
    lengths: Sequence[Sequence[int]],
    seconds: float,
) -> None:
    limits = QueueLimits(per_step, staleness, 1 if drops else window, drops, min(every, staleness + 1))
    draw = drawn_from([[SimulatedTurn(n, n, seconds) for n in turns] for turns in lengths], seed=1)
    found = simulate(limits, SimulatedFleet(engines, running), COSTS, group_size=2, episode=draw, num_steps=12)
    assert found.age_max <= limits.max_age
    # Of the nine steps after the first quarter.
    busy = 30 + 2 * sum(version % limits.update_every == 0 for version in range(4, 13)) / 9
    assert found.step_seconds >= busy - 1e-9
    assert found.trainer_waits == pytest.approx(1 - busy / found.step_seconds, abs=0.05)
    assert drops or found.left_out == 0.0


def test_drawn_lengths_have_the_mean_that_is_asked_for_and_a_longest() -> None:
    draw = long_tailed(1000.0, 100_000, seed=1)
    drawn = [draw() for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(1000, rel=0.05)
    short = long_tailed(1000.0, 1500, seed=1)
    assert max(short() for _ in range(1000)) == 1500
