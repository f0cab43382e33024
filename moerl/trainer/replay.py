"""Keep Routing: the recorded experts of every token, enforced in forward and recompute, with proof.

Runs in every trainer rank. `KeepRouting` finds the live model's routers once; a `ReplaySchedule` is open for exactly
one forward(-backward) schedule and knows which microbatch each router call belongs to. Nothing is global and nothing
outlives the schedule.

Megatron-Core's own `RouterReplay` is not used: its instances live in a class-level list in build order, and under
recompute it replays the newest microbatch's ids. A duck-typed object in `router.router_replay` closes both gaps.

Shape legend: M microbatches, t routing rows of this rank, L MoE layers of the model, l those of this rank, K experts
per token, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moerl.contract.batch import Microbatch
from moerl.contract.parallel import RankCoordinates
from moerl.contract.trajectory import ModelSpec
from moerl.errors import ReplayError, UnprovedError
from moerl.kernels import routing
from moerl.kernels.routing_inputs import Choices
from moerl.trainer import batch_checksums, groups, platform, transfers
from moerl.trainer.replay_checks import find_unusable_routing
from moerl.trainer.replay_rows import LocalRows, RecordedRouting, TracedRows, as_signed, routing_slice, row_origins
from moerl.trainer.routers import OwnTopK, RouterHook, hook_routers

FORWARD, RECOMPUTE = 0, 1
PHASES = ("forward", "recompute")


@dataclass(frozen=True, slots=True)
class Replay:
    """Options of a schedule at the routers."""

    enforce: bool = False
    """True to replay the recorded routing; else routers choose for themselves and are only observed."""
    prove: bool = True
    """True to take, with `enforce`, checksums of the routing that reaches the dispatchers."""
    record: bool = False
    """True to keep the routers' own choices, for a later schedule to enforce."""
    trace: bool = False
    """True to keep checksums of each row that reaches the dispatchers, to find where a proof failed; `record` does
    that, too."""
    in_sets: bool = False
    """True if every microbatch has to be scored in its recorded kept sets, which is proved."""


class KeepRouting:
    """The routers of one live model.

    Args:
        chunks: this rank's parts of the GPTModel (or wrappers of them); walked once for MoE layers.
        config: their TransformerConfig.
        spec: the model facts; the MoE layers of all pipeline stages together must be L.
        layout: this rank's coordinates.
    """

    def __init__(self, chunks: Sequence[nn.Module], config: Any, spec: ModelSpec, layout: RankCoordinates) -> None:
        self.spec, self.layout = spec, layout
        self.recomputes = config.recompute_granularity == "full" or (
            config.recompute_granularity == "selective" and "moe" in config.recompute_modules
        )
        self.hooks = hook_routers(chunks, config)
        self._check_layers()
        if layout.dims.pipeline > 1:
            self.layout = replace(layout, moe_layers=tuple(hook.moe_layer for hook in self.hooks))

    def _check_layers(self) -> None:
        """Raises `ReplayError` unless every MoE layer of the model is in exactly one pipeline stage; a collective over
        the stages."""
        num_layers = self.spec.num_moe_layers
        found = [hook.moe_layer for hook in self.hooks]
        counts_L = torch.bincount(torch.tensor(found, dtype=torch.int64), minlength=num_layers).to(platform.device())
        # Rank-local sizes may differ if the model has more layers than the handshake says.
        surplus = torch.tensor([max(0, len(counts_L) - num_layers)], device=counts_L.device)
        dist.all_reduce(surplus, op=dist.ReduceOp.MAX, group=groups.pipeline_group())
        counts_L = counts_L[:num_layers].clone()
        dist.all_reduce(counts_L, group=groups.pipeline_group())
        if int(surplus) or not (counts_L == 1).all():
            raise ReplayError(
                "the live model's MoE layers are not those of the handshake",
                seen=f"MoE layers {found} on rank {self.layout.rank}, stage counts {counts_L.tolist()}",
                expected=f"each of 0..{num_layers - 1} in one pipeline stage",
                remedy="give trainer and engine the same model",
            )

    @contextlib.contextmanager
    def schedule(self, batches: Sequence[Microbatch], what: Replay, *, training: bool) -> Iterator[ReplaySchedule]:
        """Opens one schedule over `batches`, this rank's shares.

        Args:
            what: see `Replay`.
            training: a backward pass follows, so recompute may call the routers again.

        Raises:
            UnprovedError: on every rank, if any rank has a batch that cannot be replayed.
            ReplayError: a schedule is open already.
        """
        if any(hook.schedule is not None for hook in self.hooks):
            raise ReplayError("a replay schedule is open already", remedy="close it before the next one is opened")
        schedule, layers = ReplaySchedule(self, batches, what, training=training), [h.moe_layer for h in self.hooks]
        _raise_together(find_unusable_routing(batches, layers, self.spec, self.layout, enforce=what.enforce))
        for hook in self.hooks:
            hook.schedule = schedule
        try:
            yield schedule
        finally:
            for hook in self.hooks:
                hook.clear()


class ReplaySchedule:
    """Targets and routing checksums of one schedule.

    Attributes:
        kept_sums: by microbatch, checksums of the kept sets that tokens were scored in
            (`moerl.trainer.batch_checksums`).
    """

    def __init__(self, owner: KeepRouting, batches: Sequence[Microbatch], what: Replay, *, training: bool) -> None:
        self.owner, self.batches, self.what, self.training = owner, batches, what, training
        self.current: int | None = None
        shape = (len(PHASES), len(batches), len(owner.hooks))
        num_layers, device = owner.spec.num_moe_layers, platform.device()
        self.checksums_PMl = torch.zeros(shape, dtype=torch.int64, device=device)
        self.calls_PMl = torch.zeros(shape, dtype=torch.int64)
        self.expert_load_LE = torch.zeros(num_layers, owner.spec.num_experts, dtype=torch.int64, device=device)
        self._statistics_LCS = routing.partial_statistics(num_layers, device)
        self.live_rows_L = torch.zeros(num_layers, dtype=torch.int64)
        self.kept_sums: dict[int, Tensor] = {}
        self._rows: dict[int, LocalRows] = {}

    def begin(self, microbatch: int) -> None:
        """Sets the microbatch whose forward pass comes next."""
        self.current = microbatch
        self._rows_of(microbatch).arrive()
        # The next rows are copied while this microbatch is computed.
        if microbatch + 1 < len(self.batches):
            self._rows_of(microbatch + 1)

    def _rows_of(self, microbatch: int) -> LocalRows:
        if microbatch not in self._rows:
            batch, layout = self.batches[microbatch], self.owner.layout
            # The trainer's own routing is known for captured rows and others.
            self._rows[microbatch] = LocalRows(batch, layout, count_all=self.what.record)
        return self._rows[microbatch]

    def route(self, hook: RouterHook, scores_tE: Tensor, own_topk: OwnTopK) -> tuple[Tensor, Tensor]:
        """Returns the scores and ids of Megatron's choice, or of the recorded one on rows that have it; both [t, K].
        Probabilities come from these scores."""
        hook.active = (microbatch, phase) = self._place(hook)
        rows = self._rows[microbatch]
        if self.what.record:
            rows.recorded[hook.index] = own_topk(scores_tE.detach())[1]
        if rows.expert_ids_ltK is None:
            return own_topk(scores_tE)
        target_tK = rows.expert_ids_ltK[hook.index].long()
        if len(target_tK) != len(scores_tE):
            raise ReplayError(
                f"routing rows do not match the router's input in layer {hook.layer_number}, microbatch {microbatch}",
                seen=f"{len(scores_tE)} router rows",
                expected=f"{len(target_tK)} recorded rows",
                remedy="this is a bug in packing or slicing; report it with the layout",
            )
        own_tK = own_topk(scores_tE.detach())[1] if phase == FORWARD or rows.num_live else None
        if phase == FORWARD and own_tK is not None:
            self._compare(hook, rows, scores_tE.detach(), own_tK, target_tK)
        if not self.what.enforce:
            return own_topk(scores_tE)
        if rows.num_live and own_tK is not None:
            target_tK = torch.where(rows.routed_t[:, None], target_tK, own_tK)
        return scores_tE.gather(1, target_tK), target_tK

    def _compare(self, hook: RouterHook, rows: LocalRows, scores_tE: Tensor, own_tK: Tensor, target_tK: Tensor) -> None:
        """Adds statistics of the trainer's own choice against the recorded one, on rows that have one."""
        choices = Choices(scores_tE, own_tK, target_tK, rows.routed_t, rows.proved_t)
        routing.add_choices(choices, rows.layers_differing_t, self._statistics_LCS[hook.moe_layer])
        self.live_rows_L[hook.moe_layer] += rows.num_live

    def _place(self, hook: RouterHook) -> tuple[int, int]:
        """Returns the microbatch and the phase of a routing call.

        A checkpointed region runs first without gradients and again, with them, in the backward pass. A forward-only
        pass runs without gradients, too: `training` tells whether a backward pass will come.
        """
        if not (self.training and self.owner.recomputes):
            if self.current is None:
                raise ReplayError("a router ran before its microbatch was named", remedy="report this as a bug")
            return self.current, FORWARD
        if torch.is_grad_enabled():
            if not hook.pending:
                raise ReplayError(
                    f"layer {hook.layer_number} recomputes more often than it ran forward",
                    remedy="report this as a bug with trainer.recompute and the layout",
                )
            return hook.pending.popleft(), RECOMPUTE
        assert self.current is not None
        hook.pending.append(self.current)
        return self.current, FORWARD

    def observe(self, hook: RouterHook, routing_map_tE: Tensor) -> None:
        """Takes checksums of the routing map on its way to the dispatcher."""
        if hook.active is None:
            raise ReplayError(
                f"layer {hook.layer_number} dispatched tokens without asking the replay hook",
                seen="a routing map from elsewhere",
                expected="top-k through router_replay",
                remedy="turn fused routers off; every keep_routing.mode observes routers",
            )
        microbatch, phase = hook.active
        rows = self._rows[microbatch]
        place = (phase, microbatch, hook.index)
        self.calls_PMl[place] += 1
        if (self.what.trace or self.what.record) and phase == FORWARD:
            rows.traced[hook.index] = routing.row_checksums(routing_map_tE, rows.of_map.keys_T, hook.moe_layer)
        routing.add_map_sums(
            routing_map_tE,
            rows.of_map,
            hook.moe_layer,
            checksum=self.checksums_PMl[place] if self._takes_checksums or self.what.record else None,
            load_E=self.expert_load_LE[hook.moe_layer] if phase == FORWARD else None,
        )

    @property
    def _takes_checksums(self) -> bool:
        return self.what.enforce and self.what.prove

    def agreement(self) -> Tensor:
        """Returns the sums of `moerl.contract.trainer.STATISTICS`: float64 [L, 5]."""
        return self._statistics_LCS.sum(1)

    def recorded(self) -> RecordedRouting:
        """Returns the batches with the routers' own choices as their recorded routing, and the rows that were
        dispatched.

        After a schedule with `Replay.record`; a collective over the ranks that share the rows.
        """
        checksums_Ml = self._sums_of_all_rows()[0][FORWARD]
        shape, dtype = (len(self.owner.hooks), self.owner.spec.experts_per_token), self.owner.spec.expert_dtype
        local = [self._rows[microbatch] for microbatch in range(len(self.batches))]
        batches = [
            replace(
                batch,
                expert_ids=rows.by_row(rows.recorded, shape).astype(dtype),
                routing_checksums=checksums_l.numpy().view(np.uint64),
                routed=np.ones(batch.num_rows, np.bool_),
            )
            for batch, rows, checksums_l in zip(self.batches, local, checksums_Ml, strict=True)
        ]
        return RecordedRouting(batches, [self.traced(microbatch) for microbatch in range(len(self.batches))])

    def traced(self, microbatch: int) -> TracedRows:
        """Returns the rows that reached this rank's dispatchers in the forward pass of a microbatch, after a schedule
        with `Replay.trace` or `Replay.record`."""
        rows, batch, layout = self._rows[microbatch], self.batches[microbatch], self.owner.layout
        keys, positions = row_origins(batch, layout.dims.context, layout.context_rank)
        mine = routing_slice(batch, layout)
        real, counted = ~batch.is_pad[mine], rows.counted
        layers = np.array([hook.moe_layer for hook in self.owner.hooks], np.int64)
        checksums_rl = rows.by_row(rows.traced, (len(layers),)).view(np.uint64)[real]
        return TracedRows(keys[mine][real], positions[mine][real], layers, checksums_rl, counted[real])

    def layers_differing(self) -> list[Tensor]:
        """Returns int32 [T] per microbatch: MoE layers of the whole model in which the trainer's own choice differs
        from the recorded one, per row of this rank's share. A collective over tensor-parallel ranks and pipeline
        stages."""
        layout = self.owner.layout
        sizes = [batch.num_rows for batch in self.batches]
        out = torch.zeros(sum(sizes), dtype=torch.int32, device=platform.device())
        for microbatch, part in enumerate(out.split(sizes)):
            part.chunk(layout.dims.tensor)[layout.tensor_rank].copy_(self._rows[microbatch].layers_differing_t)
        if layout.dims.tensor > 1:
            dist.all_reduce(out, group=groups.tensor_group())
        if layout.dims.pipeline > 1:
            dist.all_reduce(out, group=groups.pipeline_group())
        return list(out.split(sizes))

    def verify(self) -> int:
        """Proves that attention read the recorded tokens of every sequence, that tokens were scored in recorded sets
        and, if routing is enforced, that every router ran as often as the schedule says and, if it is to be proved,
        that recorded routing reached its dispatcher.

        A collective over all ranks; without experts or stages on other ranks the first since the first microbatch began
        that the host waits for. Call it before the optimizer update.

        Returns:
            Routing rows verified on this rank (rows x layers x phases).

        Raises:
            UnprovedError: on every rank, if a sum or a number of calls differs, or a sum is missing, on any rank.
        """
        checksums_PMl, sums_2M = self._sums_of_all_rows()
        problem = self._first_problem(checksums_PMl) if self.what.enforce or self.what.record else None
        layout = self.owner.layout
        problem = problem or batch_checksums.first_problem(
            self.batches, sums_2M, self.kept_sums, layout, in_sets=self.what.in_sets and layout.is_last_stage
        )
        _raise_together(problem)
        if not self._takes_checksums:
            return 0
        return self._num_phases * len(self.owner.hooks) * sum(rows.num_proved for rows in self._rows.values())

    def _sums_of_all_rows(self) -> tuple[Tensor, Tensor]:
        """Returns routing checksums int64 [P, M, l] and `batch_checksums.sums` [2, M] on the CPU, over the ranks that
        share the rows; a collective over these ranks, and one copy from the device."""
        sums_2M = batch_checksums.sums(self.batches, self.kept_sums, self.owner.layout)
        # A new tensor: this rank's own sums stay as they are for a second call.
        everything = torch.cat([self.checksums_PMl.flatten(), sums_2M.flatten()])
        dist.all_reduce(everything, group=groups.tensor_and_context_group())
        (found,) = transfers.to_host([everything])
        checksums, sums = found.split([self.checksums_PMl.numel(), sums_2M.numel()])
        return checksums.view_as(self.checksums_PMl), sums.view_as(sums_2M)

    @property
    def _num_phases(self) -> int:
        return 1 + int(self.training and self.owner.recomputes)

    def _first_problem(self, checksums_PMl: Tensor) -> UnprovedError | None:
        for phase in range(self._num_phases):
            for microbatch, batch in enumerate(self.batches):
                for index in (self.calls_PMl[phase, microbatch] != 1).nonzero().flatten().tolist():
                    calls = int(self.calls_PMl[phase, microbatch, index])
                    return self._problem("calls", (phase, microbatch, index), f"{calls} calls", "1 call")
                if not self._takes_checksums:
                    continue
                assert batch.routing_checksums is not None
                sums_l = checksums_PMl[phase, microbatch]
                expected_l = as_signed(batch.routing_checksums)
                for index in (sums_l != expected_l).nonzero().flatten().tolist():
                    seen, wanted = (f"{int(sums[index]) % 2**64:#018x}" for sums in (sums_l, expected_l))
                    # No checksum of dispatched rows counts those that were left to the router, though the recorded
                    # checksum has those that were captured.
                    if num_live := self._rows[microbatch].num_live:
                        seen += f", with {num_live} row{'s' * (num_live > 1)} left to the router"
                    return self._problem("checksum", (phase, microbatch, index), seen, f"{wanted} (as recorded)")
        return None

    def _problem(self, what: str, at: tuple[int, int, int], seen: str, wanted: str) -> UnprovedError:
        phase, microbatch, index = at
        layer = self.owner.hooks[index].layer_number
        place = f"layer {layer}, rank {self.owner.layout.rank}, microbatch {microbatch}, {PHASES[phase]}"
        return UnprovedError(
            f"Keep Routing was not proved in {place}: {what}",
            seen=seen,
            expected=wanted,
            remedy="the update was not applied; check that routing rows travelled with their trajectory",
            microbatch=microbatch if what == "checksum" else -1,
        )


def _raise_together(problem: UnprovedError | None) -> None:
    remedy = "read that rank's log; no update was applied"
    groups.raise_together(problem, UnprovedError("a batch was not proved on another rank", remedy=remedy))
