"""Reports made by hand, with every part filled. Torch-free."""

from __future__ import annotations

import math
import random

from moerl.diagnostics.conversations import SpokenPiece, SpokenSession, SpokenTurn
from moerl.diagnostics.report.data import (
    Decomposition,
    Evidence,
    Finding,
    Headline,
    Histogram,
    Interval,
    Layer,
    LayerMap,
    Report,
    ReportStep,
    Sample,
    Share,
    Slice,
    Strip,
    StripToken,
    StripTurn,
    Swap,
    Unread,
    Verdict,
)

HOSTILE = (
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "--><!--",
    "a\u202eb\u2066c",
    "\x1b[31mred\x07",
    "\u2028line",
    "&lt;b&gt;",
    '" onfocus="window.pwned=1',
    "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    "{{7*7}}${7*7}",
)
"""Texts as a rollout or a file name may hold them."""


def around(value: float) -> Interval:
    return Interval(value, value * 0.9, value * 1.1)


def full_report(text: str = "an ordinary text", *, num_layers: int = 6) -> Report:
    """A report with every part; `text` stands wherever text of others may."""
    return Report(
        title=f"Routing mismatch of a dump {text}",
        subtitle=f"subtitle {text}",
        verdict=Verdict(
            "fault",
            f"Routes are those of another sequence in 3% of the rows, which makes 71% of the gap (certain). {text}",
            f"Align routes with tokens before they are packed. {text}",
        ),
        facts=(("Model", f"Qwen3-MoE {text}"), ("Tokens", "12,345"), ("Scorer", "transformers, float32")),
        decompositions=(
            Decomposition(
                "nothing kept",
                around(0.052),
                (
                    Share("routing", "experts not kept", around(0.021)),
                    Share("masks", "sampling masks not kept", around(0.028)),
                    Share("precision", f"precision {text}", around(0.004)),
                    Share("unexplained", "unexplained", around(-0.001)),
                ),
            ),
            Decomposition(
                "as dumped",
                around(0.017),
                (
                    Share("shifted_routes", "shifted routes", around(0.012)),
                    Share("unexplained", "unexplained", around(0.005)),
                ),
            ),
        ),
        findings=(
            Finding(
                "shifted_routes",
                "fault",
                "certain",
                f"Routes are shifted by one row {text}",
                "Send the routes of the row that predicts the token.",
                around(0.012),
                0.71,
                (Evidence("overlap after a shift by -1", "0.99", "0.43 without a shift"), Evidence(text, text, text)),
            ),
            Finding("age", "note", "possible", "Tokens of two versions", "Nothing.", around(0.0), 0.0),
            Finding("masks", "good", "likely", "Kept sets hold every token", "Nothing.", around(0.0), 0.0),
        ),
        scorers={
            "neither": {"logprob_abs_mean": 0.052, "k3": 0.0031, "share_above_ln2": 0.011},
            "both": {"logprob_abs_mean": 0.017, "k3": 0.0009, "share_above_ln2": 0.002},
            text: {"logprob_abs_mean": 0.003},
        },
        steps=tuple(
            ReportStep(
                n,
                {
                    "mismatch/logprob_abs_mean": 0.01 + 0.001 * n,
                    "mismatch/neither/logprob_abs_mean": 0.05,
                    "routing/jaccard": 0.98,
                    "reward/mean": 0.02 * n,
                    "accuracy/mean": 0.01 * n,
                }
                | ({"evaluation/reward/mean": 0.03 * n, "evaluation/accuracy/mean": 0.02 * n} if n % 10 == 0 else {}),
            )
            for n in range(1, 31)
        ),
        layers=tuple(Layer(n, 0.01 * n, 1 - 0.01 * n, 0.004 * n if n else None, 0.1) for n in range(num_layers)),
        maps=(
            LayerMap(
                "position",
                ("0 to 7", "8 to 15", "16 to 31", f"32 {text}"),
                tuple(tuple(0.02 * n * c if (n, c) != (2, 2) else None for c in range(4)) for n in range(num_layers)),
            ),
            LayerMap("turn", ("1", "2"), tuple((0.001, 0.2) for _ in range(num_layers))),
        ),
        swaps=tuple(Swap(n % num_layers, n, n + 1, 200 - n, 0.1) for n in range(30)),
        histograms=(
            Histogram(
                "score margin", (0.0, 0.01, 0.1, 1.0), {"at flips": (80, 15, 5), f"elsewhere {text}": (10, 40, 50)}
            ),
        ),
        slices=(
            Slice("kind", "prompt", 4000, None, 0.02),
            Slice("kind", "response", 8345, around(0.017), 0.03),
            Slice("token class", f"numbers {text}", 1200, around(0.031), 0.05),
            Slice("token class", "words", 7145, around(0.014), None),
        ),
        strips=(strip(text, 60), strip("second", 12)),
        unusable=(Unread("wrong_shape", 4, f"rollout 17, {text}"),),
        notes=(f"A note. {text}",),
        headlines=(
            Headline("Reward", "0.6", (f"mean of the last 5 steps {text}",)),
            Headline("Accuracy", "0.3"),
            Headline("Mismatch gap", "1.2e-02 nats", ("3 times its floor", text), "note"),
        ),
        samples=(
            Sample("Highest reward, 1", f"What is 1 + 1? {text}", f"It is 2.\n{text}", conversation(text)),
            Sample("Lowest reward, 0", "What is 12 + 13 + 14?", "5 tokens" + " and more" * 40),
        ),
        samples_from=f"Of 192 responses in a file {text}",
    )


def strip(text: str, num_tokens: int) -> Strip:
    """A trajectory whose first tokens are given."""
    words = ["The", " answer", " is", " 4", "2", "\n", text, "\t", ""]
    tokens: list[StripToken] = []
    for n in range(num_tokens):
        word = words[n % len(words)]
        if n < 5:
            tokens.append(StripToken(word, False, layers=n % 2))
        else:
            d = 0.0004 * (-3.0) ** (n % 9)
            tokens.append(StripToken(word, True, d, -0.3, n % 3, 0 if n % 2 else 12, 4))
    turns = (StripTurn(0, "prompt"), StripTurn(5, f"policy, turn 1 {text}"))
    return Strip(f"rollout {text}", "largest gap", tuple(tokens), turns)


def conversation(text: str) -> tuple[SpokenSession, ...]:
    """A session and its fork; two versions sampled the first turn."""
    first = SpokenTurn(
        "policy", f"policy, turn 1, calls add({text})", (SpokenPiece("It is ", 3), SpokenPiece(f"2.\n{text}", 4))
    )
    tools = SpokenTurn("tools", "tools (3 tokens)", (SpokenPiece(f"\n4 {text}\n"),))
    left = SpokenTurn("", "[... 8 turns ...]", ())
    return (
        SpokenSession(f"session 0: {text}", (SpokenTurn("prompt", "prompt", (SpokenPiece(text),)), first, tools, left)),
        SpokenSession("session 1, agent x: fork of session 0, behind its turn 1 (token 9)", (first,), {"reward": 0.5}),
    )


def long_report(num_steps: int = 10_000, num_layers: int = 48, num_metrics: int = 100) -> Report:
    """Builds the report of a long run of a deep model: `num_metrics` metrics of every step, all layers."""
    generator = random.Random(1)
    names = [
        "mismatch/logprob_abs_mean",
        *(f"mismatch/{s}/logprob_abs_mean" for s in ("neither", "kept_sets", "experts", "both")),
    ]
    names += [f"reward/metric_{n}/mean" for n in range(num_metrics - len(names))]
    noise = [generator.random() for _ in range(997)]
    steps = tuple(
        ReportStep(n, {name: math.sqrt(n) + noise[(n * 31 + 7 * k) % 997] for k, name in enumerate(names)})
        for n in range(1, num_steps + 1)
    )
    columns = tuple(str(n) for n in range(1, num_steps + 1))
    differing = tuple(tuple(noise[(n * 13 + layer) % 997] / 5 for n in range(num_steps)) for layer in range(num_layers))
    tokens = tuple(
        StripToken(f" token{n}", True, noise[n % 997] - 0.5, -noise[n % 991], n % 7, 50, 3) for n in range(8000)
    )
    base = full_report(num_layers=num_layers)
    return Report(
        title="A long run",
        subtitle="",
        verdict=base.verdict,
        facts=base.facts,
        decompositions=base.decompositions,
        findings=base.findings,
        scorers=base.scorers,
        steps=steps,
        layers=tuple(Layer(n, 0.01, 0.99, 0.01, 0.1) for n in range(num_layers)),
        maps=tuple(LayerMap(name, columns, differing) for name in ("step", "position", "turn")),
        swaps=tuple(Swap(n % 48, n % 128, (n + 1) % 128, n, 0.01) for n in range(5000)),
        strips=tuple(Strip(f"trajectory {n}", "typical", tokens) for n in range(40)),
    )
