"""Keep Routing: the recorded experts of every token, enforced in forward and recompute, with proof.

Runs in every trainer rank. `KeepRouting` finds the live model's routers once; a `ReplaySchedule` is open for exactly
one forward(-backward) schedule and knows which microbatch each router call belongs to. Nothing is global and nothing
outlives the schedule.

Megatron-Core's own `RouterReplay` is not used: its instances live in a class-level list in build order, and under
recompute it replays the newest microbatch's ids. A duck-typed object in `router.router_replay` closes both gaps.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moerl.contract.batch import Microbatch
from moerl.contract.trajectory import ModelSpec
from moerl.errors import ReplayError
from moerl.trainer import evidence, platform

FORWARD, RECOMPUTE = 0, 1
PHASES = ("forward", "recompute")


def refuse_unsupported_routers(config: Any) -> None:
    """Raises `ReplayError` for router settings that return before the replay hook or drop tokens after it."""
    load_balancing = config.moe_router_load_balancing_type
    kinds = load_balancing if isinstance(load_balancing, list) else [load_balancing]
    problems = {
        "moe_router_fusion": config.moe_router_fusion,
        "moe_router_load_balancing_type": [k for k in kinds if k in ("sinkhorn", "quantile_balancing")],
        "moe_expert_capacity_factor": config.moe_expert_capacity_factor is not None,
        "moe_router_force_load_balancing": config.moe_router_force_load_balancing,
    }
    for name, bad in problems.items():
        if bad:
            raise ReplayError(
                f"the router setting {name} cannot be combined with Keep Routing",
                seen=getattr(config, name),
                expected="plain top-k routing without capacity",
                remedy="change the setting or set keep_routing.mode=off",
            )


@dataclass(slots=True)
class RouterTap:
    """Sits in one router's `router_replay` and before its dispatcher.

    moe_layer: index among all MoE layers of the model, from 0. layer_number: Megatron's number, from 1.
    pending: microbatches whose recompute is still to come, oldest first. active: (microbatch, phase) of the last
    routing call.
    """

    moe_layer: int
    layer_number: int
    schedule: ReplaySchedule | None = None
    pending: deque[int] = field(default_factory=deque)
    active: tuple[int, int] | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Megatron's hook: (values, ids), both [T, K], chosen from scores [T, E]."""
        assert default_compute_topk is not None

        def natural(scores_TE: Tensor) -> tuple[Tensor, Tensor]:
            return default_compute_topk(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)

        return natural(scores) if self.schedule is None else self.schedule.route(self, scores, natural)

    def before_dispatch(self, routing_map_TE: Tensor) -> None:
        if self.schedule is not None:
            self.schedule.observe(self, routing_map_TE)
            # One routing call, one dispatch: a bypass of the next call must not pass for this one.
            self.active = None


class KeepRouting:
    """The routers of one live model.

    Args:
        module: the GPTModel (or a wrapper); walked once for MoE layers.
        config: its TransformerConfig.
        spec: the model facts; L must equal the MoE layers found.
        tensor_group: tensor-parallel group; with more than one rank, sequence-parallel slices rows over it.
    """

    def __init__(self, module: nn.Module, config: Any, spec: ModelSpec, tensor_group: dist.ProcessGroup) -> None:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        refuse_unsupported_routers(config)
        self.spec = spec
        self.tensor_group = tensor_group
        self.recomputes = config.recompute_granularity == "full" or (
            config.recompute_granularity == "selective" and "moe" in config.recompute_modules
        )
        pattern = _moe_pattern(config)
        layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, MoELayer)]
        self.taps = [self._tap(layer, sum(pattern[: layer.layer_number - 1])) for layer in layers]
        found = [tap.moe_layer for tap in self.taps]
        if found != list(range(spec.num_moe_layers)):
            raise ReplayError(
                "the live model's MoE layers are not those of the handshake",
                seen=f"MoE layers {found}",
                expected=f"0..{spec.num_moe_layers - 1}",
                remedy="give trainer and engine the same model; keep_routing.mode=off disables replay",
            )

    @staticmethod
    def _tap(layer: Any, moe_layer: int) -> RouterTap:
        if layer.router.router_replay is not None:
            raise ReplayError(
                f"the router of layer {layer.layer_number} has a replay hook already",
                seen=type(layer.router.router_replay).__name__,
                expected="none",
                remedy="leave Megatron's moe_enable_routing_replay off",
            )
        tap = RouterTap(moe_layer, layer.layer_number)
        layer.router.router_replay = tap
        dispatcher = layer.token_dispatcher
        original = dispatcher.dispatch_preprocess

        def dispatch_preprocess(hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
            tap.before_dispatch(routing_map)
            return original(hidden_states, routing_map, probs)

        dispatcher.dispatch_preprocess = dispatch_preprocess
        return tap

    @contextlib.contextmanager
    def schedule(self, batches: Sequence[Microbatch], *, enforce: bool, training: bool) -> Iterator[ReplaySchedule]:
        """Opens one schedule over `batches`.

        Args:
            enforce: replay the recorded routing; otherwise routers choose for themselves and are only observed.
            training: a backward pass follows, so recompute may call the routers again.

        Raises:
            ReplayError: on every rank, where any rank has a batch that cannot be replayed.
        """
        if any(tap.schedule is not None for tap in self.taps):
            raise ReplayError("a replay schedule is open already", remedy="close it before the next one is opened")
        schedule = ReplaySchedule(self, batches, enforce=enforce, training=training)
        _raise_together(schedule.find_unusable_routing())
        for tap in self.taps:
            tap.schedule = schedule
        try:
            yield schedule
        finally:
            for tap in self.taps:
                tap.schedule, tap.active = None, None
                tap.pending.clear()


class ReplaySchedule:
    """Targets and evidence of one schedule. Shape legend: M microbatches, L MoE layers, t rows of this rank."""

    def __init__(self, owner: KeepRouting, batches: Sequence[Microbatch], *, enforce: bool, training: bool) -> None:
        self.owner, self.batches, self.enforce, self.training = owner, batches, enforce, training
        self.current: int | None = None
        shape = (len(PHASES), len(batches), owner.spec.num_moe_layers)
        self.checksums_PML = torch.zeros(shape, dtype=torch.int64)
        self.calls_PML = torch.zeros(shape, dtype=torch.int64)
        self.expert_load_LE = torch.zeros(owner.spec.num_moe_layers, owner.spec.num_experts, dtype=torch.int64)
        self._rows: dict[int, _LocalRows] = {}

    def find_unusable_routing(self) -> ReplayError | None:
        """What keeps a batch from being replayed; None where each has a target for every input row, and checksums."""
        spec = self.owner.spec
        for microbatch, batch in enumerate(self.batches):
            if self.enforce and (batch.expert_ids is None or batch.routing_checksums is None):
                return ReplayError(
                    f"microbatch {microbatch} is without recorded routing",
                    seen="no expert ids or no checksums of them",
                    expected="both, for Keep Routing",
                    remedy="pack the batch for replay, or set keep_routing.mode=off",
                )
            wanted = (batch.num_rows, spec.num_moe_layers, spec.experts_per_token)
            if batch.expert_ids is not None and batch.expert_ids.shape != wanted:
                return ReplayError(
                    f"the routing rows of microbatch {microbatch} do not match its input rows",
                    seen=batch.expert_ids.shape,
                    expected=f"{wanted} (rows, MoE layers, experts per token)",
                    remedy="every input row needs its route, prompt included; cut routes where their tokens are cut",
                )
        return None

    def begin(self, microbatch: int) -> None:
        """Names the microbatch whose forward pass comes next."""
        self.current = microbatch
        self._rows[microbatch] = _LocalRows.of(self.batches[microbatch], self.owner.tensor_group)

    def route(
        self, tap: RouterTap, scores_tE: Tensor, natural: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        tap.active = (microbatch, phase) = self._place(tap)
        rows = self._rows[microbatch]
        if rows.expert_ids_tLK is None:
            return natural(scores_tE)
        target_tK = rows.expert_ids_tLK[:, tap.moe_layer].long()
        if len(target_tK) != len(scores_tE):
            raise ReplayError(
                f"routing rows do not match the router's input in layer {tap.layer_number}, microbatch {microbatch}",
                seen=f"{len(scores_tE)} router rows",
                expected=f"{len(target_tK)} recorded rows",
                remedy="this is a bug in packing or slicing; report it with the layout",
            )
        if phase == FORWARD:
            natural_tK = natural(scores_tE.detach())[1]
            differs_t = (natural_tK.sort(-1).values != target_tK.sort(-1).values).any(-1)
            rows.layers_differing_t += differs_t
        if not self.enforce:
            return natural(scores_tE)
        return scores_tE.gather(1, target_tK), target_tK

    def _place(self, tap: RouterTap) -> tuple[int, int]:
        """Which microbatch and phase a routing call belongs to.

        A checkpointed region runs first without gradients and again, with them, in the backward pass. That is told
        apart from a forward-only pass by the schedule, which says whether a backward pass will come.
        """
        if not (self.training and self.owner.recomputes):
            if self.current is None:
                raise ReplayError("a router ran before its microbatch was named", remedy="report this as a bug")
            return self.current, FORWARD
        if torch.is_grad_enabled():
            if not tap.pending:
                raise ReplayError(
                    f"layer {tap.layer_number} recomputes more often than it ran forward",
                    remedy="report this as a bug with trainer.recompute and the layout",
                )
            return tap.pending.popleft(), RECOMPUTE
        assert self.current is not None
        tap.pending.append(self.current)
        return self.current, FORWARD

    def observe(self, tap: RouterTap, routing_map_tE: Tensor) -> None:
        """Takes evidence from the routing map on its way to the dispatcher."""
        if tap.active is None:
            raise ReplayError(
                f"layer {tap.layer_number} dispatched tokens without asking the replay hook",
                seen="a routing map from elsewhere",
                expected="top-k through router_replay",
                remedy="turn fused routers off or set keep_routing.mode=off",
            )
        microbatch, phase = tap.active
        rows = self._rows[microbatch]
        place = (phase, microbatch, tap.moe_layer)
        self.calls_PML[place] += 1
        if phase == FORWARD:
            self.expert_load_LE[tap.moe_layer] += (routing_map_tE & ~rows.is_pad_t[:, None]).sum(0).cpu()
        if self.enforce:
            checksum = evidence.map_checksum(routing_map_tE, rows.keys_t, rows.is_pad_t, tap.moe_layer)
            self.checksums_PML[place] += checksum.cpu()

    def layers_differing(self, microbatch: int) -> Tensor:
        """int32 [T]: MoE layers in which the trainer's own choice differs from the recorded one, per packed row."""
        return self._rows[microbatch].gather_differing(self.owner.tensor_group)

    def verify(self) -> int:
        """Proves that every target was eaten as often as the schedule says and reached the dispatcher.

        A collective over all ranks. Call before the optimizer update.

        Returns:
            Routing rows verified on this rank (rows x layers x phases).

        Raises:
            ReplayError: on every rank, where any rank's evidence disagrees.
        """
        checksums_PML = self.checksums_PML.to(platform.device())
        dist.all_reduce(checksums_PML, group=self.owner.tensor_group)
        _raise_together(self._first_problem(checksums_PML.cpu()))
        phases = 1 + int(self.training and self.owner.recomputes)
        return phases * self.owner.spec.num_moe_layers * sum(int((~batch.is_pad).sum()) for batch in self.batches)

    def _first_problem(self, checksums_PML: Tensor) -> ReplayError | None:
        left = [tap.layer_number for tap in self.owner.taps if tap.pending]
        if left:
            return ReplayError(f"recompute never ran for layers {left}", remedy="report this as a bug")
        for phase in (FORWARD, RECOMPUTE) if self.training and self.owner.recomputes else (FORWARD,):
            for microbatch, batch in enumerate(self.batches):
                assert batch.routing_checksums is not None
                expected_L = evidence.as_signed(batch.routing_checksums)
                wrong_calls = (self.calls_PML[phase, microbatch] != 1).nonzero()
                wrong_sums = (checksums_PML[phase, microbatch] != expected_L).nonzero()
                for wrong, what in ((wrong_calls, "calls"), (wrong_sums, "checksum")):
                    if len(wrong):
                        return self._problem(what, phase, microbatch, int(wrong[0]), checksums_PML)
        return None

    def _problem(self, what: str, phase: int, microbatch: int, moe_layer: int, checksums_PML: Tensor) -> ReplayError:
        layer = self.owner.taps[moe_layer].layer_number
        place = f"layer {layer}, rank {dist.get_rank()}, microbatch {microbatch}, {PHASES[phase]}"
        expected = self.batches[microbatch].routing_checksums
        assert expected is not None
        if what == "calls":
            seen: object = f"{int(self.calls_PML[phase, microbatch, moe_layer])} calls"
            wanted: object = "1 call"
        else:
            seen = f"{int(checksums_PML[phase, microbatch, moe_layer]) % 2**64:#018x}"
            wanted = f"{int(expected[moe_layer]):#018x} (from the trajectories)"
        return ReplayError(
            f"Keep Routing was not proved in {place}: {what}",
            seen=seen,
            expected=wanted,
            remedy="the update was not applied; check that routing rows travelled with their trajectory",
        )


@dataclass(slots=True)
class _LocalRows:
    """This rank's slice of a microbatch's rows (sequence parallelism slices them over the tensor group)."""

    expert_ids_tLK: Tensor | None
    keys_t: Tensor
    is_pad_t: Tensor
    layers_differing_t: Tensor

    @classmethod
    def of(cls, batch: Microbatch, group: dist.ProcessGroup) -> _LocalRows:
        device = platform.device()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        rows = batch.num_rows // size
        mine = slice(rank * rows, (rank + 1) * rows)
        ids = None if batch.expert_ids is None else torch.from_numpy(batch.expert_ids[mine].copy()).to(device)
        return cls(
            expert_ids_tLK=ids,
            keys_t=evidence.row_keys(batch, device)[mine],
            is_pad_t=torch.from_numpy(batch.is_pad[mine].copy()).to(device),
            layers_differing_t=torch.zeros(rows, dtype=torch.int32, device=device),
        )

    def gather_differing(self, group: dist.ProcessGroup) -> Tensor:
        size = dist.get_world_size(group)
        if size == 1:
            return self.layers_differing_t
        out = self.layers_differing_t.new_empty(size * len(self.layers_differing_t))
        dist.all_gather_into_tensor(out, self.layers_differing_t, group=group)
        return out


def _raise_together(problem: ReplayError | None) -> None:
    """Raises on every rank where any rank has a problem, so that none is left waiting in a later collective."""
    failed = torch.tensor([int(problem is not None)], device=platform.device())
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if problem is not None:
        raise problem
    if int(failed):
        raise ReplayError(
            "Keep Routing was not proved on another rank",
            remedy="read that rank's log; no update was applied",
        )


def _moe_pattern(config: Any) -> list[int]:
    """1 for every MoE layer of the whole model, 0 for dense ones, by layer number."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [int(i % frequency == 0) for i in range(config.num_layers)]
    return list(frequency)
