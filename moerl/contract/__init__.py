"""The data contract: what travels from a rollout engine to the trainer, and what each side promises.

numpy, msgspec and zstd only, so that it imports on a login node. Parquet dumps are `moerl.contract.disk`, which needs
pyarrow and is imported by name. Written down in docs/data_contract.md.
"""

from moerl.contract.batch import Microbatch, TextSample, TrainSample
from moerl.contract.batch_wire import decode_batches, encode_batches, share_frames
from moerl.contract.frame import SCHEMA_VERSION, WireLimits
from moerl.contract.invariants import check_trajectory, check_versions
from moerl.contract.kept import concat_kept_sets, slice_kept_sets
from moerl.contract.ports import (
    DemonstrationTask,
    EngineInfo,
    Prompt,
    RolloutEngine,
    RolloutRecord,
    RolloutRequest,
    Task,
    WeightSink,
)
from moerl.contract.quarantine import Quarantine, read_quarantined
from moerl.contract.reasons import Reason
from moerl.contract.routing import rollout_key, routing_checksums
from moerl.contract.trajectory import (
    MAX_KEPT_IDS,
    FinishReason,
    KeptSets,
    Lineage,
    ModelSpec,
    SamplingParams,
    Trajectory,
    Turn,
    TurnKind,
)
from moerl.contract.wire import decode_records, decode_trajectories, encode_trajectories
from moerl.errors import ContractError

__all__ = [
    "MAX_KEPT_IDS",
    "SCHEMA_VERSION",
    "ContractError",
    "DemonstrationTask",
    "EngineInfo",
    "FinishReason",
    "KeptSets",
    "Lineage",
    "Microbatch",
    "ModelSpec",
    "Prompt",
    "Quarantine",
    "Reason",
    "RolloutEngine",
    "RolloutRecord",
    "RolloutRequest",
    "SamplingParams",
    "Task",
    "TextSample",
    "TrainSample",
    "Trajectory",
    "Turn",
    "TurnKind",
    "WeightSink",
    "WireLimits",
    "check_trajectory",
    "check_versions",
    "concat_kept_sets",
    "decode_batches",
    "decode_records",
    "decode_trajectories",
    "encode_batches",
    "encode_trajectories",
    "read_quarantined",
    "rollout_key",
    "routing_checksums",
    "share_frames",
    "slice_kept_sets",
]
