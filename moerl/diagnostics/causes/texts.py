"""Names of causes, and what to do about each. Keys are stable: they stand in `report.json`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CauseText:
    """Texts of a cause for people."""

    label: str
    """A few words, for bars and tables."""
    remedy: str
    """One sentence: the cure."""


CAUSES = {
    "routing": CauseText("own routing", "Keep the engine's routing in training (keep_routing.mode=rollout)."),
    "masks": CauseText("sampling masks", "Score inside of the kept sets that the engine returns."),
    "layer_shift": CauseText("routes of another layer", "Map routes by MoE layer number; dense layers have none."),
    "row_shift": CauseText("routes of another row", "Row t belongs to token t as an input; the last token has none."),
    "layer_order": CauseText("layers in another order", "Merge layers of pipeline stages by number, not by name."),
    "route_repeats": CauseText(
        "rows that repeat others", "Capture routes of every decoding step into a buffer of its own."
    ),
    "foreign_routes": CauseText("routes of other tokens", "Look at how the engine hands routes to requests that end."),
    "logprob_shift": CauseText("log-probs of another token", "Log-prob t is that of token t, given those before it."),
    "no_logprobs": CauseText("tokens without log-prob", "Mask tokens that the engine did not sample out of the loss."),
    "turn_apart": CauseText("one turn apart", "Compare the tokens of that turn with those that the engine saw."),
    "depth_apart": CauseText("depth of context", "Compare attention, positions and cache of both sides at that depth."),
    "route_shape": CauseText("routes of another model", "Compare the number of experts per token on both sides."),
    "blank_layer": CauseText("a layer without its routes", "Look at how the engine captures and merges that layer."),
    "route_pads": CauseText("pads taken for routes", "Mark rows that were not captured; never fill them."),
    "renumbered": CauseText("renumbered experts", "Record logical expert ids, before load balancing maps them."),
    "stale_prefix": CauseText("stale prefix routes", "Flush the prefix cache at weight updates, or key it by version."),
    "bad_engine": CauseText("one engine apart", "Take that engine out of rotation and resync its weights."),
    "mask_shift": CauseText("kept sets of another token", "Set t is the one that token t was drawn from."),
    "mask_misses": CauseText("tokens outside of their sets", "Take sets from the sampler's own final weights."),
    "hidden_masks": CauseText("unlisted sampling masks", "Have the engine return its kept sets."),
    "full_logprobs": CauseText("log-probs before the filter", "Return log-probs under the filtered distribution."),
    "trainer_temperature": CauseText("the trainer's temperature", "Divide the trainer's logits by the temperature."),
    "temperature": CauseText("another temperature", "Return log-probs after temperature, and say the one in force."),
    "temperature_unsaid": CauseText("the temperature", "Say it: --temperature, or in the dump."),
    "top_p": CauseText("another top-p", "Say the sampling parameters that are in force."),
    "stale_weights": CauseText("weights of another version", "Check weights after each update (weights.verify)."),
    "staleness": CauseText("staleness", "Give the weights of these versions, too: --model DIRECTORY@VERSION."),
    "trainer_apart": CauseText(
        "the trainer", "Compare the trainer's weights, temperature and kept sets of that step with the engine's."
    ),
    "template": CauseText("other prompt tokens", "Send the engine token ids, rendered once, and train on the same."),
    "empty_responses": CauseText(
        "empty responses", "Look at aborted requests, length limits and stop tokens of the engine, and at loss masks."
    ),
    "weights": CauseText(
        "other weights or arithmetic", "Compare checksums of the engine's weights, and the temperature that is said."
    ),
    "precision": CauseText("rounding", "Nothing: this is what the arithmetic of this dtype makes."),
    "unexplained": CauseText("unexplained", "Give checkpoints of other versions, or a dump with routes and kept sets."),
}
OPEN = ("unexplained", "staleness", "trainer_apart")
"""Causes of notes after which nobody can say that the dump is in order."""
