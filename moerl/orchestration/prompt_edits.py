"""Ways in which the tokens of a prompt may differ from those that the engine saw: candidates for `moerl diagnose`.

A trainer that renders a chat by itself can lose or double the token at the beginning of a text, or the tokens that open
the answer. Each candidate puts one of these right in a dump, so that the model can say whether it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.fields import KeptSets
from moerl.diagnostics.causes.gaps import Repair
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.errors import closing
from moerl.orchestration.templates import Templates, request_of

_FIELDS: dict[str, float] = {
    "sampled": False,
    "rollout_logprobs": 0.0,
    "temperatures": 1.0,
    "top_ps": 1.0,
    "policy_versions": -1,
    "turns": 0,
}
"""Arrays of one value a token, and the value of a prompt's token."""


def prompt_edits(tokenizer: Any) -> list[tuple[Repair, str]]:
    """Returns repairs to try, each with the fault that it would prove; none without a tokenizer."""
    if tokenizer is None:
        return []
    edits: list[tuple[Repair, str]] = []
    first = tokenizer.bos_token_id
    if first is not None:
        edits += [
            (Repair("prompt: with BOS", partial(inserted, at=0, tokens=(first,))), "prompts lack the BOS token"),
            (Repair("prompt: without BOS", partial(removed, at=0, tokens=(first,))), "prompts begin with BOS twice"),
        ]
    opening = _opening(tokenizer)
    if opening:
        shown = tokenizer.decode(opening)
        edits += [
            (
                Repair("prompt: with opening", partial(inserted, at=-1, tokens=opening)),
                f"prompts lack the opening of the answer, {shown!r}",
            ),
            (
                Repair("prompt: without opening", partial(removed, at=-1, tokens=opening)),
                f"prompts hold an opening of the answer that the engine did not see, {shown!r}",
            ),
        ]
    return edits


def _opening(tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens that `add_generation_prompt` adds; none without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return ()
    chat = [{"role": "user", "content": "a"}]
    with closing(Templates()) as templates:
        texts = [templates.write(request_of(tokenizer, chat, ask=ask)) for ask in (False, True)]
    short, long = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return tuple(long[len(short) :]) if long[: len(short)] == short else ()


def inserted(rollout: DumpedRollout, *, at: int, tokens: Sequence[int]) -> DumpedRollout:
    """Returns a rollout with more tokens at the start of the prompt (0) or at its end (-1); their rows have no
    routes."""
    places = [rollout.num_prompt if at else 0] * len(tokens)
    if rollout.expert_ids is not None:
        rollout = replace(rollout, routed=rollout.routed_rows)
    token_ids = np.insert(rollout.token_ids, places, np.array(tokens, np.int32))
    return _edited(rollout, token_ids, lambda array, value: np.insert(array, places, value, axis=0))


def removed(rollout: DumpedRollout, *, at: int, tokens: Sequence[int]) -> DumpedRollout:
    """Returns a rollout without these tokens at the start (0) or the end (-1) of the prompt; the rollout itself if it
    does not have them there."""
    count = len(tokens)
    start = rollout.num_prompt - count if at else 0
    if start < 0 or rollout.num_prompt <= count or tuple(rollout.token_ids[start : start + count]) != tuple(tokens):
        return rollout
    gone = range(start, start + count)
    return _edited(rollout, np.delete(rollout.token_ids, gone), lambda array, _: np.delete(array, gone, axis=0))


def _edited(
    rollout: DumpedRollout, token_ids: NDArray[np.int32], edit: Callable[[NDArray[Any], float], NDArray[Any]]
) -> DumpedRollout:
    """Returns a rollout with other tokens. edit: changes the rows of an array as the tokens were changed; new rows get
    a value."""
    changes: dict[str, Any] = {name: edit(getattr(rollout, name), value) for name, value in _FIELDS.items()}
    if rollout.kept is not None:
        sizes = edit(rollout.kept.sizes, 0)
        changes["kept"] = KeptSets(np.concatenate([[0], np.cumsum(sizes)]), rollout.kept.ids)
    if rollout.prefix_versions is not None:
        changes["prefix_versions"] = edit(rollout.prefix_versions, -1)
    if rollout.expert_ids is not None and len(rollout.expert_ids) == len(rollout) - 1:
        changes["expert_ids"] = edit(rollout.expert_ids, -1)
        changes["routed"] = None if rollout.routed is None else edit(rollout.routed, False)
    return replace(rollout, token_ids=token_ids, **changes)
