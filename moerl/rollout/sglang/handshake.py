"""Facts that a server reports about itself, compared with what the trainer needs. Pure functions on parsed JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moerl.contract.trajectory import MAX_KEPT_IDS, ModelSpec
from moerl.errors import EngineError
from moerl.rollout.sglang.answers import SCHEMA
from moerl.rollout.sglang.patches import releases

UNSYNCED = "none"
"""Label of weights that the trainer did not send: tokens that they sampled can never be read as the policy's."""

_EXPERTS_STAY = {
    "enable_eplb": False,
    "ep_num_redundant_experts": 0,
    "init_expert_location": "trivial",
    "ep_dispatch_algorithm": None,
}
"""Options of a server whose experts are in the checkpoint's order, one copy of each."""

_REINSTALL = "start the server from an environment made by `moerl sglang install` of this version of moerl"


class ContractReport(msgspec.Struct):
    """`internal_states[*].contract` of `/server_info`, written by the patches."""

    fingerprint: str
    """Fingerprint of the applied patches; empty if none are stamped."""
    compact_schema: int
    """Schema of the compact field that the server writes."""
    vocab_size: int
    """Ids below it can be sampled."""
    max_request_tokens: int
    """Prompt and new tokens that one request may have together."""
    moe_layers: list[int]
    """Indices of the decoder layers whose routing is captured."""
    num_experts: int = 0
    """Experts of a layer; 0 if the server does not say."""
    experts_per_token: int = 0
    """Experts that a token uses; 0 if the server does not say."""
    expert_ids: str = ""
    """`logical`, or another numbering of experts; empty if the server does not say."""
    expert_bytes: int = 0
    """Bytes of one expert id; 0 if the server does not say."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts about a server, from its handshake."""

    version: str
    """Release of SGLang."""
    policy_version: int
    """Version of the weights that the server holds; -1 for weights that the trainer did not send."""
    report: ContractReport
    """Report of the patches."""
    num_ranks: int
    """Ranks of its tensor parallelism."""
    device: str
    """cuda or cpu."""
    dtype: str
    """Dtype of its weights and activations."""
    sampling_backend: str
    """Value of `--sampling-backend`."""
    sampling_mask_max_tokens: int
    """Ids of a kept set, at most."""
    speculative_algorithm: str | None
    """None if it drafts no tokens."""
    hierarchical_cache: bool
    """True if its prefix cache has host memory, too."""
    places_experts: tuple[str, ...]
    """Options, under SGLang's names, that give experts other places than the checkpoint's order, or several."""


def read_facts(info: Mapping[str, Any], weight_version: str) -> ServerFacts:
    """Reads facts from the JSON of `/server_info` and the weights' label of `/model_info`.

    Raises:
        EngineError: the server is another release, lacks the patches, or labels its weights with no whole number.
    """
    version = info.get("version")
    if version not in releases():
        raise _refusal("release", version, " or ".join(releases()))
    states = info.get("internal_states")
    contract = states[0].get("contract") if isinstance(states, list) and states else None
    if contract is None:
        raise _refusal("handshake", "no contract in its internal state", "a patched server")
    policy_version = read_version(weight_version)
    try:
        return ServerFacts(
            version=str(version),
            policy_version=policy_version,
            report=msgspec.convert(contract, ContractReport),
            num_ranks=int(info["tp_size"]),
            device=str(info["device"]),
            dtype=str(info["dtype"]),
            sampling_backend=str(info["sampling_backend"]),
            sampling_mask_max_tokens=int(info["sampling_mask_max_tokens"]),
            speculative_algorithm=info["speculative_algorithm"],
            hierarchical_cache=bool(info["enable_hierarchical_cache"]),
            places_experts=tuple(name for name, usual in _EXPERTS_STAY.items() if info[name] != usual),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _refusal("handshake", f"{type(error).__name__}: {error}", "the facts of a patched server") from error


def read_version(label: str) -> int:
    """Reads the policy version that a label of weights means; -1 for weights that the trainer did not send.

    Raises:
        EngineError: it is no whole number.
    """
    if label != UNSYNCED and not label.isdecimal():
        raise EngineError(
            "SGLang server: weight version",
            seen=label,
            expected="a whole number",
            remedy="start it with `moerl serve`, or with --weight-version 0",
        )
    return -1 if label == UNSYNCED else int(label)


def check_patches(facts: ServerFacts, fingerprint: str) -> None:
    """Raises EngineError if the server runs without the patches, or with others."""
    if facts.report.fingerprint != fingerprint:
        raise _refusal("patches", facts.report.fingerprint or "unstamped", f"fingerprint {fingerprint}")
    if facts.report.compact_schema != SCHEMA:
        raise _refusal("compact answers", facts.report.compact_schema, f"schema {SCHEMA}")


def check_model(facts: ServerFacts, spec: ModelSpec, moe_layers: Sequence[int]) -> None:
    """Refuses a server whose routing rows or vocabulary are not those of the trainer's model.

    Args:
        moe_layers: indices of the trainer's MoE layers among its decoder layers.

    Raises:
        EngineError: naming the first fact that differs.
    """
    report = facts.report
    convention = (report.expert_ids, report.expert_bytes)
    pairs = [
        ("MoE layers", tuple(report.moe_layers), tuple(moe_layers)),
        ("number of experts", report.num_experts, spec.num_experts),
        ("experts per token", report.experts_per_token, spec.experts_per_token),
        ("expert ids and their bytes", convention, ("logical", spec.expert_dtype.itemsize)),
    ]
    for what, seen, expected in pairs:
        if seen != expected:
            remedy = "serve the trainer's model, with --enable-return-routed-experts"
            raise EngineError(f"SGLang server: {what}", seen=seen, expected=expected, remedy=remedy)
    if report.vocab_size != spec.vocab_size:
        raise EngineError(
            "SGLang server: ids that can be sampled",
            seen=report.vocab_size,
            expected=f"{spec.vocab_size}, those of the tokenizer",
            remedy=f"serve the trainer's model, with moerl serve --vocab-size {spec.vocab_size}",
        )


def check_options(facts: ServerFacts) -> None:
    """Refuses options under which routing rows, kept sets or seeds would be wrong.

    Raises:
        EngineError: naming the option.
    """
    pairs = [
        ("--sampling-backend", facts.sampling_backend, "pytorch", "seeds and kept sets come from it"),
        ("--sampling-mask-max-tokens", facts.sampling_mask_max_tokens, MAX_KEPT_IDS, "the largest kept set"),
        ("--speculative-algorithm", facts.speculative_algorithm, None, "it returns no kept sets"),
        ("--enable-hierarchical-cache", facts.hierarchical_cache, False, "its hits return wrong routing rows"),
        ("places of experts", facts.places_experts, (), "updates and checksums count on one copy in order"),
    ]
    for option, seen, expected, why in pairs:
        if seen != expected:
            raise EngineError(
                f"SGLang server: {option}",
                seen=seen,
                expected=f"{expected} ({why})",
                remedy="start it with `moerl serve`",
            )


def _refusal(what: str, seen: object, expected: object) -> EngineError:
    return EngineError(f"SGLang server: {what}", seen=seen, expected=expected, remedy=_REINSTALL)
