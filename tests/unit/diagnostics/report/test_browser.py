"""The page in a real browser: all charts drawn, nothing asked for, no console message, usable by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Page, chromium, find_chromium
from report_samples import HOSTILE, full_report, long_report

from moerl.diagnostics.report.compare import write_comparison
from moerl.diagnostics.report.data import LayerMap
from moerl.diagnostics.report.page import write_report
from moerl.diagnostics.report.sweep import SweptRun, sweep_report, write_sweep_report

pytestmark = [
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium on PATH (Debian: apt-get install chromium)"),
    pytest.mark.xdist_group("chromium"),
]
CHARTS = ["learning", "decomposition", "steps", "maps", "layer", "margins", "histograms", "slices"]
PAPER = 688
"""CSS pixels between the margins of A4."""
DRAWN = """[...document.querySelectorAll('figure[data-chart]')].filter(figure =>
    figure.querySelectorAll('svg path, svg rect').length > 3).map(figure => figure.dataset.chart)"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    write_report(full_report(), made / "full.html")
    write_report(full_report(" ".join(HOSTILE)), made / "hostile.html")
    write_comparison([("one", full_report()), ("<other>", full_report("x"))], made / "comparison.html")
    write_comparison([(f"runs/seed-{n}", full_report()) for n in range(6)], made / "six.html")
    steps = tuple(map(str, range(1, 61)))
    map_of_steps = LayerMap("step", steps, tuple(tuple(0.02 for _ in steps) for _ in range(6)))
    write_report(replace(full_report(), maps=(map_of_steps,)), made / "steps.html")
    runs = swept_runs()
    write_sweep_report(sweep_report("Sweep", ["seed", "keep_routing.mode"], runs), runs, made / "sweep.html")
    return made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Page:
    browser.log.clear()
    browser.requests.clear()
    browser.size(1200, 900)
    browser.scheme("light")
    return browser


def swept_runs() -> list[SweptRun]:
    return [
        SweptRun(
            f"{seed}-{mode}",
            {"seed": str(seed), "keep_routing.mode": mode},
            "finished",
            [
                {"stage": "rl", "step": step, "reward/mean": seed * step / 50, "mismatch/logprob_abs_mean": gap}
                for step in range(1, 21)
            ],
        )
        for seed in (1, 2)
        for mode, gap in (("off", 4e-3), ("rollout", 2e-7))
    ]


def is_clean(page: Page) -> bool:
    return not page.log and not page.requests and not page.evaluate("document.documentElement.dataset.failed || ''")


@pytest.mark.parametrize("name", ["full", "hostile"])
def test_every_chart_is_drawn_without_a_request_or_a_message(page: Page, folder: Path, name: str) -> None:
    page.open(folder / f"{name}.html")
    assert page.evaluate(DRAWN) == CHARTS
    assert is_clean(page), (page.log, page.requests)
    assert page.evaluate("window.pwned === undefined")
    assert page.evaluate("document.querySelectorAll('script').length") == 3


@pytest.mark.slow
def test_curves_of_a_sweep_are_drawn_with_a_legend_of_all_settings(page: Page, folder: Path) -> None:
    page.open(folder / "sweep.html")
    assert page.evaluate(DRAWN) == ["reward", "mismatch"]
    legend = (
        "[...document.querySelectorAll('[data-chart=reward] .role-legend-label text')].map(text => text.textContent)"
    )
    assert page.evaluate(legend) == ["keep_routing.mode=off", "keep_routing.mode=rollout"]
    assert is_clean(page), (page.log, page.requests)


def test_the_policy_stops_a_script_that_is_not_ours(page: Page, folder: Path) -> None:
    page.open(folder / "full.html")
    page.evaluate("""(() => { const script = document.createElement('script');
        script.textContent = 'window.pwned = 1'; document.body.append(script); })()""")
    assert page.evaluate("window.pwned === undefined")
    assert any("Content Security Policy" in line for line in page.log)


@pytest.mark.slow
def test_a_metric_is_chosen_by_keyboard_and_its_table_follows(page: Page, folder: Path) -> None:
    page.open(folder / "full.html")
    page.evaluate("document.getElementById('steps-choice').focus()")
    before = page.evaluate("document.querySelector('[data-chart=steps] .plot svg').outerHTML.length")
    page.press("ArrowDown", 4)
    assert page.evaluate("document.getElementById('steps-choice').value") == "4"
    caption = "document.querySelector('[data-chart=steps] figcaption').textContent"
    assert page.evaluate(caption).startswith("mismatch/logprob_abs_mean (mean |d|")
    assert page.evaluate(
        "document.querySelector('[data-chart=steps] .plot').getAttribute('aria-label')"
    ) == page.evaluate(caption)
    wait = "new Promise(done => setTimeout(done, 300))"
    page.evaluate(wait)
    assert page.evaluate("document.querySelector('[data-chart=steps] .plot svg').outerHTML.length") != before
    page.evaluate("document.querySelector('[data-chart=steps] summary').focus()")
    page.press("Enter")
    page.evaluate(wait)
    rows = "[...document.querySelectorAll('[data-chart=steps] tbody tr')].map(row => row.lastChild.textContent)"
    shown = page.evaluate(rows)
    assert [float(text) for text in shown] == pytest.approx([0.01 + 0.001 * step for step in range(1, 31)])
    assert is_clean(page), page.log


@pytest.mark.slow
def test_tokens_are_walked_with_the_arrow_keys(page: Page, folder: Path) -> None:
    page.open(folder / "full.html")
    at = "document.activeElement.getAttribute('aria-label')"
    line = "document.querySelector('.token-line').textContent"
    page.evaluate("document.querySelector('.token[tabindex=\"0\"]').focus()")
    start = int(page.evaluate(at).split()[1])
    page.press("ArrowRight", 2)
    page.press("ArrowDown")
    page.press("ArrowLeft")
    assert int(page.evaluate(at).split()[1]) == start + 11
    assert page.evaluate(line) == page.evaluate(at)
    page.press("Home")
    assert "token 1 of 60" in page.evaluate(line)
    assert "given, not sampled" in page.evaluate(line)
    page.press("n")
    assert "d = 2.6244 nats" in page.evaluate(line) or "d = -" in page.evaluate(line)
    assert page.evaluate("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1


@pytest.mark.slow
def test_the_turns_of_an_episode_are_named_above_their_tokens(page: Page, folder: Path) -> None:
    page.open(folder / "full.html")
    names = "[...document.querySelectorAll('.tokens .turn-name')].map(each => each.textContent)"
    assert page.evaluate(names) == ["prompt", "policy, turn 1 an ordinary text"]
    behind = "document.querySelectorAll('.tokens .turn-name')[1].nextElementSibling.getAttribute('aria-label')"
    assert page.evaluate(behind).startswith("token 6 of 60")
    page.evaluate("document.querySelector('.token[tabindex=\"0\"]').focus()")
    page.press("Home")
    line = "document.querySelector('.token-line').textContent"
    assert " · prompt · given, not sampled" in page.evaluate(line)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.slow
def test_versions_of_a_conversation_have_colours_of_their_own(page: Page, folder: Path, scheme: str) -> None:
    page.scheme(scheme)
    page.open(folder / "full.html")
    colors = "[...document.querySelectorAll('.talk [class^=by]')].map(each => getComputedStyle(each).backgroundColor)"
    legend = (
        "[...document.querySelectorAll('.sample .legend span')].map(each => getComputedStyle(each).backgroundColor)"
    )
    assert page.evaluate(colors)[:2] == page.evaluate(legend)
    assert len(set(page.evaluate(legend))) == 2
    assert is_clean(page), page.log


@pytest.mark.slow
def test_every_control_is_reached_with_the_tab_key(page: Page, folder: Path) -> None:
    page.open(folder / "full.html")
    reached: set[str] = set()
    for _ in range(120):
        page.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    selects = set(page.evaluate("[...document.querySelectorAll('select')].map(each => each.id)"))
    assert selects | {"theme", "SUMMARY"} <= reached


@pytest.mark.slow
def test_the_theme_follows_the_system_until_it_is_chosen(page: Page, folder: Path) -> None:
    page.open(folder / "full.html")
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(255, 255, 255)", "rgb(18, 23, 29)"
    assert page.evaluate(ground) == light
    page.scheme("dark")
    assert page.evaluate(ground) == dark
    page.evaluate("document.getElementById('theme').click()")
    assert page.evaluate(ground) == light
    page.evaluate("document.getElementById('theme').click()")
    page.scheme("light")
    assert page.evaluate(ground) == dark
    fill = "getComputedStyle(document.querySelector('[data-chart=decomposition] .mark-rect path')).fill"
    assert page.evaluate(fill) == "rgb(225, 139, 193)"


ORDINARY = ("full", "steps", "comparison", "six", "sweep")
PAGES = (*ORDINARY, "hostile")
OPEN_ALL = """(async () => { document.querySelectorAll('details').forEach(each => { each.open = true; });
    await new Promise(done => setTimeout(done, 200)); })()"""
RESIZED = "new Promise(done => setTimeout(done, 400))"
COLLIDING = """[...document.querySelectorAll('.plot .role-axis-label')].flatMap(axis => {
    const boxes = [...axis.querySelectorAll('text')].filter(text => getComputedStyle(text).opacity !== '0')
        .map(text => [text.textContent, text.getBoundingClientRect()]);
    return boxes.flatMap(([name, a], i) => boxes.slice(i + 1).filter(([, b]) =>
        a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
        .map(([other]) => `${name} | ${other}`)); })"""
CUT = """[...document.querySelectorAll('body, main, .scroll, .plot, .card, .sample, .headline, td, th, nav, select')]
    .filter(each => each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 0 && each.tagName !== 'SELECT')
    .map(each => `${each.className || each.tagName}: ${each.textContent.slice(0, 60)}`)
    .concat([...document.querySelectorAll('.plot svg')].flatMap(svg => {
        const box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter(text => getComputedStyle(text).opacity !== '0').filter(text => {
            const own = text.getBoundingClientRect();
            return own.left < box.left - 1 || own.right > box.right + 1 || own.bottom > box.bottom + 1
                || own.top < box.top - 1; })
            .map(text => `chart: ${text.textContent}`); }))"""


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.slow
def test_labels_of_an_axis_do_not_collide(page: Page, folder: Path, name: str, width: int) -> None:
    page.size(width, 900)
    page.open(folder / f"{name}.html")
    assert page.evaluate(COLLIDING) == []


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.slow
def test_nothing_is_cut_on_a_phone(page: Page, folder: Path, name: str) -> None:
    page.size(390, 844)
    page.open(folder / f"{name}.html")
    page.evaluate(OPEN_ALL)
    assert page.evaluate(CUT) == []


@pytest.mark.slow
def test_nothing_is_cut_if_a_window_becomes_narrow(page: Page, folder: Path) -> None:
    page.open(folder / "comparison.html")
    page.size(PAPER, 844)
    page.evaluate(RESIZED)
    assert page.evaluate(CUT) == []


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.slow
def test_nothing_is_cut_on_paper(page: Page, folder: Path, name: str) -> None:
    page.open(folder / f"{name}.html")
    width = "document.querySelector('.plot svg').getBoundingClientRect().width"
    on_screen = page.evaluate(width)
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(width) <= PAPER < on_screen
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(width) == pytest.approx(on_screen, abs=2)
    page.size(PAPER, 1000)
    page.evaluate(RESIZED)
    page.call("Emulation.setEmulatedMedia", media="print")
    try:
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate(CUT) == []
        assert page.evaluate(COLLIDING) == []
    finally:
        page.call("Emulation.setEmulatedMedia", media="")


def test_the_first_screen_of_a_run_has_reward_accuracy_gap_and_samples(page: Page, folder: Path) -> None:
    page.open(folder / "full.html")
    lowest = """[...document.querySelectorAll('.headline, .sample')].map(
        each => each.getBoundingClientRect().bottom)"""
    bottoms = page.evaluate(lowest)
    assert len(bottoms) == 5
    assert max(bottoms) <= 900
    page.size(390, 844)
    page.open(folder / "full.html")
    assert max(page.evaluate(lowest)[:3]) <= 844


@pytest.mark.parametrize("width", [360, 768])
@pytest.mark.slow
def test_a_narrow_window_scrolls_tables_and_not_the_page(page: Page, folder: Path, width: int) -> None:
    page.size(width, 800)
    page.open(folder / "hostile.html")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_paper_is_white_with_charts_and_without_controls(page: Page, folder: Path, tmp_path: Path) -> None:
    page.open(folder / "full.html")
    page.scheme("dark")
    page.call("Emulation.setEmulatedMedia", media="print")
    try:
        hidden = (
            "[...document.querySelectorAll('nav, button, select')].every(each => each.getClientRects().length === 0)"
        )
        assert page.evaluate(hidden)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.evaluate(
            "[...document.querySelectorAll('.plot svg')].every(each => each.getBoundingClientRect().height > 50)"
        )
        heights = "[...document.querySelectorAll('.definitions dd')].map(each => each.getBoundingClientRect().height)"
        assert min(page.evaluate(heights)) > 0.0
        page.pdf(tmp_path / "page.pdf")
    finally:
        page.call("Emulation.setEmulatedMedia", media="")
    pdf = (tmp_path / "page.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert 3 <= pdf.count(b"/Type /Page\n") <= 14


@pytest.mark.slow
def test_a_comparison_is_drawn(page: Page, folder: Path) -> None:
    page.open(folder / "comparison.html")
    assert page.evaluate(DRAWN) == ["decomposition", "steps", "layers"]
    assert is_clean(page), page.log


@pytest.mark.slow
@pytest.mark.slow
def test_a_long_run_of_a_deep_model_is_drawn(page: Page, tmp_path: Path) -> None:
    write_report(long_report(), tmp_path / "long.html")
    page.open(tmp_path / "long.html")
    assert page.evaluate(DRAWN) == ["decomposition", "steps", "maps", "layer", "margins"]
    assert is_clean(page), page.log
