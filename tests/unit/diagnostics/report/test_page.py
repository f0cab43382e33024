"""The page of a report: what it holds, what it escapes, and how large it gets."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_samples import HOSTILE, full_report, long_report

from moerl.diagnostics.report.charts import HEAT_BANDS, HEAT_STEPS, band_of
from moerl.diagnostics.report.data import Report, Verdict
from moerl.diagnostics.report.definitions import DEFINITIONS, SYSTEMS
from moerl.diagnostics.report.page import inline_json, write_report
from moerl.diagnostics.report.words import brief, interval, number, percent
from moerl.printable import printable
from moerl.telemetry.metrics import METRICS

ASSETS = Path(__file__).parents[4] / "moerl/diagnostics/report/assets"


class Elements(HTMLParser):
    """Counts of elements, ids, and the texts of scripts with their type."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.text: list[str] = []
        self._script: str | None = None
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "script":
            self._in_script, self._script = True, dict(attrs).get("type")
            self.scripts.append((self._script, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            kind, text = self.scripts[-1]
            self.scripts[-1] = kind, text + data
        else:
            self.text.append(data)

    def ids(self) -> list[str]:
        return [value or "" for _, name, value in self.attributes if name == "id"]

    def data(self) -> dict[str, Any]:
        return json.loads(next(text for kind, text in self.scripts if kind == "application/json"))


def page_of(report: Report, tmp_path: Path) -> str:
    path = tmp_path / "page.html"
    write_report(report, path)
    return path.read_text(encoding="utf-8")


def test_sections_come_in_the_order_in_which_a_reader_asks(tmp_path: Path) -> None:
    elements = Elements(page_of(full_report(), tmp_path))
    order = [
        "learning",
        "gap",
        "findings",
        "scorers",
        "steps",
        "layers",
        "margins",
        "swaps",
        "slices",
        "strip",
        "unusable",
        "notes",
    ]
    assert [name for name in elements.ids() if name in {*order, "definitions"}] == [*order, "definitions"]


def test_a_section_without_data_is_left_out(tmp_path: Path) -> None:
    elements = Elements(page_of(Report("t", "s", Verdict("good", "a", "b"), ()), tmp_path))
    assert set(elements.ids()) == {"theme", "main", "definitions", "report-data"}
    assert "figure" not in elements.names


def test_a_finding_names_its_cause_in_words(tmp_path: Path) -> None:
    report = full_report()
    found = replace(report.findings[0], cause="trainer_apart")
    text = "".join(Elements(page_of(replace(report, findings=(found,)), tmp_path)).text)
    assert "· trainer apart" in text
    assert "trainer_apart" not in text


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_the_data_becomes_markup_or_script(tmp_path: Path, text: str) -> None:
    plain, hostile = (Elements(page_of(full_report(each), tmp_path)) for each in ("an ordinary text", text))
    assert hostile.names == plain.names
    assert len(hostile.scripts) == 3
    assert [s for s in hostile.scripts if s[0] is None] == [s for s in plain.scripts if s[0] is None]
    assert {(tag, name) for tag, name, _ in hostile.attributes} == {(tag, name) for tag, name, _ in plain.attributes}
    assert len(hostile.data()["strips"][0]["text"]) == 60


def test_control_characters_and_changes_of_direction_are_shown_as_escapes(tmp_path: Path) -> None:
    text = page_of(full_report("".join(HOSTILE)), tmp_path)
    for kind, script in Elements(text).scripts:
        text = text.replace(script, "") if kind is None else text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", text)
    assert "a\\u202eb\\u2066c" in text


def test_inlined_json_reads_as_it_was_and_holds_no_markup() -> None:
    data = {"text": [*HOSTILE], "rows": [[1.0, None], ["a"]]}
    inlined = inline_json(data)
    assert json.loads(inlined) == {"text": [printable(text) for text in HOSTILE], "rows": [[1.0, None], ["a"]]}
    assert not set("<>&\u2028\u2029") & set(inlined)


def test_the_policy_runs_the_two_scripts_of_the_package_alone_and_loads_nothing(tmp_path: Path) -> None:
    elements = Elements(page_of(full_report(), tmp_path))
    policy = next(value for _, name, value in elements.attributes if name == "content" and value and "default" in value)
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for kind, text in elements.scripts
        if kind is None
    ]
    assert rules["default-src"] == ["'none'"]
    assert rules["script-src"] == hashes
    assert len(hashes) == 2
    assert "connect-src" not in rules
    links = [value for _, name, value in elements.attributes if name in ("src", "href")]
    assert all(link and link.startswith(("#", "data:")) for link in links)


def test_numbers_on_the_page_are_those_of_the_report(tmp_path: Path) -> None:
    report = full_report()
    elements = Elements(page_of(report, tmp_path))
    texts, charts = set(elements.text), elements.data()["charts"]
    for each in report.decompositions:
        assert interval(each.total) in texts
        assert {interval(share.nats) for share in each.shares} <= texts
        block = next(block for block in charts["decomposition"][0]["blocks"] if block["bar"] == each.name)
        assert block["nats"] == [share.nats.value for share in each.shares]
    for values in report.scorers.values():
        assert number(values["logprob_abs_mean"]) in texts
    for swap in report.swaps:
        assert f"{swap.count:,}" in texts
    steps = next(choice for choice in charts["steps"] if choice["label"] == "mismatch/logprob_abs_mean")
    assert steps["blocks"][0]["x"] == [step.step for step in report.steps]
    expected = [step.metrics["mismatch/logprob_abs_mean"] for step in report.steps]
    assert steps["blocks"][0]["y"] == pytest.approx(expected, rel=1e-4)
    strip = elements.data()["strips"][0]
    tokens = report.strips[0].tokens
    assert [d is None for d in strip["d"]] == [token.d is None for token in tokens]
    assert strip["d"][5:] == pytest.approx([token.d or 0.0 for token in tokens[5:]], rel=1e-4)
    assert strip["layers"] == [token.layers for token in tokens]


def test_every_layer_of_every_map_can_be_chosen(tmp_path: Path) -> None:
    labels = [choice["label"] for choice in Elements(page_of(full_report(), tmp_path)).data()["charts"]["layer"]]
    assert labels == [f"layer {layer}, by {name}" for name in ("position", "turn") for layer in range(6)]


def test_every_chart_has_a_sentence_and_a_table(tmp_path: Path) -> None:
    text = page_of(full_report(), tmp_path)
    figures = re.findall(r"<figure .*?</figure>", text, re.DOTALL)
    assert len(figures) == len(Elements(text).data()["charts"]) == 8
    for figure in figures:
        assert re.search(r"<figcaption>[^<]{20,}</figcaption>", figure)
        assert 'role="img" aria-label="' in figure
        assert "<summary>Numbers of this chart</summary>" in figure


@pytest.mark.slow
def test_a_long_run_of_a_deep_model_fits_and_the_page_says_what_it_left_out(tmp_path: Path) -> None:
    text = page_of(long_report(num_metrics=140), tmp_path)
    assert 1_000_000 < len(text.encode()) <= 5_000_000
    shown = html.unescape(text).replace("\u00a0", " ")
    assert "10,000 steps are drawn as" in shown
    assert "Columns are means of 10,000 in 96 groups." in shown
    assert "more trajectories are in report.json alone." in shown
    assert "40 trajectories are cut" not in shown
    assert "4,800 rarer swaps are in report.json alone." in shown


def test_bands_of_heat_maps_begin_where_their_names_say() -> None:
    assert [band_of(share) for share in (0.0, 0.001, 0.0011, 0.3, 0.31)] == [
        "to 0.1%",
        "to 0.1%",
        "to 0.3%",
        "to 30%",
        "above 30%",
    ]
    assert len(HEAT_BANDS) == len(HEAT_STEPS) + 1


def test_every_definition_names_a_metric_that_exists_and_systems_that_are_known() -> None:
    for each in DEFINITIONS:
        assert not each.metric or each.metric in METRICS
        assert {system for system, _ in each.elsewhere} <= {*SYSTEMS}
        assert each.formula
        assert each.meaning or METRICS[each.metric].meaning
    named = {system for each in DEFINITIONS for system, _ in each.elsewhere}
    assert named == {*SYSTEMS}


def test_a_report_is_written_beside_its_page(tmp_path: Path) -> None:
    write_report(full_report(), tmp_path / "mine.html")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine.html", "mine.json"]


@pytest.mark.parametrize(
    ("value", "long", "short"),
    [
        (0.0, "0", "0"),
        (0.0123456, "0.01235", "0.012"),
        (1.2346e-7, "1.235e-07", "1.2e-07"),
        (48211.0, "48,211", "48,000"),
    ],
)
def test_numbers_are_short(value: float, long: str, short: str) -> None:
    assert (number(value), brief(value)) == (long, short)


def test_shares_too_small_to_show_are_not_zero() -> None:
    assert [percent(share) for share in (0.0, 1e-6, 0.01234, 1.0)] == ["0%", "<0.01%", "1.23%", "100%"]


def luminance(color: str) -> float:
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of WCAG 2.2."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def themes() -> list[dict[str, str]]:
    css = (ASSETS / "page.css").read_text()
    pairs = re.findall(r"(--[\w-]+): light-dark\((#\w{6}), (#\w{6})\)", css)
    return [{name: pair[number] for name, *pair in pairs} for number in (0, 1)]


@pytest.mark.parametrize("number_", [0, 1], ids=["light", "dark"])
def test_text_has_a_contrast_of_at_least_four_and_a_half(number_: int) -> None:
    colors = themes()[number_]
    pairs = [(text, ground) for text in ("ink", "quiet", "link") for ground in ("page", "card")]
    pairs += [(text, f"{level}-card") for level in ("good", "note", "fault") for text in (level, "ink")]
    pairs += [(level, "card") for level in ("good", "note", "fault")]
    pairs += [(f"s{n}-ink", f"s{n}") for n in range(6)] + [("given-ink", "given")]
    low = {pair: contrast(colors[f"--{pair[0]}"], colors[f"--{pair[1]}"]) for pair in pairs}
    assert min(low.values()) >= 4.5, low


@pytest.mark.parametrize("number_", [0, 1], ids=["light", "dark"])
def test_curves_have_a_contrast_of_at_least_three_with_the_page(number_: int) -> None:
    colors = themes()[number_]
    assert min(contrast(colors[f"--c{n}"], colors["--page"]) for n in range(8)) >= 3.0


@pytest.mark.slow
def test_the_stored_bundle_is_what_its_script_makes() -> None:
    from scripts.vega_bundle import PATH, bundle

    assert bundle() == PATH.read_text(encoding="utf-8")
