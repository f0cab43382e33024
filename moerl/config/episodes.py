"""The section `episode`: limits of episodes, and what becomes of those that reach one or fail."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moerl.sections import Count, Positive, Section


class EpisodeConfig(Section):
    """Limits of episodes, all of their sessions together, and what becomes of episodes that reach one or fail."""

    max_turns: Count | None = Field(default=None, description="Most turns that the policy samples; null = no limit.")
    max_tokens: Count | None = Field(
        default=None,
        description="Sampled tokens from which on no other turn begins; null = no limit but those of each session,"
        " rollout.max_new_tokens.",
    )
    max_calls: Count | None = Field(
        default=None, description="Most calls of tools; with one more no other turn begins; null = no limit."
    )
    max_seconds: Positive | None = Field(
        default=None, description="Seconds of an episode from which on no other turn begins; null = no limit."
    )
    when_limited: Literal["train", "filter", "refuse"] = Field(
        default="train",
        description="What becomes of an episode that a limit kept from another turn: it is trained on with the rewards"
        " that it ends with; left out (filtered in the ledger, episode_limited); or refused (quarantined).",
    )
    when_failed: Literal["refuse", "filter"] = Field(
        default="refuse",
        description="What becomes of an episode whose environment fails: refused (quarantined, which counts for"
        " quarantine.max_rate), or left out (filtered in the ledger, episode_failed).",
    )
