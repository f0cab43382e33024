"""Names that texts about this repository may use: of files, tests, commands, keys, modules, and in them. Torch-free."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from moerl.cli import LAUNCH, SGLANG
from moerl.config.command_texts import COMMANDS
from moerl.config.reference import config_keys, is_known, sections

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"`+([^`\n]+)`+")
SUFFIXES = {".py", ".md", ".yaml", ".sh", ".toml", ".json", ".patch", ".png"}
DIRECTORY_COMMANDS = ("status", "watch", "report", "diagnose", "samples", "export", "verify", "conformance", "doctor")
COMMAND_NAMES = {*COMMANDS, *SGLANG, *LAUNCH, *DIRECTORY_COMMANDS}
FAMILIES = {"plan", "sglang", "launch"}


@cache
def names_of_tests() -> set[str]:
    return {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


@cache
def file_names() -> set[str]:
    folders = ("moerl", "tests", "bench", "scripts", "docs", "patches")
    return {path.name for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}


@cache
def paths_of_keys() -> frozenset[str]:
    return frozenset(key.path for key in config_keys())


@cache
def sections_of_keys() -> frozenset[str]:
    return frozenset(sections())


@cache
def names_of_packages() -> frozenset[str]:
    return frozenset(path.stem for path in (ROOT / "moerl").iterdir() if not path.name.startswith("__"))


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def unknown_tests(codes: list[str]) -> list[str]:
    """Test names that no test has or begins with."""
    named = {name for code in codes for name in re.findall(r"\btest_\w+", code)}
    here = names_of_tests() | {name.removesuffix(".py") for name in file_names()} | {"test_"}
    return [name for name in sorted(named - here) if not any(known.startswith(f"{name}_") for known in here)]


MADE = {"runs", "dist", "build"}
"""Folders that runs and builds make: what is in them is nobody's promise."""

OTHERS = ("examples/converters/", "examples/grpo_trainer/")
"""Folders of NeMo-RL and of verl, which have examples, too."""


def unknown_files(codes: list[str], page: Path) -> list[str]:
    """Paths into this repository, written without placeholders, at which there is nothing."""
    named = {word for code in codes for word in re.split(r"[\s:,;()\"'=]+", code)}
    return [path for path in sorted(named) if _looks_like_ours(path) and not _is_here(path, page)]


def _is_here(path: str, page: Path) -> bool:
    """Texts shorten paths: below moerl/ or tests/, or next to the text itself."""
    return any((folder / path).exists() for folder in (ROOT, ROOT / "moerl", ROOT / "tests", page.parent))


def _looks_like_ours(path: str) -> bool:
    if not re.fullmatch(r"[\w./-]+", path) or "/" not in path or Path(path).suffix not in SUFFIXES:
        return False
    if path.startswith(OTHERS):
        return False
    first = path.split("/")[0]
    return first not in MADE and any((folder / first).is_dir() for folder in (ROOT, ROOT / "moerl", ROOT / "tests"))


def unknown_commands(codes: list[str]) -> list[str]:
    """Returns the words behind `moerl` that are no command."""
    wrong = []
    for code in codes:
        for words in re.findall(r"(?:^|[$`] ?|bin/)moerl((?: +[a-z]+){1,2})(?![\w.=/])", code):
            first, *rest = words.split()
            if first not in COMMAND_NAMES and " ".join([first, *rest]) not in COMMAND_NAMES:
                wrong.append(words.strip())
    return [words for words in wrong if words not in FAMILIES]


def unknown_keys(codes: list[str]) -> list[str]:
    """Keys of the configuration that are set, ``section.key=``, and do not exist."""
    keys = paths_of_keys()
    tops = {key.partition(".")[0] for key in keys if "." in key}
    named = {key for code in codes for key in re.findall(r"(?:^|(?<= ))([a-z_]+\.[a-z_.]+)(?==)", code)}
    return sorted(key for key in named - keys if key.partition(".")[0] in tops and not _is_inside_mapping(key))


def unknown_names(codes: list[str]) -> list[str]:
    """Dotted names of modules, what they define, and keys, that lead nowhere; ``moerl.`` may be left out."""
    packages = names_of_packages()
    known_keys = paths_of_keys() | sections_of_keys()
    tops = {key.partition(".")[0] for key in known_keys if "." in key}
    wrong = []
    for code in codes:
        name = code.split("(")[0].rstrip(":")
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name) or name.rpartition(".")[2] in _OF_FILES:
            continue
        first = name.partition(".")[0]
        if name in _NOT_OURS:
            continue
        if first == "moerl":
            is_wrong = not leads_somewhere(name)
        else:
            # `config` is more often a variable than the package.
            is_wrong = (first in packages - {"config"} or first in tops) and not (
                name in known_keys or _is_inside_mapping(name) or leads_somewhere(f"moerl.{name}")
            )
        wrong += [name] if is_wrong else []
    return wrong


_OF_FILES = {suffix[1:] for suffix in SUFFIXES} | {"jsonl", "parquet", "log", "cfg", "txt", "safetensors", "lock"}
_NOT_OURS = {"moerl.digest"}  # a key in the footer of a Parquet file


def _is_inside_mapping(name: str) -> bool:
    return is_known(name) and any(name.startswith(f"{key}.") for key in paths_of_keys())


@cache
def leads_somewhere(name: str) -> bool:
    """True where a dotted name is that of a module, or of something that a module or a class in it defines."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        file = module_file(parts[:count])
        if file is not None:
            return _defines(_statements(file), parts[count:])
    return False


def module_file(parts: list[str]) -> Path | None:
    path = ROOT.joinpath(*parts)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _defines(body: list[ast.stmt], names: list[str]) -> bool:
    if not names:
        return True
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == names[0]:
            # What a class inherits is not looked for.
            return _defines(node.body, names[1:]) or bool(node.bases)
        if isinstance(node, ast.If | ast.Try) and _defines([*node.body, *node.orelse], names):
            return True
        if names[0] in _names_of(node):
            return True
    return False


def _names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inside = {
            each.attr
            for each in ast.walk(node)
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and node.name == "__init__"
        }
        return {node.name} | inside
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, ast.TypeAlias):
        return {node.name.id}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


@cache
def _statements(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body
