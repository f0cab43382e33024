"""Unified diffs applied exactly: every context line at its very place, or not at all.

`patch` and `git apply` shift hunks and forgive context; a server that samples must run what was reviewed. Pure
functions on text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest

from moerl.errors import EngineError

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True, slots=True)
class Hunk:
    """Old lines of a file that new ones replace."""

    old_start: int
    """Line at which `old` begins, from 1; 0 in a file that does not exist yet."""
    new_start: int
    """Line at which `new` begins afterwards."""
    old: tuple[str, ...]
    """Lines before, context included."""
    new: tuple[str, ...]
    """Lines after, context included."""


@dataclass(frozen=True, slots=True)
class FilePatch:
    """Changes to one file."""

    path: str
    """Relative path, without the `a/` of the diff."""
    hunks: tuple[Hunk, ...]
    """From the beginning of the file to its end."""
    creates: bool
    """True if the file must not exist before."""


def parse_diff(text: str, name: str) -> tuple[FilePatch, ...]:
    """Reads the files of a unified diff with `a/` and `b/` prefixes. Files may be created, not removed or renamed.

    Args:
        name: of the patch, for messages.

    Raises:
        EngineError: it is no such diff.
    """
    lines = text.splitlines()
    patches: list[FilePatch] = []
    at = 0
    while at < len(lines):
        if not lines[at].startswith("--- ") or at + 1 == len(lines) or not lines[at + 1].startswith("+++ b/"):
            raise _malformed(name, at, lines[at], "a file header, `--- a/...` and `+++ b/...`")
        path, creates = lines[at + 1][6:], lines[at] == "--- /dev/null"
        if not creates and lines[at] != f"--- a/{path}":
            raise _malformed(name, at, lines[at], f"--- a/{path}")
        hunks: list[Hunk] = []
        at += 2
        while at < len(lines) and lines[at].startswith("@@"):
            hunk, at = _read_hunk(lines, at, name)
            hunks.append(hunk)
        patches.append(FilePatch(path, tuple(hunks), creates))
    return tuple(patches)


def _read_hunk(lines: list[str], at: int, name: str) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[at])
    if match is None:
        raise _malformed(name, at, lines[at], "a hunk header")
    old_start, old_count, new_start, new_count = (1 if part is None else int(part) for part in match.groups())
    old: list[str] = []
    new: list[str] = []
    at += 1
    while len(old) < old_count or len(new) < new_count:
        if at == len(lines) or lines[at][:1] not in (" ", "-", "+"):
            raise _malformed(name, at, "".join(lines[at : at + 1]) or "the end", f"{old_count} and {new_count} lines")
        kind, line = lines[at][0], lines[at][1:]
        if kind != "+":
            old.append(line)
        if kind != "-":
            new.append(line)
        at += 1
    return Hunk(old_start, new_start, tuple(old), tuple(new)), at


def apply_patch(content: str | None, patch: FilePatch, name: str) -> str:
    """Returns the content after the patch; None stands for a file that does not exist.

    Raises:
        EngineError: a line is not exactly what the patch expects at that place.
    """
    if (content is None) != patch.creates:
        state = "does not exist" if content is None else "exists already"
        raise _refusal(name, patch.path, 0, state, "a new file" if patch.creates else "an existing file")
    lines = [] if content is None else content.split("\n")
    result: list[str] = []
    taken = 0
    for hunk in patch.hunks:
        start = hunk.old_start - 1 if hunk.old else hunk.old_start
        result += lines[taken:start]
        taken = start + len(hunk.old)
        # A line that the file has not is None.
        for number, (seen, expected) in enumerate(zip_longest(lines[start:taken], hunk.old), start + 1):
            if seen != expected:
                raise _refusal(name, patch.path, number, seen, expected)
        result += hunk.new
    if patch.creates:
        return "\n".join(result) + "\n"
    return "\n".join(result + lines[taken:])


def revert_patch(content: str | None, patch: FilePatch, name: str) -> str | None:
    """Returns the content before the patch, None for a file that it created.

    Raises:
        EngineError: the patch is not applied, or something changed the same lines since.
    """
    if patch.creates:
        after = apply_patch(None, patch, name)
        if content != after:
            raise _refusal(name, patch.path, 0, "other content", "the file that the patch creates")
        return None
    hunks = tuple(Hunk(hunk.new_start, hunk.old_start, hunk.new, hunk.old) for hunk in patch.hunks)
    back = FilePatch(patch.path, hunks, creates=False)
    return apply_patch(content, back, name)


def _refusal(name: str, path: str, line: int, seen: object, expected: object) -> EngineError:
    return EngineError(
        f"patch {name}: does not fit {path}" + (f", line {line}" if line else ""),
        seen=repr(seen),
        expected=repr(expected),
        remedy="install the release that the patch was made for, into a fresh environment: moerl sglang install",
    )


def _malformed(name: str, at: int, seen: str, expected: str) -> EngineError:
    return EngineError(f"patch {name}: not a unified diff, line {at + 1}", seen=repr(seen), expected=expected)
