"""Memory that `moerl diagnose` needs to score rollouts with transformers models. Pure, torch-free.

Weights rest on the device if they fit, else on the host, from where they go to it layer by layer. Of several
checkpoints as many are in memory as fit, at least one.
"""

from __future__ import annotations

from dataclasses import dataclass

from moerl.contract.parallel import ParallelDims
from moerl.errors import ConfigError
from moerl.machine.memory import USABLE_SHARE, rank_parameters, total_parameters
from moerl.models.description import ModelDescription

PASS_ROWS = 4096
"""Input rows of a pass, if no rollout alone has more."""
CHUNK_NUMBERS = 1 << 24
"""Logits that are scored at a time."""
_CHUNK_BYTES = 40
"""Bytes of a logit that is scored: itself, and log-probs, sets and sorts in float64."""


@dataclass(frozen=True, slots=True)
class ScoringMemory:
    """Memory that the scores need, and the memory that there is."""

    weights_bytes: int
    """Weights of one checkpoint."""
    lent_bytes: int
    """The largest layer, or the embedding, in the weights' precision and in the finer one, on top of the weights."""
    pass_bytes: int
    """Activations and logits of a pass."""
    num_models: int
    """Checkpoints to score with."""
    held: int
    """Checkpoints in memory at once, at least 1."""
    is_streamed: bool
    """True if weights rest on the host, and go to the device part by part."""
    room_bytes: int
    """Free memory of the device; memory of the host without one."""

    def text(self, dtype: str) -> str:
        """Returns a line for people. dtype: name of the weights' precision."""
        which = f", {self.held} of {self.num_models} models at a time" if self.num_models > 1 else ""
        where = " on the host, which go to the device layer by layer" if self.is_streamed else ""
        more = (self.lent_bytes + self.pass_bytes) / 1e9
        room = "device" if self.is_streamed else "memory"
        return (
            f"memory: {self.weights_bytes / 1e9:.1f} GB of weights in {dtype}{where}{which}; {more:.1f} GB for a pass;"
            f" {self.room_bytes / 1e9:.0f} GB of {room}"
        )


def plan_scoring(
    model: ModelDescription,
    *,
    element_bytes: int,
    num_models: int,
    longest: int,
    host_bytes: int,
    device_bytes: int | None,
) -> ScoringMemory:
    """Plans the place of the weights: on the device if one checkpoint fits, else on the host.

    Args:
        element_bytes: of the weights, 2 or 4; the finer arithmetic has twice as many.
        num_models: checkpoints of this shape.
        longest: tokens of the longest rollout.
        host_bytes: memory of the machine.
        device_bytes: free memory of the device; None without one.

    Raises:
        ConfigError: not even one checkpoint fits.
    """
    weights, finer = total_parameters(model) * element_bytes, 2 * element_bytes
    lent = _largest_part(model) * (finer + element_bytes)
    width = model.moe_intermediate_size or model.intermediate_size
    numbers = 8 * model.hidden_size + model.spec.experts_per_token * (model.hidden_size + 3 * width)
    scored = _CHUNK_BYTES * max(CHUNK_NUMBERS, model.vocab_size)
    at_once = max(PASS_ROWS, longest) * numbers * finer + scored
    room = int(USABLE_SHARE * (host_bytes if device_bytes is None else device_bytes))
    fits = (room - lent - at_once) // weights
    host = int(USABLE_SHARE * host_bytes) // weights
    is_streamed = device_bytes is not None and fits < 1
    held = min(num_models, host if is_streamed else fits)
    if held < 1 or lent + at_once > room:
        rooms = [f"{room / 1e9:.1f} GB usable here"]
        if device_bytes is not None:
            rooms = [f"{room / 1e9:.1f} GB usable on the device", f"{USABLE_SHARE * host_bytes / 1e9:.1f} on the host"]
        raise ConfigError(
            "--model: does not fit into memory",
            seen=f"{weights / 1e9:.1f} GB of weights, {(lent + at_once) / 1e9:.1f} GB for a pass; {', '.join(rooms)}",
            expected="room for one checkpoint and a pass",
            remedy="use a machine with more memory, --dtype bfloat16, or dumps with shorter rollouts",
        )
    return ScoringMemory(weights, lent, at_once, num_models, held, is_streamed, device_bytes or host_bytes)


def _largest_part(model: ModelDescription) -> int:
    """Returns the parameters of the largest decoder layer, or of the embedding."""
    parameters = rank_parameters(model, ParallelDims(), 0)
    num_moe, num_dense = len(model.moe_layers), model.num_layers - len(model.moe_layers)
    common = (parameters["attention"] + parameters["norms"]) // model.num_layers
    experts = sum(parameters[name] for name in ("router", "experts", "shared experts")) // max(1, num_moe)
    dense = parameters["dense MLP"] // max(1, num_dense)
    return max(parameters["embedding"], common + max(experts, dense))
