"""References on the pages for readers: to files, headings, tests, commands, recipes and keys. Torch-free."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from named_things import ROOT, make_targets, unknown_commands, unknown_files, unknown_keys, unknown_names, unknown_tests

from moerl.cli import main
from moerl.config.compose import config_groups
from moerl.telemetry.metrics import METRICS

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for folder in ("docs", "examples", "patches") for page in (ROOT / folder).rglob("*.md")),
    ]
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    seen: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", FENCE.sub("", text_of(page)), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def code_of(page: Path) -> list[str]:
    """Inline code and the lines of fenced blocks."""
    text = text_of(page)
    fenced = [line for block in FENCE.findall(text) for line in block.splitlines()[1:-1]]
    return [*CODE.findall(FENCE.sub("", text)), *fenced]


def test_there_are_pages_to_check() -> None:
    assert {"README.md", "CONTRIBUTING.md", "tutorial.md", "troubleshooting.md"} <= {page.name for page in PAGES}


@pages
def test_relative_links_and_their_anchors_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", text_of(page))):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(target)
    assert not broken


@pages
def test_files_of_this_repository_that_a_page_names_exist(page: Path) -> None:
    assert not unknown_files(code_of(page), page)


@pages
def test_tests_that_a_page_names_exist(page: Path) -> None:
    assert not unknown_tests(CODE.findall(text_of(page)))


@pages
def test_tests_that_a_page_names_are_in_the_file_that_it_names(page: Path) -> None:
    wrong = []
    for file, names in re.findall(r"`([\w/]*test_\w+\.py)`: ((?:`test_\w+`(?:, )?)+)", text_of(page)):
        texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(Path(file).name)]
        wrong += [name for name in re.findall(r"test_\w+", names) if not any(f"def {name}" in text for text in texts)]
    assert not wrong


@pages
def test_commands_that_a_page_names_exist(page: Path) -> None:
    assert not unknown_commands(code_of(page))


@pages
def test_make_targets_that_a_page_names_exist(page: Path) -> None:
    named = {name for code in code_of(page) for name in re.findall(r"^make ([a-z-]+)", code)}
    assert named <= make_targets()


@pages
def test_options_of_config_groups_that_a_page_names_exist(page: Path) -> None:
    groups = config_groups(None)
    named = {
        (group, option)
        for code in code_of(page)
        for group, option in re.findall(r"(?:^|(?<= ))([a-z]+)=([a-z_0-9]+)(?= |$)", code)
    }
    own = {
        ("recipe", "sort"),
        ("recipe", "chat_sums"),
        ("recipe", "short"),
        ("recipe", "mine"),
        ("recipe", "laptob"),
    }  # the reader's own, and one misspelt on purpose
    wrong = {(group, option) for group, option in named if group in groups and option not in groups[group]}
    assert wrong <= own


@pages
def test_keys_that_a_page_sets_exist(page: Path) -> None:
    deliberate = {"rl.groupsize"}  # misspelt on purpose
    assert set(unknown_keys(code_of(page))) <= deliberate


@pages
def test_modules_and_what_they_define_that_a_page_names_exist(page: Path) -> None:
    assert not unknown_names(CODE.findall(FENCE.sub("", text_of(page))))


@pages
def test_metrics_that_a_page_names_exist(page: Path) -> None:
    groups = {name.partition("/")[0] for name in METRICS}
    named = {code for code in CODE.findall(text_of(page)) if re.fullmatch(r"[a-z_]+/[a-z_0-9/]+", code)}
    claimed = {name for name in named if name.partition("/")[0] in groups and not (ROOT / "moerl" / name).exists()}
    assert claimed <= set(METRICS)


def test_a_package_index_shows_no_link_that_leads_nowhere() -> None:
    """An index renders README.md alone: the build turns relative links into text."""
    hook = tomllib.loads(text_of(ROOT / "pyproject.toml"))["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert [fragment["path"] for fragment in hook["fragments"]] == ["README.md"]
    shown = text_of(ROOT / "README.md")
    for rule in hook["substitutions"]:
        shown = re.sub(rule["pattern"], rule["replacement"], shown)
    targets = LINK.findall(FENCE.sub("", shown))
    assert targets
    assert not [target for target in targets if not target.startswith(("https://", "#"))]
    assert "(`docs/tutorial.md`)" in shown
    assert "Bottom right" not in shown, "a caption without its picture"


MESSAGES = re.findall(
    r"(?<!-->\n)^```\n\$ moerl (.+)\n((?:.+\n)+?)```$",
    text_of(ROOT / "docs" / "troubleshooting.md") if (ROOT / "docs" / "troubleshooting.md").exists() else "",
    re.MULTILINE,
)
"""Messages on the page on troubleshooting: commands that end before anything starts, and what they print."""


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of a reader who makes the mistakes of the page."""
    rows = [{"prompt": f"copy {number}\n", "response": str(number)} for number in range(400)]
    files = {
        "dense/config.json": '{"model_type": "llama", "vocab_size": 100}',
        "bad.jsonl": '{"prompt": "a"}\nnot json\n',
        "few.jsonl": '{"prompt": "a", "response": "b"}\n',
        "roles.jsonl": '{"prompt": [{"from": "human", "role": "human", "value": "a"}]}\n',
        "ok.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "some_model/config.json": "{}",
        "my_rewards.py": "def score(row, response):\n    return 1.0\n",
        "runs/done/metrics.jsonl": "",
        "runs/done/config.yaml": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(("command", "printed"), MESSAGES, ids=[command for command, _ in MESSAGES])
def test_messages_on_the_page_on_troubleshooting_are_the_real_ones(
    command: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`...` in the page stands for anything."""
    assert main(shlex.split(command)) in (1, 2)
    wanted = ".*".join(re.escape(part) for part in " ".join(printed.split()).split("..."))
    assert re.fullmatch(wanted, " ".join(capsys.readouterr().err.split()))


def test_most_messages_on_the_page_on_troubleshooting_are_compared() -> None:
    assert len(MESSAGES) >= 12
