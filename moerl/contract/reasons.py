"""Reason codes: every way a record, frame or file can break the data contract, by a stable name.

Codes are part of the contract: dashboards count them and quarantined records carry them, so a code is never renamed
or reused. `docs/data_contract.md` explains each.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a record was refused; `ContractError.reason` is always one of these."""

    # Shape of the record
    MISSING_FIELD = "missing_field"
    UNKNOWN_FIELD = "unknown_field"
    DUPLICATE_FIELD = "duplicate_field"
    TEXT_TOO_LONG = "text_too_long"
    TOO_MANY_NAMES = "too_many_names"
    WRONG_TYPE = "wrong_type"
    WRONG_DTYPE = "wrong_dtype"
    WRONG_SHAPE = "wrong_shape"
    VALUE_OUT_OF_RANGE = "value_out_of_range"
    VALUE_NOT_FINITE = "value_not_finite"
    TEXT_NOT_UTF8 = "text_not_utf8"
    SPEC_INVALID = "spec_invalid"
    SPEC_MISMATCH = "spec_mismatch"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    LINEAGE_INCOMPLETE = "lineage_incomplete"

    # Tokens and turns
    TOO_SHORT = "too_short"
    TOKEN_ID_OUT_OF_RANGE = "token_id_out_of_range"
    FIRST_TOKEN_SAMPLED = "first_token_sampled"
    NOTHING_SAMPLED = "nothing_sampled"
    NOT_TRIMMED = "not_trimmed"
    TURNS_DO_NOT_COVER = "turns_do_not_cover"
    TURN_KIND_DISAGREES = "turn_kind_disagrees"
    SAMPLING_MISPLACED = "sampling_misplaced"
    SAMPLING_INVALID = "sampling_invalid"

    # Per-token values
    LOGPROB_NOT_FINITE = "logprob_not_finite"
    LOGPROB_POSITIVE = "logprob_positive"
    LOGPROB_NOT_ZERO = "logprob_not_zero"
    SINGLETON_LOGPROB_NOT_ZERO = "singleton_logprob_not_zero"
    KEPT_MASS_NOT_FINITE = "kept_mass_not_finite"
    KEPT_MASS_POSITIVE = "kept_mass_positive"
    KEPT_MASS_NOT_ZERO = "kept_mass_not_zero"
    VERSION_NEGATIVE = "version_negative"
    VERSION_NOT_SAMPLED = "version_not_sampled"
    VERSION_FROM_THE_FUTURE = "version_from_the_future"

    # Kept sets
    OFFSETS_NOT_FROM_ZERO = "offsets_not_from_zero"
    OFFSETS_FALL = "offsets_fall"
    OFFSETS_END_WRONG = "offsets_end_wrong"
    TRUNCATED_NOT_SAMPLED = "truncated_not_sampled"
    TRUNCATED_UNDER_FULL_SAMPLING = "truncated_under_full_sampling"
    KEPT_SET_MISSING = "kept_set_missing"
    KEPT_SET_EMPTY = "kept_set_empty"
    KEPT_SET_NOT_TRUNCATED = "kept_set_not_truncated"
    KEPT_SET_TOO_LARGE = "kept_set_too_large"
    KEPT_ID_OUT_OF_RANGE = "kept_id_out_of_range"
    KEPT_IDS_UNSORTED = "kept_ids_unsorted"
    SAMPLED_TOKEN_NOT_KEPT = "sampled_token_not_kept"

    # Routing
    EXPERT_ID_OUT_OF_RANGE = "expert_id_out_of_range"
    REPEATED_EXPERT = "repeated_expert"
    MOE_LAYER_OF_ZEROS = "moe_layer_of_zeros"
    UNROUTED_ROW_NOT_ZERO = "unrouted_row_not_zero"

    # Frames and files
    FRAME_TRUNCATED = "frame_truncated"
    FRAME_TOO_LARGE = "frame_too_large"
    FRAME_CORRUPT = "frame_corrupt"
    FRAME_KIND_WRONG = "frame_kind_wrong"
    SCHEMA_VERSION_UNKNOWN = "schema_version_unknown"
    MESSAGE_MALFORMED = "message_malformed"
    ARRAY_LENGTH_WRONG = "array_length_wrong"
    FILE_CORRUPT = "file_corrupt"
    FILE_TOO_LARGE = "file_too_large"

    # Scoring in the trainer
    KEPT_ID_OUTSIDE_VOCABULARY = "kept_id_outside_vocabulary"
    TARGET_NOT_IN_KEPT_SET = "target_not_in_kept_set"
    TARGET_OUTSIDE_VOCABULARY = "target_outside_vocabulary"
    TEMPERATURE_NOT_POSITIVE = "temperature_not_positive"
    VOCAB_SHARD_BOUNDS = "vocab_shard_bounds"
    VOCAB_SHARD_WITHOUT_GROUP = "vocab_shard_without_group"
    ROWS_DIFFER = "rows_differ"
    KEPT_SHAPE = "kept_shape"
    TRUNCATED_DISAGREES = "truncated_disagrees"
    NO_TRAINED_TOKEN = "no_trained_token"

    # Admission
    ROLLOUT_ID_DISAGREES = "rollout_id_disagrees"
    ROLLOUT_DUPLICATE = "rollout_duplicate"
    ROLLOUT_UNREQUESTED = "rollout_unrequested"
    REWARD_FAILED = "reward_failed"
    EPISODE_FAILED = "episode_failed"
    EPISODE_LIMITED = "episode_limited"
    TURN_BREAKS_OFF = "turn_breaks_off"
    QUARANTINE_RATE_EXCEEDED = "quarantine_rate_exceeded"
