"""Figures that several metrics have: those of every scorer of a mismatch table, and of every turn. Any process."""

MISMATCH = (
    ("logprob_abs_mean", "nat", "mean |d| of sampled tokens, d = trainer log-prob - rollout log-prob"),
    ("logprob_abs_max", "nat", "largest |d|"),
    ("k3", "nat", "mean of exp(d) - 1 - d; estimates KL(rollout || trainer)"),
    ("ratio_mean", "1", "mean of exp(d), trainer probability / rollout probability"),
    ("share_outside_tenth", "1", "share of tokens with exp(d) outside of [0.9, 1.1]"),
    ("share_above_ln2", "1", "share of tokens with |d| > ln 2: probabilities apart by more than a factor of two"),
    (
        "tokens_with_different_experts",
        "1",
        "share of tokens for which the trainer's router would have chosen other experts in some layer",
    ),
    (
        "layers_differing_per_token",
        "layer",
        "mean number of MoE layers in which the trainer's router would have chosen other experts",
    ),
)
"""Metrics of the distance of trainer and engine: name, unit, meaning."""

TURNS = (
    ("sessions", "session", "sessions of the batch that have an n-th turn, counted from 1; of episodes alone"),
    ("tokens_mean", "token", "mean sampled tokens of it"),
    ("reward_mean", "reward", "mean of what it earned; if turns earn parts of a reward"),
    ("logprob_abs_mean", "nat", "mean |trainer log-prob - rollout log-prob| of its tokens"),
    ("tokens_with_different_experts", "1", "share of its tokens for which the trainer's router had chosen others"),
)
"""Metrics of the n-th turns of sessions: name, unit, meaning."""
