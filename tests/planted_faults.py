"""Dumps of a real engine, and faults to plant in them: what `moerl diagnose` must name.

The embedded engine samples with a small random model in bfloat16, from prompts of several lengths; a fault changes what
the dump says, never what was sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moerl.contract.fields import KeptSets
from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, SamplingParams, Trajectory
from moerl.diagnostics.causes.diagnosis import Diagnosis, diagnose
from moerl.diagnostics.causes.masks import shifted
from moerl.diagnostics.dumps.rollout import DumpedRollout, turns_of
from moerl.diagnostics.report.data import Report
from moerl.diagnostics.scoring import Question
from moerl.models.description import read_model
from moerl.offline.rescoring import LoadedModels, TransformersScorer
from moerl.rollout.embedded import EmbeddedEngine
from moerl.rollout.loading import load_model

SAMPLING = SamplingParams(temperature=0.8, top_p=0.9)

Diagnosed = Callable[..., tuple[int, Report]]
"""`moerl diagnose` with these arguments: its exit status, and its report."""
VOCAB, LAYERS, EXPERTS, TOP_K = 97, 5, 16, 4


def write_moe(folder: Path, seed: int = 0, *, drift_from: int | None = None, drift: float = 0.0) -> Path:
    """A random model in Hugging Face format; with `drift_from`, that one with noise of this relative size."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # pyright: ignore[reportCallIssue] - accepted through kwargs
        moe_intermediate_size=24,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=256,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed if drift_from is None else drift_from)
    model = Qwen3MoeForCausalLM(config)
    if drift_from is not None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += drift * parameter.std() * torch.randn_like(parameter)
    model.bfloat16().save_pretrained(folder)
    return folder


def sample(
    model: Path, *, seed: int = 0, num_groups: int = 6, group_size: int = 4, sampling: SamplingParams = SAMPLING
) -> list[DumpedRollout]:
    """Samples with the embedded engine."""
    rng = np.random.default_rng(seed)
    loaded = load_model(model, dtype=torch.bfloat16)
    spec = read_model(model).spec
    engine = EmbeddedEngine(loaded, spec, engine_id="e", max_running=32, policy_version=3)
    requests = []
    for group in range(num_groups):
        prompt = (1, *rng.integers(3, VOCAB, rng.integers(8, 18)).tolist())
        for member in range(group_size):
            lineage = Lineage(f"g{group}r{member}", f"p{group}", f"g{group}")
            own = replace(sampling, seed=int(rng.integers(1 << 30)))
            requests.append(RolloutRequest(lineage, prompt, own, int(rng.integers(20, 36)), (2,)))
    records = list(engine.generate(requests))
    engine.close()
    trajectories = sorted((Trajectory(**r.values) for r in records), key=lambda t: t.lineage.rollout_id)
    return [dumped(trajectory, engine=f"engine-{i % 4}") for i, trajectory in enumerate(trajectories)]


def dumped(trajectory: Trajectory, *, engine: str) -> DumpedRollout:
    """Returns a trajectory as a dump has it that records everything."""
    top_ps = np.ones(len(trajectory), np.float32)
    for turn in trajectory.turns:
        if turn.sampling is not None:
            top_ps[turn.start : turn.end] = turn.sampling.top_p
    return DumpedRollout(
        name=trajectory.lineage.rollout_id,
        token_ids=trajectory.token_ids,
        sampled=trajectory.sampled,
        rollout_logprobs=trajectory.rollout_logprobs,
        temperatures=trajectory.temperatures,
        top_ps=top_ps,
        policy_versions=trajectory.policy_versions,
        turns=turns_of(trajectory.sampled),
        expert_ids=trajectory.expert_ids.astype(np.int32),
        routed=trajectory.routed,
        kept=trajectory.kept,
        group=trajectory.lineage.group_id,
        engine=engine,
        step=3,
    )


def scorer(model: Path, *, dtype: torch.dtype = torch.bfloat16, version: int | None = None) -> TransformersScorer:
    cpu = torch.device("cpu")
    held = LoadedModels(dtype, cpu, cpu)
    return TransformersScorer(held, read_model(model), dtype=dtype, name=model.name, version=version)


@dataclass(frozen=True, eq=False)
class Ground:
    """A policy and an older one: scorers of both, and what the engine sampled from each."""

    now: TransformersScorer
    finer: TransformersScorer
    old: TransformersScorer
    clean: list[DumpedRollout]
    of_old: list[DumpedRollout]

    @classmethod
    def of(cls, now: Path, old: Path, *, seed: int = 0, num_groups: int) -> Ground:
        """now, old: directories of the two, versions 3 and 2."""
        return cls(
            scorer(now, version=3),
            scorer(now, dtype=torch.float32),
            scorer(old, version=2),
            sample(now, seed=seed, num_groups=num_groups),
            sample(old, seed=seed, num_groups=num_groups),
        )

    def diagnose(self, rollouts: Sequence[DumpedRollout], **options: Any) -> Diagnosis:
        return diagnose(rollouts, [self.now], self.finer, **options)


Plant = Callable[[Sequence[DumpedRollout]], list[DumpedRollout]]


def _each(change: Callable[[DumpedRollout], DumpedRollout]) -> Plant:
    return lambda rollouts: [change(rollout) for rollout in rollouts]


def _ids(rollout: DumpedRollout) -> np.ndarray:
    assert rollout.expert_ids is not None
    return rollout.expert_ids


def layer_late(rollout: DumpedRollout) -> DumpedRollout:
    return replace(rollout, expert_ids=np.roll(_ids(rollout), 1, axis=1))


def row_late(rollout: DumpedRollout) -> DumpedRollout:
    return replace(rollout, expert_ids=np.roll(_ids(rollout), 1, axis=0))


def one_layer_zero(rollout: DumpedRollout) -> DumpedRollout:
    ids = _ids(rollout).copy()
    ids[:, 2] = 0
    return replace(rollout, expert_ids=ids)


def one_layer_constant(rollout: DumpedRollout) -> DumpedRollout:
    ids = _ids(rollout).copy()
    ids[:, 2] = np.arange(ids.shape[2])
    return replace(rollout, expert_ids=ids)


def masks_late(rollout: DumpedRollout) -> DumpedRollout:
    return shifted(rollout, -1)


def renumbered(rollout: DumpedRollout) -> DumpedRollout:
    order = np.random.default_rng(5).permutation(EXPERTS).astype(np.int32)
    return replace(rollout, expert_ids=order[_ids(rollout)])


def wrong_temperature(rollout: DumpedRollout) -> DumpedRollout:
    """Drawn at 0.8, as the dump does not say."""
    return replace(rollout, temperatures=np.where(rollout.sampled, 1.0, 1.0).astype(np.float32))


def wrong_top_p(rollout: DumpedRollout) -> DumpedRollout:
    return replace(rollout, top_ps=np.where(rollout.sampled, 0.6, 1.0).astype(np.float32))


def without_masks(rollout: DumpedRollout) -> DumpedRollout:
    return replace(rollout, kept=None)


def lost_first_token(rollout: DumpedRollout) -> DumpedRollout:
    """The trainer's template leaves the first token of the prompt out; its routes go with it."""
    assert rollout.kept is not None
    kept = KeptSets(rollout.kept.offsets[1:], rollout.kept.ids)
    cut = {
        name: getattr(rollout, name)[1:]
        for name in ("token_ids", "sampled", "rollout_logprobs", "temperatures", "top_ps", "policy_versions", "turns")
    }
    return replace(rollout, **cut, kept=kept, expert_ids=_ids(rollout)[1:], routed=None)


def pads_as_routes(rollout: DumpedRollout) -> DumpedRollout:
    ids = _ids(rollout).copy()
    ids[-5:] = 0
    return replace(rollout, expert_ids=ids)


def extra_row(rollout: DumpedRollout) -> DumpedRollout:
    """A row for the last token, too, in front."""
    ids = _ids(rollout)
    return replace(rollout, expert_ids=np.concatenate([ids[:1], ids]), routed=None)


FAULTS: dict[str, tuple[Plant, str]] = {
    "layer late": (_each(layer_late), "layer_shift"),
    "row late": (_each(row_late), "row_shift"),
    "layer zero": (_each(one_layer_zero), "blank_layer"),
    "layer constant": (_each(one_layer_constant), "blank_layer"),
    "masks late": (_each(masks_late), "mask_shift"),
    "renumbered": (_each(renumbered), "renumbered"),
    "temperature": (_each(wrong_temperature), "temperature"),
    "top-p": (_each(wrong_top_p), "top_p"),
    "no masks": (_each(without_masks), "hidden_masks"),
    "pads": (_each(pads_as_routes), "route_pads"),
    "extra row": (_each(extra_row), "row_shift"),
}
"""By name: how it is planted, and the cause that must be named."""


def stale_prefix(rollouts: Sequence[DumpedRollout], old: TransformersScorer) -> list[DumpedRollout]:
    """Rows of prompts hold what older weights chose."""
    plain = [replace(rollout, expert_ids=None, routed=None) for rollout in rollouts]
    stale: list[DumpedRollout] = []
    for rollout, scored in zip(rollouts, old.score(plain, Question()), strict=True):
        ids = _ids(rollout).copy()
        ids[: rollout.num_prompt - 1] = scored.own_ids[: rollout.num_prompt - 1]
        stale.append(replace(rollout, expert_ids=ids))
    return stale


def one_engine_from(
    rollouts: Sequence[DumpedRollout], others: Sequence[DumpedRollout], engine: str = "engine-1"
) -> list[DumpedRollout]:
    """The rollouts of one engine are those of another dump."""
    return [other if rollout.engine == engine else rollout for rollout, other in zip(rollouts, others, strict=True)]


def first_token_again(rollout: DumpedRollout) -> DumpedRollout:
    """Takes `lost_first_token` back."""
    token = np.array([1], np.int32)
    assert rollout.kept is not None
    grown = {
        "token_ids": np.concatenate([token, rollout.token_ids]),
        "sampled": np.concatenate([[False], rollout.sampled]),
        "rollout_logprobs": np.concatenate([[0.0], rollout.rollout_logprobs]).astype(np.float32),
        "temperatures": np.concatenate([[1.0], rollout.temperatures]).astype(np.float32),
        "top_ps": np.concatenate([[1.0], rollout.top_ps]).astype(np.float32),
        "policy_versions": np.concatenate([[-1], rollout.policy_versions]).astype(np.int32),
        "turns": np.concatenate([[0], rollout.turns]).astype(np.int16),
    }
    kept = KeptSets(np.concatenate([[0], rollout.kept.offsets]), rollout.kept.ids)
    ids = _ids(rollout)
    routed = np.concatenate([[False], np.ones(len(ids), bool)])
    return replace(
        rollout, **grown, kept=kept, expert_ids=np.concatenate([np.full_like(ids[:1], -1), ids]), routed=routed
    )
