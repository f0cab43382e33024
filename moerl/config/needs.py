"""Needs of a trainer rank, by the configuration of a run. Torch-free; any process."""

from __future__ import annotations

from moerl.config.schema import RunConfig
from moerl.machine.memory import Needs


def needs_of(config: RunConfig) -> Needs:
    """Returns the needs of a rank by the configuration of a run."""
    return Needs(
        microbatch_tokens=config.trainer.microbatch_tokens,
        element_bytes=2 if config.model.dtype == "bfloat16" else 4,
        recompute=config.trainer.recompute,
        distributed_optimizer=config.trainer.distributed_optimizer != "off",
        reference=config.algorithm.reference_kl is not None,
        offload=config.trainer.optimizer_offload,
    )
