"""Fault injection: what goes wrong in a run on purpose. Called in the process of the run before it begins.

Places are named ``package.module:Class.method``; calls are counted from 1.
"""

from __future__ import annotations

import builtins
import errno
import functools
import importlib
import itertools
import math
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from process_tree import family, tell_all

from moerl.machine import stop_signals


def kill(place: str, *, call: int = 1, after: bool = False) -> None:
    """SIGKILL to this process at one call of `place`: before it runs, or after it returned.

    A checkpoint that another thread is writing is finished before, so that every kill leaves the same files; to kill
    in the midst of writing one, name a place there.
    """

    def at(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if after:
            original(*args, **kwargs)
        finish_checkpoints()
        os.kill(os.getpid(), signal.SIGKILL)

    _replace(place, at, call=call)


def tell(place: str, *, signal_name: str, call: int = 1, after: bool = False) -> None:
    """A signal to this process at one call of `place`: before it runs, or after it returned."""

    def at(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not after:
            os.kill(os.getpid(), getattr(signal, signal_name))
        result = original(*args, **kwargs)
        if after:
            os.kill(os.getpid(), getattr(signal, signal_name))
        return result

    _replace(place, at, call=call)


def tell_everyone(
    place: str, *, signal_names: Sequence[str] = ("SIGTERM",), call: int = 1, after: bool = False
) -> None:
    """Sends several signals to all processes of this run at one call of `place` (see `tell`), and prints their process
    ids. The signals are one request, however long the machine delays this process between them."""
    stop_signals.TOGETHER_SECONDS = math.inf

    def tell() -> None:
        pids = family(os.getpid())
        print("told", *pids, flush=True)
        tell_all(pids, [getattr(signal, name) for name in signal_names])

    def at(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not after:
            tell()
        result = original(*args, **kwargs)
        if after:
            tell()
        return result

    _replace(place, at, call=call)


def kill_scorer(*, call: int) -> None:
    """SIGKILL to the process of a model that scores, at one of its trajectories."""

    def at(original: Callable[..., Any], scorer: Any, trajectory: Any) -> Any:
        os.kill(scorer.pid, signal.SIGKILL)
        return original(scorer, trajectory)

    _replace("moerl.scorers.model:RemoteModel._score", at, call=call)


def finish_checkpoints() -> None:
    """Waits for checkpoints that other threads of this process are writing."""
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint-writer") and thread is not threading.current_thread():
            thread.join()


def kill_in_gather(*, update: int) -> None:
    """SIGKILL to this process in the midst of its part in one weight update, from 1: it has begun a transfer."""
    module = importlib.import_module("moerl.weights.gather")
    gather, start, updates, transfers = module.SenderGather.gather, module.SenderGather._start, 0, 0

    def counted(self: Any, *args: Any) -> Any:
        nonlocal updates
        updates += 1
        return gather(self, *args)

    def started(self: Any, *args: Any) -> None:
        nonlocal transfers
        start(self, *args)
        transfers += int(updates == update)
        if transfers == 1:
            finish_checkpoints()
            os.kill(os.getpid(), signal.SIGKILL)

    module.SenderGather.gather, module.SenderGather._start = counted, started


def hang(place: str, *, call: int) -> None:
    """One call of `place` does not come back."""
    _replace(place, lambda *args, **kwargs: threading.Event().wait(), call=call)


def fail(place: str, error: str, *, call: int = 1) -> None:
    """A built-in exception, by name, at one call of `place`."""

    def at(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise getattr(builtins, error)("injected")

    _replace(place, at, call=call)


def fill_disk(place: str, *, call: int = 1, room_bytes: int = 0) -> None:
    """From one call of `place` on no file of this process may grow beyond `room_bytes`."""

    def at(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        finish_checkpoints()
        resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return original(*args, **kwargs)

    _replace(place, at, call=call)


def turn_read_only(place: str, folder: str, *, call: int = 1) -> None:
    """From one call of `place` on nothing in `folder` can be made, opened for writing, renamed or removed by the Python
    code of this process, as on a file system that was mounted read-only."""
    makes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.chmod")
        if (changes or (event == "open" and args[2] & makes)) and str(args[0]).startswith(folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(args[0]))

    def at(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        finish_checkpoints()
        sys.addaudithook(refuse)
        return original(*args, **kwargs)

    _replace(place, at, call=call)


def set_value(place: str, *, value: Any) -> None:
    """A module's constant has another value."""
    module, _, name = place.partition(":")
    setattr(importlib.import_module(module), name, value)


def both(first: tuple[str, Mapping[str, Any]], second: tuple[str, Mapping[str, Any]]) -> None:
    """Two faults in one run."""
    for name, arguments in (first, second):
        globals()[name](**arguments)


def spoil_losses(*, calls: int) -> None:
    """The policy loss of the first `calls` microbatches is not a number."""
    module = importlib.import_module("moerl.trainer.losses")
    original, seen = module.PolicyGradientLoss.__call__, 0

    def loss(self: Any, hidden_tH: Any, head: Any, microbatch: int) -> Any:
        nonlocal seen
        seen += 1
        value, rows = original(self, hidden_tH, head, microbatch)
        return (value * float("nan") if seen <= calls else value), rows

    module.PolicyGradientLoss.__call__ = loss


def shift_routing(*, call: int) -> None:
    """One packed batch comes with every row's routing one row later."""
    _change_routing(lambda batch: np.roll(batch.expert_ids, 1, axis=0), call=call)


def shift_layers(*, call: int) -> None:
    """One packed batch comes with the routing of every layer in the one after it."""
    _change_routing(lambda batch: np.roll(batch.expert_ids, 1, axis=1), call=call)


def swap_trajectories(*, call: int, equal: bool) -> None:
    """In one packed batch two trajectories have the routing of one another, of equal length or of different ones."""

    def swapped(batch: Any) -> np.ndarray:
        bounds = batch.cu_seqlens.tolist()
        # Sequences of one prompt are neighbours; only routing rows move, and there are as many as before.
        blocks = [batch.expert_ids[start:end] for start, end in itertools.pairwise(bounds)]
        first, second = next(
            (i, j)
            for i, j in itertools.combinations(range(len(blocks)), 2)
            if (len(blocks[i]) == len(blocks[j])) == equal and (batch.sample_index[[bounds[i], bounds[j]]] >= 0).all()
        )
        blocks[first], blocks[second] = blocks[second], blocks[first]
        return np.concatenate(blocks)

    _change_routing(swapped, call=call)


def cut_routing(*, call: int) -> None:
    """One packed batch comes without the routing of its first rows, and with all that belongs to the others."""
    _change_routing(lambda batch: batch.expert_ids[2:], call=call)


def leave_prompts_to_the_router(*, call: int) -> None:
    """In one packed batch rows without a loss are not replayed."""

    def at(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ranks = original(*args, **kwargs)
        return [[replace(batch, routed=batch.routed & batch.loss_mask) for batch in rank] for rank in ranks]

    _replace("moerl.orchestration.batches:pack_for_ranks", at, call=call)


def drop_prompt_routing(*, only: str, flagged: bool) -> None:
    """The engine's answers to rollouts whose id begins with `only` are without routing of their prompts: with rows that
    say so (`flagged`), or with fewer rows."""

    def change(record: Any) -> Mapping[str, Any]:
        expert_ids, routed = record.values["expert_ids"], record.values["routed"].copy()
        num_prompt = int(record.values["sampled"].argmax())
        if not flagged:
            return {"expert_ids": expert_ids[num_prompt:]}
        routed[: num_prompt - 1] = False
        return {"expert_ids": expert_ids * routed[:, None, None].astype(expert_ids.dtype), "routed": routed}

    _change_records(change, only=only)


def dead_router(*, how: str) -> None:
    """From the first RL step on one router of the policy is dead: replay does not reach it, as if its hook sat in a
    router of a model that is gone (`hook`), or its probabilities are cut off from its weights (`gradient`)."""

    def at(original: Callable[..., Any], worker: Any, *args: Any) -> Any:
        reply = original(worker, *args)
        router = worker._trained.model.chunks[0].decoder.layers[1].mlp.router
        if how == "hook":
            router.router_replay = None
            return reply
        routing = router.routing

        def detached(*args: Any, **kwargs: Any) -> Any:
            probs, routing_map = routing(*args, **kwargs)
            return probs.detach(), routing_map

        router.routing = detached
        return reply

    _replace("moerl.ranks.worker:Worker._build", at, call=2)


def count_updates(*, file: str) -> None:
    """A byte in `file` for every update that the optimizer is asked for."""
    module = importlib.import_module("moerl.trainer.optimizer")
    original = module.Optimizer.update

    def update(self: Any) -> Any:
        with open(file, "ab") as out:
            out.write(b".")
        return original(self)

    module.Optimizer.update = update


def flip_bit_of_frame(*, call: int) -> None:
    """One bit is wrong in a frame that carries a batch to the trainer's ranks."""

    def at(original: Callable[..., Any], frame: bytes, **kwargs: Any) -> Any:
        wrong = bytearray(frame)
        wrong[len(wrong) // 2] ^= 1
        return original(bytes(wrong), **kwargs)

    _replace("moerl.ranks.worker:decode_batches", at, call=call)


def repeat_an_expert(*, call: int) -> None:
    """In one batch a token of a trajectory is sent to the same expert twice; everything is checked once more."""

    def at(original: Callable[..., Any], trajectories: Any, algorithm: Any) -> Any:
        expert_ids = trajectories[0].expert_ids.copy()
        expert_ids[2, 1] = expert_ids[2, 1, 0]
        return original([replace(trajectories[0], expert_ids=expert_ids), *trajectories[1:]], algorithm)

    _replace("moerl.orchestration.rl:with_advantages", at, call=call)


def break_records(*, only: str, count: int) -> None:
    """The first `count` answers of the engine to rollouts whose id begins with `only` claim a probability above 1."""

    def change(record: Any) -> Mapping[str, Any]:
        logprobs = record.values["rollout_logprobs"].copy()
        logprobs[-1] = 0.5
        return {"rollout_logprobs": logprobs}

    _change_records(change, only=only, count=count)


def _change_routing(change: Callable[[Any], np.ndarray], *, call: int) -> None:
    """The expert ids of every microbatch of the `call`-th packed batch are `change` of the microbatch; their
    checksums stay."""

    def at(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ranks = original(*args, **kwargs)
        return [[replace(batch, expert_ids=change(batch)) for batch in rank] for rank in ranks]

    _replace("moerl.orchestration.batches:pack_for_ranks", at, call=call)


def _change_records(change: Callable[[Any], Mapping[str, Any]], *, only: str, count: int = 1_000_000) -> None:
    """The first `count` answers of the engine to rollouts whose id begins with `only` have other values."""
    module = importlib.import_module("moerl.rollout.embedded")
    original = module.EmbeddedEngine.generate
    left = count

    def generate(self: Any, requests: Any) -> Iterator[Any]:
        nonlocal left
        for record in original(self, requests):
            if left and record.rollout_id.startswith(only):
                left -= 1
                yield replace(record, values={**record.values, **change(record)})
            else:
                yield record

    module.EmbeddedEngine.generate = generate


def _replace(place: str, function: Callable[..., Any], *, call: int) -> None:
    """At the `call`-th call of `place`, `function` is called in its stead, with the original as first argument."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(original, *args, **kwargs) if calls == call else original(*args, **kwargs)

    setattr(owner, name, counted)
