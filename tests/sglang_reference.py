"""Requests for live SGLang servers, and transformers in fp32 as the judge of their answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import families
import numpy as np
import torch

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, SamplingParams, Trajectory
from moerl.rollout.fleet.engine import FleetEngine

V = 91
PARAMS = [
    SamplingParams(),
    SamplingParams(top_p=0.8, temperature=0.8),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.9, top_k=8, min_p=0.02, temperature=1.2),
    SamplingParams(temperature=0.0),
    SamplingParams(min_p=0.1),
]


def make_requests(count: int, max_new_tokens: int = 24, stop_ids: tuple[int, ...] = (3,)) -> list[RolloutRequest]:
    """Prompts of 1 to 40 tokens; every second one begins like the one before."""
    rng = np.random.default_rng(11)
    requests: list[RolloutRequest] = []
    for i in range(count):
        prompt = tuple(int(t) for t in rng.integers(0, V, rng.integers(1, 40)))
        if i % 2:
            prompt = (*requests[-1].prompt_ids, *prompt)[:60]
        sampling = replace(PARAMS[i % len(PARAMS)], seed=100 + i)
        lineage = Lineage(f"r{i}", f"p{i // 2}", f"g{i // 2}")
        requests.append(RolloutRequest(lineage, prompt, sampling, max_new_tokens + i % 5, stop_ids))
    return requests


def collect(engine: FleetEngine, requests: list[RolloutRequest]) -> dict[str, Trajectory]:
    return {record.rollout_id: Trajectory(**record.values) for record in engine.generate(requests)}


class Reference:
    """transformers on the same weights, and the sampling distribution by its definition."""

    def __init__(self, folder: Path, family: str = "qwen3_moe") -> None:
        self.judge = families.Judge(folder, families.FAMILIES[family])
        self.routing_mismatches = self.kept_mismatches = self.num_rows = self.num_kept = 0
        self.logprob_error = 0.0

    def compare(self, trajectory: Trajectory) -> None:
        self.compare_part(trajectory, slice(None), np.flatnonzero(trajectory.sampled).tolist())

    def compare_part(self, trajectory: Trajectory, rows: slice, tokens: Iterable[int]) -> None:
        """Some rows of routing, and some sampled tokens."""
        with torch.no_grad():
            logits = self.judge.logits(trajectory.token_ids[:-1]).double()
        routes = np.sort(self.judge.chosen().numpy(), -1)
        self.routing_mismatches += int((np.sort(trajectory.expert_ids, -1) != routes)[rows].any(-1).sum())
        self.num_rows += routes[rows].shape[0] * routes.shape[1]
        sampling = trajectory.turns[1].sampling
        assert sampling is not None
        for t in tokens:
            self._compare_token(trajectory, t, logits[t - 1], sampling)

    def _compare_token(self, trajectory: Trajectory, t: int, logits_V: torch.Tensor, sampling: SamplingParams) -> None:
        token = int(trajectory.token_ids[t])
        log_p = torch.log_softmax(logits_V / (sampling.temperature or 1.0), -1)
        kept = trajectory.kept.ids[trajectory.kept.offsets[t] : trajectory.kept.offsets[t + 1]]
        if not sampling.cuts:
            self._see(trajectory.rollout_logprobs[t], log_p[token])
            return
        expected = kept_ids(log_p.exp(), sampling)
        self.num_kept += 1
        self.kept_mismatches += kept.tolist() != expected
        mass = torch.logsumexp(log_p[expected], -1)
        self._see(trajectory.rollout_logprobs[t], log_p[token] - mass)
        if not sampling.is_greedy:
            self._see(trajectory.kept_logmass[t], mass)

    def require_parity(self) -> None:
        """Not one row or set differs, and log-probs agree to 1e-5."""
        assert (self.routing_mismatches, self.kept_mismatches) == (0, 0), vars(self)
        assert self.logprob_error <= 1e-5

    def _see(self, seen: float, expected: torch.Tensor) -> None:
        self.logprob_error = max(self.logprob_error, abs(float(seen) - float(expected)))


def collect_twice(
    engine: FleetEngine, requests: list[RolloutRequest], reference: Reference
) -> tuple[dict[str, Trajectory], dict[str, Trajectory]]:
    """The answers to `requests`, and to the same once more, when they hit the prefix cache; both hold parity.

    The second are asked for under other rollout ids, and are returned under those of `requests`.
    """
    first = collect(engine, requests)
    prefix = "again-"
    renamed = [replace(r, lineage=replace(r.lineage, rollout_id=prefix + r.lineage.rollout_id)) for r in requests]
    again = {name.removeprefix(prefix): trajectory for name, trajectory in collect(engine, renamed).items()}
    for trajectory in (*first.values(), *again.values()):
        reference.compare(trajectory)
    reference.require_parity()
    return first, again


def kept_ids(probs_V: torch.Tensor, sampling: SamplingParams) -> list[int]:
    """Top-k and top-p jointly, then min-p; ascending ids."""
    if sampling.is_greedy:
        return [int(probs_V.argmax())]
    ranked, ids = probs_V.sort(descending=True)
    before = ranked.cumsum(0) - ranked
    keep = (torch.arange(len(ranked)) < (sampling.effective_top_k or len(ranked))) & (before <= sampling.top_p)
    keep &= ranked >= ranked[0] * sampling.min_p
    return sorted(ids[keep].tolist())
