"""What the pages for readers point at exists: files, headings, tests, commands, recipes and keys. Torch-free."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from moerl.cli import SGLANG, main
from moerl.config.command_texts import COMMANDS
from moerl.config.compose import config_groups
from moerl.config.reference import config_keys
from moerl.telemetry.metrics import METRICS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "patches").rglob("*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
SUFFIXES = {".py", ".md", ".yaml", ".sh", ".toml", ".json", ".patch", ".png"}
COMMAND_NAMES = {*COMMANDS, *SGLANG, "export", "verify"}

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


@cache
def names_of_tests() -> set[str]:
    return {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


@cache
def file_names() -> set[str]:
    folders = ("moerl", "tests", "bench", "scripts", "docs", "patches")
    return {path.name for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}


def is_here(path: str, page: Path) -> bool:
    """Pages shorten paths: below moerl/ or tests/, or next to the page itself."""
    return any((folder / path).exists() for folder in (ROOT, ROOT / "moerl", ROOT / "tests", page.parent))


def looks_like_ours(path: str) -> bool:
    """A file below a folder that we have, written without placeholders."""
    if not re.fullmatch(r"[\w./-]+", path) or "/" not in path or Path(path).suffix not in SUFFIXES:
        return False
    first = path.split("/")[0]
    return any((folder / first).is_dir() for folder in (ROOT, ROOT / "moerl", ROOT / "tests"))


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
    named = {word for code in code_of(page) for word in re.split(r"[\s:,;()\"'=]+", code)}
    assert not [path for path in sorted(named) if looks_like_ours(path) and not is_here(path, page)]


@pages
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = {name for code in CODE.findall(text_of(page)) for name in re.findall(r"\btest_\w+", code)}
    here = names_of_tests() | {name.removesuffix(".py") for name in file_names()} | {"test_"}
    assert not [name for name in sorted(named - here) if not any(known.startswith(f"{name}_") for known in here)]


@pages
def test_commands_that_a_page_names_exist(page: Path) -> None:
    wrong = []
    for code in code_of(page):
        for words in re.findall(r"(?:^|[$`] ?|bin/)moerl((?: +[a-z]+){1,2})(?![\w.=/])", code):
            first, *rest = words.split()
            if first not in COMMAND_NAMES and " ".join([first, *rest]) not in COMMAND_NAMES:
                wrong.append(words.strip())
    assert not [words for words in wrong if words not in ("plan", "sglang")]


@pages
def test_make_targets_that_a_page_names_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    named = {name for code in code_of(page) for name in re.findall(r"^make ([a-z-]+)", code)}
    assert named <= targets


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
        ("recipe", "mine"),
        ("recipe", "laptob"),
    }  # the reader's own, and one misspelt on purpose
    wrong = {(group, option) for group, option in named if group in groups and option not in groups[group]}
    assert wrong <= own


@pages
def test_keys_that_a_page_sets_exist(page: Path) -> None:
    keys = {key.path for key in config_keys()}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    deliberate = {"rl.groupsize"}  # misspelt on purpose
    named = {
        key
        for code in code_of(page)
        for key in re.findall(r"(?:^|(?<= ))([a-z_]+\.[a-z_.]+)(?==)", code)
        if key.partition(".")[0] in sections
    }
    assert named - deliberate <= keys


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
"""Of the page on troubleshooting: commands that end before anything starts, and what they print."""


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of a reader who makes the mistakes of the page."""
    rows = [{"prompt": f"copy {number}\n", "response": str(number)} for number in range(400)]
    files = {
        "dense/config.json": '{"model_type": "llama", "vocab_size": 100}',
        "bad.jsonl": '{"prompt": "a"}\nnot json\n',
        "few.jsonl": '{"prompt": "a", "response": "b"}\n',
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
