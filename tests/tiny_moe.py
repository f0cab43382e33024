"""A tiny Qwen3-MoE, random batches for it, and transformers as the independent judge of what the trainer computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from factories import FULL, NUCLEUS, make_trajectory
from torch import Tensor, nn

from moerl.batching.packing import PackOptions, Uncaptured, pack_for_ranks
from moerl.batching.rows import Padding
from moerl.config.schema import OptimizerConfig
from moerl.contract.batch import BatchTotals, Microbatch, TrainSample
from moerl.contract.shares import cut_share
from moerl.contract.trajectory import ModelSpec
from moerl.models.description import ModelDescription, read_model

# An odd vocabulary: tensor parallelism has to pad it.
SPEC = ModelSpec(num_moe_layers=4, experts_per_token=2, num_experts=8, vocab_size=91, fingerprint="tiny")

# A large eps keeps Adam from turning the rounding of tiny gradients into whole steps.
OPTIMIZER = OptimizerConfig(
    lr=1e-2,
    min_lr_ratio=0.1,
    schedule="linear",
    warmup_steps=2,
    beta1=0.9,
    beta2=0.95,
    eps=1e-3,
    weight_decay=0.01,
    clip_grad=1.0,
)


def write_model(
    path: Path, *, tied: bool, seed: int, moe_intermediate_size: int = 48, max_positions: int = 256
) -> Path:
    """Saves a model of `SPEC` with random weights, norms included, in Hugging Face format."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=SPEC.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=SPEC.num_moe_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # pyright: ignore[reportCallIssue] - accepted through kwargs
        moe_intermediate_size=moe_intermediate_size,
        num_experts=SPEC.num_experts,
        num_experts_per_tok=SPEC.experts_per_token,
        norm_topk_prob=True,
        max_position_embeddings=max_positions,
        initializer_range=0.1,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    return path


def make_samples(
    seed: int, lengths: Sequence[int], *, uncaptured: float = 0.0, num_prompt: int | None = None
) -> list[TrainSample]:
    """Trajectories of these lengths with random routes and kept sets; every third one was drawn from everything.

    uncaptured: share of the routing rows that were not captured. num_prompt: tokens of each prompt, a third where not
    given.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for i, length in enumerate(lengths):
        num_given = num_prompt or length // 3
        trajectory = make_trajectory(
            rng,
            SPEC,
            num_prompt=num_given,
            num_sampled=length - num_given,
            sampling=FULL if i % 3 == 2 else NUCLEUS,
            rollout_id=f"rollout-{seed}-{i}",
            unrouted=np.flatnonzero(rng.random(length - 1) < uncaptured) if uncaptured else (),
        )
        advantages = rng.standard_normal(length).astype(np.float32)
        samples.append(TrainSample(trajectory, advantages * trajectory.sampled))
    return samples


def pack(
    samples: Sequence[TrainSample],
    *,
    num_ranks: int = 1,
    token_budget: int = 64,
    multiple: int = 4,
    sequence: int = 1,
    uncaptured: Uncaptured = "reject",
    count_multiple: int = 1,
) -> list[list[Microbatch]]:
    """Microbatches per rank; `multiple` and `sequence` are those of `Padding`."""
    options = PackOptions(token_budget, Padding(sequence, multiple), count_multiple=count_multiple)
    return pack_for_ranks(samples, num_ranks, options, replay=True, uncaptured=uncaptured)


def num_trained(batches: Sequence[Microbatch]) -> float:
    return float(sum(int(batch.loss_mask.sum()) for batch in batches))


def by_sample(batches: Sequence[Microbatch], rows: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """Per-row values of each sample, in the order of its tokens."""
    return {
        index: values[batch.sample_index == index]
        for batch, values in zip(batches, rows, strict=True)
        for index in np.unique(batch.sample_index[~batch.is_pad]).tolist()
    }


# --- the judge -------------------------------------------------------------------------------------------------------


class Judge:
    """transformers on the same weights, one sequence at a time, optionally with enforced routes."""

    def __init__(self, path: Path) -> None:
        from transformers import Qwen3MoeForCausalLM

        self.model: Any = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self._routes: np.ndarray | None = None
        for index, layer in enumerate(self.model.model.layers):
            self._take_over(layer.mlp.gate, index)

    def _take_over(self, gate: Any, layer: int) -> None:
        natural = gate.forward

        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if self._routes is None:
                return natural(hidden)
            logits = nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            forced = torch.from_numpy(self._routes[:, layer].astype(np.int64))
            chosen = logits.softmax(-1).gather(1, forced)
            return logits, chosen / chosen.sum(-1, keepdim=True), forced

        gate.forward = forward

    def logits(self, input_ids: np.ndarray, routes: np.ndarray | None = None) -> Tensor:
        """[T, V] logits of one sequence; `routes` [T, L, K] are enforced where given."""
        self._routes = routes
        ids = torch.from_numpy(input_ids.astype(np.int64))[None]
        return self.model(input_ids=ids, use_cache=False).logits[0]

    def gradients(self) -> dict[str, np.ndarray]:
        return {name: p.grad.numpy() for name, p in self.model.named_parameters() if p.grad is not None}


def support_logprobs(logits_TV: Tensor, sample: TrainSample, *, keep_mask: bool = True) -> Tensor:
    """float64 [T, V] log-softmax over the support of each next token, -inf outside; a loop over rows."""
    trajectory = sample.trajectory
    z_TV = logits_TV.double() / torch.from_numpy(trajectory.temperatures[1:]).double()[:, None]
    rows = []
    for t, z_V in enumerate(z_TV, start=1):
        outside_V = torch.zeros(len(z_V), dtype=torch.bool)
        if keep_mask and trajectory.truncated[t]:
            listed = trajectory.kept.ids[trajectory.kept.offsets[t] : trajectory.kept.offsets[t + 1]]
            outside_V[:] = True
            outside_V[torch.from_numpy(listed.astype(np.int64))] = False
        rows.append(z_V.masked_fill(outside_V, -torch.inf).log_softmax(-1))
    return torch.stack(rows)


def target_logprobs(logprobs_TV: Tensor, sample: TrainSample) -> Tensor:
    """[T]: the log-prob of each next token."""
    targets = torch.from_numpy(sample.trajectory.token_ids[1:].astype(np.int64))
    return logprobs_TV.gather(1, targets[:, None])[:, 0]


def described(path: Path) -> ModelDescription:
    """The model that `write_model` saved, with `SPEC`."""
    return replace(read_model(path), spec=SPEC)


# --- in a rank -------------------------------------------------------------------------------------------------------


def build(
    layout: Any,
    path: Path,
    *,
    total_steps: int = 8,
    optimizer: Any = OPTIMIZER,
    sharding: str = "off",
    offload: float = 0.0,
    **options: Any,
) -> Any:
    """A trainer of the model at `path` for this rank; `options` are those of `ModelOptions`."""
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.optimizer import StateOptions
    from moerl.trainer.trainer import MegatronTrainer

    state = StateOptions(sharding, offload)
    return MegatronTrainer(described(path), layout, ModelOptions(**options), optimizer, total_steps, state)


def shares(
    trainer: Any,
    samples: Sequence[TrainSample],
    *,
    token_budget: int = 64,
    uncaptured: Uncaptured = "reject",
    share_prompts: bool = False,
) -> tuple[list[Microbatch], float]:
    """This rank's shares of `samples` packed for the trainer's layout, and the trained tokens of all ranks."""
    layout = trainer.layout
    padding = Padding.of(layout.dims)
    multiple = layout.dims.microbatch_multiple
    options = PackOptions(token_budget, padding, count_multiple=multiple, share_prompts=share_prompts)
    ranks = pack_for_ranks(samples, layout.dims.data, options, replay=True, uncaptured=uncaptured)
    denominator = num_trained([batch for batches in ranks for batch in batches])
    return [cut_share(batch, trainer.layout) for batch in ranks[layout.data_rank]], denominator


def mine(trainer: Any, ranks: Sequence[Sequence[Microbatch]]) -> list[Microbatch]:
    """This rank's shares of whole microbatches per data-parallel rank; one process takes all of them."""
    layout = trainer.layout
    parts = ranks if layout.dims.world_size == 1 else [ranks[layout.data_rank]]
    return [cut_share(batch, trainer.layout) for part in parts for batch in part]


def speaks(trainer: Any) -> bool:
    """True on the ranks whose rows, taken together, are every row once: those of the last stage, the first of each
    tensor-parallel group."""
    return trainer.layout.is_last_stage and trainer.layout.tensor_rank == 0


def row_table(trainer: Any, batches: Sequence[Microbatch], rows: Sequence[Tensor]) -> np.ndarray:
    """float64 [R, 3]: sample, position and value of this rank's rows; over all ranks every row of a sample once."""
    if not speaks(trainer):
        return np.zeros((0, 3))
    parts = [
        np.stack([batch.sample_index, batch.position_ids, values.double().numpy()], 1)[~batch.is_pad]
        for batch, values in zip(batches, rows, strict=True)
    ]
    return np.concatenate(parts)


def gathered(tables: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """Values of each sample in the order of its tokens, from the `row_table`s of all ranks."""
    rows = np.concatenate(tables)
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    values = {index: rows[rows[:, 0] == index] for index in np.unique(rows[:, 0]).astype(int).tolist()}
    for index, part in values.items():
        np.testing.assert_array_equal(part[:, 1], np.arange(len(part)), err_msg=f"positions of sample {index}")
    return {index: part[:, 2] for index, part in values.items()}


def shift_rows(batch: Microbatch) -> Microbatch:
    """Every token with the experts of the one before it."""
    assert batch.expert_ids is not None
    return replace(batch, expert_ids=np.roll(batch.expert_ids, 1, axis=0))


def shift_layers(batch: Microbatch) -> Microbatch:
    """Every layer with the experts of the one before it."""
    assert batch.expert_ids is not None
    return replace(batch, expert_ids=np.roll(batch.expert_ids, 1, axis=1))


def policy_loss(trainer: Any, batches: Sequence[Microbatch], denominator: float, **options: Any) -> Any:
    """GRPO's loss over `batches`, of which the number of sequences is not known; `options` as in
    `PolicyGradientLoss`."""
    from policy_rows import grpo

    from moerl.trainer.losses import PolicyGradientLoss, Scorer

    scorer = Scorer(batches, options.pop("keep_mask", True), reference=options.pop("reference", None))
    totals = options.pop("totals", BatchTotals(denominator, float("nan")))
    return PolicyGradientLoss(scorer, options.pop("algorithm", grpo()), totals, trainer.layout, **options)


def exported(trainer: Any) -> dict[str, np.ndarray]:
    """Copies of the full weights under their Hugging Face names; all ranks together."""
    return {name: tensor.float().numpy().copy() for name, tensor in trainer.export()}


def gradients(trainer: Any) -> dict[str, np.ndarray]:
    """Returns copies of Megatron's gradient buffers after the last step, by Megatron's names."""
    return {name: p.main_grad.float().numpy().copy() for name, p in trainer.model.chunks[0].named_parameters()}


def largest_difference(left: dict[Any, np.ndarray], right: dict[Any, np.ndarray]) -> float:
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)


def save(trainer: Any, folder: Path, name: str) -> Path:
    """Writes the checkpoint `name` of a trainer into a store at `folder`; all ranks together. Returns where it is."""
    from moerl.trainer.checkpoint import CheckpointStore
    from moerl.trainer.saver import Saver

    saver = Saver(CheckpointStore(folder, keep=2))
    saver.save(name, trainer.stage(), checkpoint_state(name))
    saver.wait()
    return folder / name


def checkpoint_state(name: str) -> dict[str, Any]:
    """Returns the state that the manifest of the checkpoint `name` has to have."""
    _, stage, step = name.split("-")
    return {"stage": stage, "step": int(step)}
