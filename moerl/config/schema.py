"""The configuration of a run as frozen, strict pydantic models; values live in `configs/`, not here.

Read by every process. A field is described once, at the field; `--help` prints these descriptions. Rules between
fields are in `moerl.config.checks`; `moerl.config.load` makes no `RunConfig` that breaks one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from moerl.algorithms.registry import AlgorithmConfig
from moerl.buffer.queue import QueueLimits
from moerl.config.rollouts import EpisodeConfig, RolloutConfig
from moerl.config.training import TrainerConfig, bare_off
from moerl.contract.parallel import ParallelDims, smallest_data
from moerl.contract.trajectory import MAX_KEPT_IDS
from moerl.machine.memory import Needs
from moerl.scorers.registry import ScorerConfig
from moerl.scorers.section import ScorerName
from moerl.sections import (
    Count,
    CountOrZero,
    Decay,
    FilePath,
    FloatName,
    NonNegative,
    Positive,
    Ranks,
    Section,
    Share,
    Size,
    Threads,
)
from moerl.tasks.registry import TaskConfig

ADDRESS = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9.\-]*):[0-9]{1,5}$"
"""Pattern of ``HOST:PORT``."""


class ArchitectureConfig(Section):
    """A Qwen3-MoE model to build from scratch; every layer is an MoE layer."""

    hidden_size: Size = Field(description="Width of the residual stream.")
    num_layers: Annotated[int, Field(ge=1, le=1000)] = Field(description="Transformer layers, each with experts.")
    num_attention_heads: Size = Field(description="Query heads.")
    num_key_value_heads: Size = Field(description="Key and value heads (GQA).")
    head_dim: Size = Field(description="Width of one attention head; even.")
    num_experts: Size = Field(description="Experts per layer.")
    experts_per_token: Size = Field(description="Experts that each token is sent to.")
    moe_intermediate_size: Size = Field(description="Inner width of one expert.")
    max_positions: Size = Field(description="Longest sequence, prompt and response, in tokens.")
    initializer_range: Positive = Field(description="Standard deviation of the initial weights.")
    tie_word_embeddings: bool = Field(description="Share input and output embeddings.")
    vocab_size: Size = Field(description="Largest vocabulary that the tokenizer may have; the model gets as many ids.")


class ModelConfig(Section):
    """Model that is trained: one of `path` and `architecture`."""

    path: FilePath | None = Field(
        description="Hugging Face directory, or OWNER/NAME[@REVISION] of the hub, to start from; null builds"
        " `architecture`."
    )
    hub: str | None = Field(
        default=None, description="Name on the hub that `path` was given as; the run sets it, and stores its directory."
    )
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = Field(
        default=None, description="Commit that `hub` stood for as the run began; the run sets it, and keeps to it."
    )
    dtype: FloatName = Field(description="Precision of the trainer.")
    architecture: ArchitectureConfig | None = Field(description="Model to build; null starts from `path`.")
    tokenizer: FilePath | None = Field(
        default=None,
        description="Directory with the tokenizer of the model to build, chat template included; null trains one on the"
        " texts of the task.",
    )

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the trainer's weights."""
        return 2 if self.dtype == "bfloat16" else 4


class ParallelConfig(Section):
    """Parallel sizes of the trainer."""

    tensor: Ranks = Field(description="Tensor-parallel size; includes sequence parallelism.")
    pipeline: Ranks = Field(description="Pipeline-parallel size; stages differ by one layer at most.")
    virtual_pipeline: Ranks = Field(
        description="Model chunks per pipeline stage; more than 1 interleaves them, for smaller pipeline bubbles."
    )
    expert: Ranks = Field(description="Expert-parallel size.")
    expert_tensor: Ranks = Field(description="Tensor-parallel size inside an expert.")
    context: Ranks = Field(description="Context-parallel size; each sequence is cut into zig-zag slices.")
    data: Ranks | None = Field(description="Data-parallel size; null takes the smallest that fits the rest.")

    @property
    def dims(self) -> ParallelDims:
        """The sizes in force."""
        data = self.data or smallest_data(
            tensor=self.tensor, context=self.context, expert=self.expert, expert_tensor=self.expert_tensor
        )
        return ParallelDims(**{**dict(self), "data": data})

    @property
    def world_size(self) -> int:
        """Processes of the trainer."""
        return self.dims.world_size


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: Positive = Field(description="Peak learning rate.")
    min_lr_ratio: Share = Field(description="Last learning rate as a share of `lr`.")
    schedule: Literal["constant", "linear", "cosine"] = Field(description="Decay after the warm-up.")
    warmup_steps: CountOrZero = Field(description="Optimizer steps of linear warm-up.")
    beta1: Decay = Field(description="Decay of the first moment.")
    beta2: Decay = Field(description="Decay of the second moment.")
    eps: Positive = Field(description="Added to the denominator of the update.")
    weight_decay: NonNegative = Field(description="Decoupled weight decay.")
    clip_grad: NonNegative = Field(description="Largest global gradient norm; 0 = no clipping.")


class RLConfig(Section):
    """The loop of the reinforcement learning, whatever the algorithm."""

    steps: Count = Field(description="Batches of rollouts to train on.")
    prompts_per_step: Count = Field(description="Prompts in a batch.")
    group_size: Annotated[int, Field(ge=2)] = Field(description="Responses sampled per prompt.")
    keep: Annotated[int, Field(ge=2)] | None = Field(
        description="Responses of a group that are trained, of group_size that are sampled: of those that failed evenly"
        " many at random, of those that succeeded the best by keep_by (GRPO-RoC); null = all."
    )
    keep_by: Annotated[str, Field(min_length=1)] = Field(
        description="What is best among responses that succeeded: the fewest tokens (shortest), or the highest"
        " reward of this name."
    )
    minibatches: Count = Field(description="Optimizer steps per batch.")
    moe_aux_loss_coef: NonNegative = Field(description="Weight of the load-balancing loss.")
    filters: list[Literal["equal_rewards", "truncated"]] = Field(
        description="Groups that are not trained on but replaced: those whose rewards are all equal; those of which no"
        " response came to its end."
    )

    skip_above: Share | None = Field(
        description="Prompts are passed over if more than this share of the responses of their latest group was"
        " right; 4 epochs later they come again. null = none is."
    )
    skip_below: Share | None = Field(description="The same if less than this share was right; null = none is.")
    weigh_prompts: Literal["even", "variance"] = Field(
        description="variance = prompts come the less often, the further the share of right responses of their latest"
        " group is from a half: with the chance 4 p (1 - p), 0.1 at least."
    )

    @property
    def trained_size(self) -> int:
        """Responses of a group that are trained, if none is refused."""
        return min(self.keep or self.group_size, self.group_size)


class BufferConfig(Section):
    """Buffer of groups between sampling and training."""

    max_staleness: CountOrZero = Field(
        description="Versions that sampling may run ahead of training; 0 = each step waits for its own responses."
    )
    window: Count = Field(
        description="Groups, from the oldest on, of which finished ones are trained first; 1 = strictly in order. No"
        " token is older than max_staleness + ceil((window - 1) / prompts_per_step) versions."
    )
    when_stale: Literal["wait", "drop"] = Field(
        description="wait = finished groups wait for slow ones as far as the window says, and none is dropped for its"
        " age; drop = groups are trained as they finish, and those older than max_staleness by then are dropped, which"
        " favours short responses."
    )


class KeepRoutingConfig(Section):
    """Keep Routing."""

    mode: Annotated[Literal["off", "rollout", "trainer"], BeforeValidator(bare_off)] = Field(
        description="Experts used in training: rollout = those that the sampler used; trainer = those that the trainer"
        " chose in its first pass on the batch; off = each pass chooses its own."
    )
    reference: Annotated[Literal["off", "rollout", "trainer"] | None, BeforeValidator(bare_off)] = Field(
        description="The same choice for the reference model; trainer needs mode=trainer; null = as mode."
    )
    verify: Annotated[Literal["every", "off"] | Count, BeforeValidator(bare_off)] = Field(
        description="How often checksums must prove, before an update, that recorded experts reached the dispatchers:"
        " every update, every n-th, or never. Router calls are always counted."
    )
    uncaptured: Literal["reject", "live"] = Field(
        description="Rows without captured routing: reject = stop the run; live = the trainer's router chooses."
    )

    @property
    def reference_mode(self) -> str:
        """Returns `reference`, or `mode` if that is null."""
        return self.reference or self.mode


class KeepSamplingMaskConfig(Section):
    """Keep Sampling Mask."""

    enabled: bool = Field(description="Score sampled tokens inside the set they were drawn from.")


class WeightsConfig(Section):
    """Updates of the engine's weights."""

    gather: Literal["sender", "allgather"] = Field(
        description="sender = each part goes only to the rank that sends it to the engine; allgather = every rank that"
        " holds a part receives all parts (slow and simple, for comparison)."
    )
    bucket_bytes: Count = Field(
        description="Largest group of tensors that are sent together, from the trainer to every server; a rank needs up"
        " to twice this memory."
    )
    transport: Literal["direct", "disk"] = Field(
        description="direct = straight into the engine; disk = through version folders in the run directory,"
        " which engines on other machines can read."
    )
    senders: Ranks = Field(
        description="Ranks that send weights side by side; useful up to the number of servers or disks. The embedded"
        " engine receives from one."
    )
    interrupt: Literal["retract", "abort_resume", "drain"] = Field(
        description="What an update does to responses that servers work on: retract = the server computes them again"
        " with the new weights and goes on; abort_resume = they are cut short, kept, and continued by any server;"
        " drain = the update waits until they have ended."
    )
    every: Count = Field(
        description="Steps between two updates of engines, at most buffer.max_staleness + 1. Before an evaluation they"
        " are updated anyway."
    )
    verify: Annotated[Literal["every", "off"] | Count, BeforeValidator(bare_off)] = Field(
        description="How often the engine's checksums of all tensors are compared with the trainer's: after every"
        " update, every n-th, or never."
    )
    step_seconds: Positive = Field(
        description="Time limit of one step of a weight update: begin, gather a bucket, send a bucket, end, compare"
        " checksums. A rank waits twice this long for another rank."
    )


class SftConfig(Section):
    """Cold start by supervised fine-tuning on the task's demonstrations."""

    steps: CountOrZero = Field(description="Optimizer steps; 0 = no cold start.")
    batch_size: Count = Field(description="Demonstrations per step.")
    num_examples: Count = Field(description="Demonstrations to draw from.")
    moe_aux_loss_coef: NonNegative = Field(description="Weight of the load-balancing loss.")
    optimizer: OptimizerConfig = Field(description="Optimizer of the cold start.")


class EvaluationConfig(Section):
    """Evaluation: greedy, and on held-out problems with several samples if asked for."""

    every: CountOrZero = Field(description="Steps between evaluations on dev problems; 0 = start and end only.")
    dev_problems: Count = Field(description="Problems looked at while training.")
    heldout_problems: Count = Field(description="Problems for the final numbers, looked at by nothing else.")
    samples: CountOrZero = Field(
        description="Responses sampled to each held-out problem besides the greedy one, for pass@k and majority@k."
    )
    temperature: Positive = Field(description="Temperature of these samples.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(description="Nucleus of these samples.")
    top_k: Annotated[int, Field(ge=1, le=MAX_KEPT_IDS)] | None = Field(
        default=None, description="Most likely tokens that these samples are drawn from; null = rollout.top_k."
    )


class CheckpointConfig(Section):
    """Trainer checkpoints, from which a run goes on."""

    every: CountOrZero = Field(description="Steps between checkpoints; 0 = at the end of a stage only.")
    keep: Annotated[int, Field(ge=2)] = Field(description="Newest checkpoints to keep; 2 at least.")
    grace_seconds: Positive | None = Field(
        description="Longest time between a signal to stop and the end of the run; a step that takes longer is given"
        " up, and done again when the run goes on. null = until it has ended and its checkpoint is written."
    )


class MismatchConfig(Section):
    """Comparison of the sampler with the trainer."""

    every: CountOrZero = Field(description="Steps between mismatch tables; 0 = at the first and last step only.")


class DumpConfig(Section):
    """Rollouts on disk."""

    rollouts_every: CountOrZero = Field(description="Steps between Parquet dumps of the rollouts; 0 = never.")


class MetricsConfig(Section):
    """Destinations of metrics."""

    sinks: list[Literal["jsonl", "tensorboard", "wandb", "mlflow", "trackio"]] = Field(
        description="Files and trackers that get every row: jsonl (always) and tensorboard in the run directory; wandb,"
        " mlflow and trackio, each an extra to install, which stay in the run directory too unless the tracker's own"
        " settings (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID) say otherwise."
    )
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_\-]{0,63}$")] = Field(
        description="Project of the run in trackers."
    )


class QuarantineConfig(Section):
    """Trajectories that break the data contract."""

    max_rate: Share = Field(description="Share of quarantined trajectories above which the run stops.")


class LaunchConfig(Section):
    """Placement of the trainer's ranks."""

    on: Literal["local", "ray"] = Field(
        description="local = on this machine: one rank in the run's process if buffer.max_staleness is 0, else child"
        " processes; ray = as actors of a Ray cluster, on any number of machines (an extra to install)."
    )
    address: Annotated[str, Field(pattern=ADDRESS)] | None = Field(
        description="HOST:PORT of a Ray cluster that runs, with the run started on one of its nodes; null = one on this"
        " machine, for the time of the run."
    )


class RunConfig(Section):
    """Everything that decides what a run does. Paths are absolute, so that a run goes on from any directory."""

    command: Literal["train", "sft", "rollout", "eval"] = Field(description="Command of the run; set by moerl itself.")
    recipe: str = Field(description="Recipe the run started from.")
    seed: CountOrZero = Field(description="Seed of weights, prompts and sampling.")
    run_dir: FilePath = Field(description="Directory of the run; null = a new one below runs/, named by the recipe.")
    num_threads: Threads = Field(description="CPU threads of the whole run; results depend on it.")
    model: ModelConfig = Field(description="The model.")
    parallel: ParallelConfig = Field(description="Parallel sizes.")
    trainer: TrainerConfig = Field(description="The trainer.")
    rl: RLConfig = Field(description="The loop of the reinforcement learning.")
    optimizer: OptimizerConfig = Field(description="Optimizer of the reinforcement learning.")
    algorithm: AlgorithmConfig = Field(description="The algorithm.")
    buffer: BufferConfig = Field(description="What waits between sampling and training.")
    rollout: RolloutConfig = Field(description="Sampling.")
    episode: EpisodeConfig = Field(default=EpisodeConfig(), description="Limits of episodes.")
    keep_routing: KeepRoutingConfig = Field(description="Keep Routing.")
    keep_sampling_mask: KeepSamplingMaskConfig = Field(description="Keep Sampling Mask.")
    weights: WeightsConfig = Field(description="Weight updates.")
    sft: SftConfig = Field(description="Cold start.")
    task: TaskConfig = Field(description="The task.")
    scorers: dict[ScorerName, ScorerConfig] = Field(
        default={},
        description="Scorers of sampled tokens by name, as {teacher: {kind: model, path: DIR}}; algorithm.scores brings"
        " their numbers to advantages and loss.",
    )
    evaluation: EvaluationConfig = Field(description="Evaluation.")
    checkpoint: CheckpointConfig = Field(description="Checkpoints.")
    mismatch: MismatchConfig = Field(description="Mismatch tables.")
    dump: DumpConfig = Field(description="Rollout dumps.")
    quarantine: QuarantineConfig = Field(description="Quarantine.")
    launch: LaunchConfig = Field(description="Placement of the trainer's ranks.")
    metrics: MetricsConfig = Field(description="Destinations of metrics.")

    def queue_limits(self) -> QueueLimits:
        """Returns the limits of the queue. Raises `ConfigError` if they contradict each other."""
        buffer, per_step, drops = self.buffer, self.rl.prompts_per_step, self.buffer.when_stale == "drop"
        return QueueLimits(per_step, buffer.max_staleness, buffer.window, drops, self.weights.every)

    def rank_needs(self) -> Needs:
        """Returns the settings that decide how much memory a trainer rank needs."""
        return Needs(
            microbatch_tokens=self.trainer.microbatch_tokens,
            element_bytes=self.model.element_bytes,
            recompute=self.trainer.recompute,
            distributed_optimizer=self.trainer.distributed_optimizer != "off",
            reference=self.algorithm.reference_kl is not None,
            offload=self.trainer.optimizer_offload,
            overlap=self.trainer.distributed_optimizer == "overlap",
        )
