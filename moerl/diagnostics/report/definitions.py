"""Definitions of the figures in a report, with their names in other systems. Torch-free; any process."""

from __future__ import annotations

from dataclasses import dataclass

SYSTEMS = ("slime", "miles", "verl", "prime-rl", "NeMo-RL", "TRL")
_R3 = "Stabilizing MoE reinforcement learning by aligning training and inference routers, 2025, arXiv:2510.11370"
_D = "d = log p_trainer(token) - log p_rollout(token), in nats, over sampled tokens"


@dataclass(frozen=True, slots=True)
class Definition:
    """One figure of a report."""

    title: str
    """Name on the page."""
    metric: str
    """Name in `moerl.telemetry.metrics`; empty for a figure of reports alone."""
    formula: str
    """Formula in plain text."""
    source: str = ""
    """Paper or text that the formula is from; empty for plain arithmetic."""
    meaning: str = ""
    """Meaning in a line; empty: that of the metric."""
    elsewhere: tuple[tuple[str, str], ...] = ()
    """Names in other systems, by `SYSTEMS`; the text says if the value is not the same."""


DEFINITIONS = (
    Definition(
        "Gap, mean |d|",
        "mismatch/logprob_abs_mean",
        f"mean |d|; {_D}",
        elsewhere=(
            ("slime", "train/train_rollout_logprob_abs_diff"),
            ("miles", "train/train_rollout_logprob_abs_diff"),
            ("verl", "training/rollout_probs_diff_mean (of probabilities, not of their logarithms)"),
            ("NeMo-RL", "token_mult_prob_error (mean of exp |d|; 1 is no gap)"),
            ("TRL", "sampling/sampling_logp_difference/mean"),
        ),
    ),
    Definition(
        "Largest |d|",
        "mismatch/logprob_abs_max",
        "max |d|",
        elsewhere=(
            ("verl", "training/rollout_probs_diff_max (of probabilities)"),
            ("TRL", "sampling/sampling_logp_difference/max"),
        ),
    ),
    Definition(
        "KL, estimated (k3)",
        "mismatch/k3",
        "mean of exp(d) - 1 - d",
        "Schulman 2020, Approximating KL divergence, joschu.net/blog/kl-approx.html",
        elsewhere=(
            ("verl", "rollout_corr/k3_kl; rollout_corr/kl is the mean of -d"),
            ("prime-rl", "mismatch_kl/*/mean"),
            ("NeMo-RL", "gen_kl_error"),
        ),
    ),
    Definition(
        "Mean ratio",
        "mismatch/ratio_mean",
        "mean of exp(d); 1 if trainer and sampler agree, and also if differences cancel",
        elsewhere=(
            ("verl", "rollout_corr/ppl_ratio (of responses, not of tokens)"),
            ("TRL", "sampling/importance_sampling_ratio/mean"),
        ),
    ),
    Definition(
        "Tokens more than 10% apart",
        "mismatch/share_outside_tenth",
        "share of tokens with exp(d) outside of [0.9, 1.1]",
    ),
    Definition("F(2), extreme tokens", "mismatch/share_above_ln2", "share of tokens with |d| > ln 2", _R3),
    Definition(
        "Tokens with other experts",
        "mismatch/tokens_with_different_experts",
        "share of tokens with at least one MoE layer in which the trainer's top-k set is not the recorded one",
        _R3,
    ),
    Definition(
        "Layers with other experts",
        "mismatch/layers_differing_per_token",
        "mean over tokens of the number of MoE layers in which the two sets differ",
        _R3,
    ),
    Definition(
        "Trainer less this scorer",
        "",
        "mean of |log p_trainer(token) - log p_scorer(token)|, in nats",
        meaning="how far the trainer's log-probs in a dump are from our scorer's; the nearest scorer tells what the"
        " trainer enforced",
    ),
    Definition("Router disagreement", "routing/disagreement", "rows and layers with other experts / rows and layers"),
    Definition(
        "Overlap of expert sets",
        "routing/jaccard",
        "mean of |A and B| / |A or B|; A: the trainer's own experts, B: the recorded ones",
        "Jaccard 1901",
    ),
    Definition(
        "Margin at flips",
        "routing/margin_at_flips",
        "mean of s(k) - s(k+1) over rows where the sets differ; s(i): the i-th largest score of the trainer's router",
        meaning="a small margin at flips, and a larger one elsewhere, is rounding; a large margin at flips is a fault",
    ),
    Definition("Margin elsewhere", "routing/margin_elsewhere", "the same over rows where the sets are equal"),
    Definition(
        "Effective sample size",
        "policy/effective_sample_share",
        "(sum w)^2 / (n sum w^2), w = exp(d)",
        "Kish 1965, Survey sampling",
        elsewhere=(("verl", "rollout_corr/rollout_is_eff_sample_size; rollout_corr/chi2_token is 1 / share - 1"),),
    ),
    Definition(
        "Parts of the gap",
        "",
        "routing = ((neither - experts) + (kept_sets - both)) / 2;"
        " masks = ((neither - kept_sets) + (experts - both)) / 2; rest = both",
        "Shapley value of two guarantees: each is added first and last, and the mean is taken",
        meaning="mean |d| of four scorers, split among the guarantees; the parts add up to the gap with nothing kept",
    ),
)
"""Definitions in the order of the page."""


def title_of(metric: str, otherwise: str) -> str:
    """Returns the title of a metric's definition, that of `mismatch/k3` for ``mismatch/<scorer>/k3``; another if there
    is none."""
    stem = metric if metric.count("/") < 2 else "/".join((metric.split("/")[0], metric.split("/")[-1]))
    return next((each.title for each in DEFINITIONS if each.metric == stem), otherwise)
