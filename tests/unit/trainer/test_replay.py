"""Replay that does not happen, or not everywhere, is refused before the update, and leaves the weights alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_moe
import torch
from ranks import Ranks
from replay_steps import assert_same_weights, make_batches, refusal_of, step

from moerl.errors import ReplayError


def take_the_hook_out(trainer: Any) -> Callable[[], None]:
    router = trainer.model.chunks[0].decoder.layers[2].mlp.router
    hook, router.router_replay = router.router_replay, None
    return lambda: setattr(router, "router_replay", hook)


def take_the_hook_out_in_the_second_microbatch(trainer: Any) -> Callable[[], None]:
    """Removes a router's replay hook after its first call, like a fused path that is taken for some shapes only.
    Returns the function that puts it back."""
    router = trainer.model.chunks[0].decoder.layers[2].mlp.router
    routing, hook, calls = router.routing, router.router_replay, []

    def sometimes_fused(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        router.router_replay = hook if len(calls) == 1 else None
        return routing(*args, **kwargs)

    router.routing = sometimes_fused

    def restore() -> None:
        del router.routing
        router.router_replay = hook

    return restore


def change_the_map_after_the_hook(trainer: Any) -> Callable[[], None]:
    router = trainer.model.chunks[0].decoder.layers[1].mlp.router
    routing = router.routing

    def rerouted(*args: Any, **kwargs: Any) -> Any:
        probs, routing_map = routing(*args, **kwargs)
        return probs.roll(1, 0), routing_map.roll(1, 0)

    router.routing = rerouted
    return lambda: delattr(router, "routing")


def dispatch_behind_the_checksum(trainer: Any) -> Callable[[], None]:
    dispatcher = trainer.model.chunks[0].decoder.layers[1].mlp.token_dispatcher
    observed = dispatcher.__dict__.pop("dispatch_preprocess")
    return lambda: setattr(dispatcher, "dispatch_preprocess", observed)


def swap_the_hooks_of_two_layers(trainer: Any) -> Callable[[], None]:
    first, second = (trainer.model.chunks[0].decoder.layers[i].mlp.router for i in (0, 1))

    def swap() -> None:
        first.router_replay, second.router_replay = second.router_replay, first.router_replay

    swap()
    return swap


def check_sabotaged(layout: Any, path: Path, sabotage: Any, recompute: str) -> str:
    return refusal_of(layout, path, make_batches(11), recompute, sabotage)


@pytest.mark.parametrize(
    ("sabotage", "message"),
    [
        (take_the_hook_out, "layer 3 dispatched tokens without asking"),
        (take_the_hook_out_in_the_second_microbatch, "layer 3 dispatched tokens without asking"),
        (change_the_map_after_the_hook, "layer 2, rank 0, microbatch 0, forward: checksum"),
        (dispatch_behind_the_checksum, "0 calls"),
        (swap_the_hooks_of_two_layers, "layer 1 dispatched tokens without asking"),
    ],
)
def test_a_router_that_bypasses_replay_is_refused(
    sabotage: Any, message: str, untied: Path, one_process: Ranks
) -> None:
    (refusal,) = one_process.run(check_sabotaged, untied, sabotage, "none")
    assert message in refusal


def recompute_naturally(trainer: Any) -> Callable[[], None]:
    """Replays the forward pass and lets the recomputed one choose for itself."""
    router = trainer.model.chunks[0].decoder.layers[1].mlp.router
    hook = router.router_replay

    def get_replay_topk(scores: Any, *args: Any) -> Any:
        replayed = hook.get_replay_topk(scores, *args)
        return scores.topk(replayed[1].shape[1]) if torch.is_grad_enabled() else replayed

    router.router_replay = SimpleNamespace(get_replay_topk=get_replay_topk)
    return lambda: setattr(router, "router_replay", hook)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_that_does_not_replay_is_refused(recompute: str, untied: Path, one_process: Ranks) -> None:
    (refusal,) = one_process.run(check_sabotaged, untied, recompute_naturally, recompute)
    assert "layer 2, rank 0, microbatch 0, recompute: checksum" in refusal


def cut_a_router_off(trainer: Any) -> Callable[[], None]:
    """Replay as recorded, with probabilities that lead nowhere."""
    router = trainer.model.chunks[0].decoder.layers[1].mlp.router
    routing = router.routing

    def detached(*args: Any, **kwargs: Any) -> Any:
        probs, routing_map = routing(*args, **kwargs)
        return probs.detach(), routing_map

    router.routing = detached
    return lambda: delattr(router, "routing")


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_router_without_gradient_is_refused(recompute: str, untied: Path, one_process: Ranks) -> None:
    (refusal,) = one_process.run(check_sabotaged, untied, cut_a_router_off, recompute)
    assert "the router of layer 2 is dead" in refusal


def step_frozen(layout: Any, path: Path) -> None:
    trainer = tiny_moe.build(layout, path, train_router=False)
    assert step(trainer, make_batches(11)).rows_verified > 0


def test_a_frozen_router_needs_no_gradient(untied: Path, one_process: Ranks) -> None:
    one_process.run(step_frozen, untied)


# --- nothing outlives a schedule -------------------------------------------------------------------------------------


def check_forward_only(layout: Any, path: Path, recompute: str) -> None:
    from moerl.trainer.losses import Scorer

    disturbed, plain = (tiny_moe.build(layout, path, recompute=recompute) for _ in range(2))
    for seed in (21, 22):
        batches = make_batches(seed)
        disturbed.score(batches, Scorer(batches, keep_mask=True), enforce=True)
        disturbed.last_hidden(batches, enforce=True)
        reports = [step(each, batches) for each in (disturbed, plain)]
        assert reports[0].rows_verified == reports[1].rows_verified > 0
    assert_same_weights(tiny_moe.exported(disturbed), tiny_moe.exported(plain))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_forward_only_pass_leaves_nothing_for_the_next_step(recompute: str, untied: Path, one_process: Ranks) -> None:
    one_process.run(check_forward_only, untied, recompute)


class InterruptionError(Exception):
    pass


def check_interrupted(layout: Any, path: Path, recompute: str) -> None:
    interrupted, plain = (tiny_moe.build(layout, path, recompute=recompute) for _ in range(2))
    batches = make_batches(23)
    loss = tiny_moe.policy_loss(interrupted, batches, tiny_moe.num_trained(batches))

    def failing_loss(hidden_tH: Any, head: Any, microbatch: int) -> Any:
        if microbatch == 1:
            raise InterruptionError
        return loss(hidden_tH, head, microbatch)

    for run in (interrupted.score, interrupted.step):
        with pytest.raises(InterruptionError):
            run(batches, failing_loss, enforce=True)
    for each in (interrupted, plain):
        step(each, make_batches(24))
    assert_same_weights(tiny_moe.exported(interrupted), tiny_moe.exported(plain))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_an_exception_in_mid_schedule_leaves_nothing_for_the_next_step(
    recompute: str, untied: Path, one_process: Ranks
) -> None:
    one_process.run(check_interrupted, untied, recompute)


def check_open_schedule(layout: Any, path: Path) -> str:
    from moerl.trainer.replay import Replay

    trainer = tiny_moe.build(layout, path, optimizer=None)
    batches = make_batches(25)
    with (
        trainer.keep_routing.schedule(batches, Replay(enforce=True), training=False),
        pytest.raises(ReplayError) as caught,
        trainer.keep_routing.schedule(batches, Replay(enforce=True), training=False),
    ):
        pass
    return str(caught.value)


def test_a_second_schedule_on_one_model_is_refused(untied: Path, one_process: Ranks) -> None:
    (refusal,) = one_process.run(check_open_schedule, untied)
    assert "open already" in refusal


def check_several_models(layout: Any, path: Path) -> None:
    alone = tiny_moe.build(layout, path)
    step(alone, make_batches(26))
    expected = tiny_moe.exported(alone)
    dead = tiny_moe.build(layout, path, optimizer=None)
    policy = tiny_moe.build(layout, path)
    reference = tiny_moe.build(layout, path, optimizer=None)
    del dead
    batches = make_batches(26)
    loss = tiny_moe.policy_loss(policy, batches, tiny_moe.num_trained(batches))

    def with_reference(hidden_tH: Any, head: Any, microbatch: int) -> Any:
        # Another microbatch than the policy's, so that replay landing on the other model's routers would show.
        other = batches[microbatch - 1]
        (hidden,) = reference.last_hidden([other], enforce=True)
        assert len(hidden) == other.num_rows
        return loss(hidden_tH, head, microbatch)

    assert policy.step(batches, with_reference, enforce=True).rows_verified > 0
    assert_same_weights(tiny_moe.exported(policy), expected)


def test_a_reference_model_in_the_same_process_does_not_disturb_the_policy(untied: Path, one_process: Ranks) -> None:
    one_process.run(check_several_models, untied)


# --- start-up --------------------------------------------------------------------------------------------------------


def refuse_at_start(layout: Any, path: Path) -> dict[str, str]:
    from moerl.contract.trajectory import ModelSpec
    from moerl.trainer.replay import KeepRouting
    from moerl.trainer.routers import refuse_unsupported_routers

    trainer = tiny_moe.build(layout, path, optimizer=None)
    chunks, config = trainer.model.chunks, trainer.model.config
    refusals = {}
    with pytest.raises(ReplayError) as caught:
        KeepRouting(chunks, config, tiny_moe.SPEC, layout)
    refusals["hook"] = str(caught.value)
    for layer in chunks[0].decoder.layers:
        layer.mlp.router.router_replay = None
    with pytest.raises(ReplayError) as caught:
        KeepRouting(chunks, config, ModelSpec(5, 2, 8, 91), layout)
    refusals["layers"] = str(caught.value)
    refuse_unsupported_routers(config)
    return refusals


def test_a_model_that_is_hooked_already_or_has_other_layers_is_refused(untied: Path, one_process: Ranks) -> None:
    (refusals,) = one_process.run(refuse_at_start, untied)
    assert "has a replay hook already" in refusals["hook"]
    assert "[0, 1, 2, 3]" in refusals["layers"]
    assert "0..4" in refusals["layers"]
