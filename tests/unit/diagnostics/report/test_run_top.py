"""The first screen of a run's page."""

from __future__ import annotations

import re
from dataclasses import replace

from report_samples import full_report

from moerl.diagnostics.report.data import Headline, Sample
from moerl.diagnostics.report.run_top import headlines, learning, samples


def test_a_headline_has_its_level_and_its_notes() -> None:
    made = headlines([Headline("Gap", "<1>", ("a & b",), "good"), Headline("Reward", "2")])
    assert '<div class="headline level-good"><p class="name">Gap <span class="badge">✓ In order</span></p>' in made
    assert '<p class="value">&lt;1&gt;</p><p>a &amp; b</p>' in made
    assert '<div class="headline"><p class="name">Reward</p>' in made
    assert headlines([]) == ""


def test_samples_are_text_of_others_and_their_absence_is_explained() -> None:
    report = replace(full_report(), samples=(Sample("<why>", "<b>prompt", "<i>answer"),), samples_from="a file")
    made = samples(report)
    assert "&lt;why&gt;" in made
    assert "<dt>prompt</dt><dd>&lt;b&gt;prompt</dd><dt>response</dt><dd>&lt;i&gt;answer</dd>" in made
    assert "no responses" in samples(replace(report, samples=(), samples_from="no responses"))
    assert samples(replace(report, samples=(), samples_from="")) == ""


def test_an_episode_is_a_conversation_with_a_colour_for_each_version() -> None:
    made = samples(replace(full_report("<b>")))
    assert '<span class="by0">version 3</span><span class="by1">version 4</span>' in made
    assert '<span class="by0">It is </span><span class="by1">2.\n&lt;b&gt;</span>' in made
    assert '<dl class="tools"><dt>tools (3 tokens)</dt><dd><span>\n4 &lt;b&gt;\n</span></dd></dl>' in made
    assert '<p class="session">session 0: &lt;b&gt;</p>' in made
    assert "behind its turn 1 (token 9) · reward 0.5</p>" in made
    assert '<dl class="left-out"><dt>[... 8 turns ...]</dt>' in made
    assert "<b>" not in made


def test_reward_and_accuracy_are_drawn_for_runs_alone() -> None:
    section = learning(full_report())
    assert section is not None
    assert [choice.label for choice in section.charts[0].choices] == ["Reward", "Accuracy"]
    names = [block["series"] for block in section.charts[0].choices[1].blocks]
    assert names == ["sampled for training", "greedy, dev problems"]
    assert re.search("data-chart=.learning", section.body)
    assert learning(replace(full_report(), headlines=())) is None
