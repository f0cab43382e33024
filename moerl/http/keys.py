"""Keys of addresses: the files that hold them, and texts that must not show them. Any process.

Whoever answers a request has seen the key in its headers and may send it back, in whatever spelling. So texts of an
answer, and of errors about it, pass through `Key.hide` before anybody sees them.
"""

from __future__ import annotations

import base64
import html
import os
import re
import stat
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

from moerl.errors import ConfigError, MoerlError

MAX_FILE_BYTES = 1 << 16

PIECE = 8
"""Fewest characters of a key in a row that are hidden: a text may have been cut in the middle of a key."""

HIDDEN = "[key]"

_KEY = re.compile(r"[!-~]{1,4096}")
"""Pattern of a key that fits into a header as it is."""

_UNIT = re.compile(r"\\u00[0-9a-f]{2}|\\x[0-9a-f]{2}|%[0-9a-f]{2}|&#?[0-9a-z]{1,6};|\\.|.", re.DOTALL | re.IGNORECASE)
"""One character, or one that JSON, Python, a URL or HTML has escaped."""


class Key:
    """A key that goes into the header of requests and into no text.

    Args:
        value: 1 to 4096 printable ASCII characters without blanks.

    Attributes:
        headers: the header that holds the key.

    Raises:
        ValueError: The value is something else.
    """

    def __init__(self, value: str) -> None:
        if _KEY.fullmatch(value) is None:
            raise ValueError("a key that cannot be one")
        self.headers: Mapping[str, str] = {"Authorization": f"Bearer {value}"}
        self._pieces = {piece for form in _forms(value) for piece in _pieces(form.lower())}
        self._sizes = {len(piece) for piece in self._pieces}

    def __repr__(self) -> str:
        return "Key()"

    def hide(self, text: str) -> str:
        """Returns the text with `HIDDEN` in place of the key, and of any `PIECE` characters of it in a row.

        Finds it in capitals and small letters, with characters escaped as in JSON, Python, URLs and HTML, in base64
        and in hexadecimal. Takes time in proportion to the text: cut a long one first.
        """
        hidden = bytearray(len(text))
        as_it_is = [(place, place + 1, each) for place, each in enumerate(text)]
        unescaped = [(match.start(), match.end(), _meant(match[0])) for match in _UNIT.finditer(text)]
        for units in (as_it_is, unescaped):
            for start, end in self._found(units):
                hidden[start:end] = b"\1" * (end - start)
        runs = groupby(range(len(text)), hidden.__getitem__)
        return "".join(HIDDEN if is_hidden else "".join(text[place] for place in places) for is_hidden, places in runs)

    def _found(self, units: list[tuple[int, int, str]]) -> Iterator[tuple[int, int]]:
        """Yields the start and end of each piece of the key in the text. units: start, end and character of each."""
        said = "".join(each.lower() if each.isascii() else each for _, _, each in units)
        for size in self._sizes:
            for first in range(len(said) - size + 1):
                if said[first : first + size] in self._pieces:
                    yield units[first][0], units[first + size - 1][1]


def _meant(unit: str) -> str:
    """Returns the character that a match of `_UNIT` stands for."""
    if len(unit) == 1:
        return unit
    if unit[0] == "%":
        return chr(int(unit[1:], 16))
    if unit[0] == "&":
        meant = html.unescape(unit)
        return meant if len(meant) == 1 else "\0"
    return chr(int(unit[2:], 16)) if len(unit) > 2 else unit[1]


def _forms(value: str) -> Iterator[str]:
    yield value
    raw = value.encode()
    encoded = [raw.hex()]
    for before in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            text = encode(bytes(before) + raw).decode()
            # The characters that the key alone decides, behind so many other bytes.
            encoded.append(text[-(-before * 4 // 3) : (before + len(raw)) * 4 // 3])
    # Of a key of few characters they would be found anywhere.
    yield from (form for form in encoded if len(form) >= PIECE - 2)


def _pieces(form: str) -> Iterator[str]:
    size = min(PIECE, len(form))
    return (form[start : start + size] for start in range(len(form) - size + 1))


def read_key(path: Path, what: str) -> Key:
    """Reads a file that holds a key alone. what: name of the file, for errors.

    Raises:
        ConfigError: As `read_private`, or it holds something else, which the error does not show.
    """
    content = read_private(path, what, ConfigError, remedy="check the path")
    try:
        return Key(content.strip(b" \t\r\n").decode("ascii", "replace"))
    except ValueError:
        raise ConfigError(
            f"{what}: not a key alone",
            seen=f"{len(content)} bytes, which are not shown",
            expected="one line of at most 4096 printable ASCII characters without blanks, no byte order mark",
            remedy="write the key alone into the file",
        ) from None


def read_private(path: Path, what: str, error: type[MoerlError], *, remedy: str) -> bytes:
    """Reads a file with keys.

    Args:
        what: name of the file, for errors.
        error: class of the errors.
        remedy: of the error for a file that cannot be read.

    Raises:
        MoerlError: Of that class: the file cannot be read, is no regular file, is longer than `MAX_FILE_BYTES`, or
            others may read it.
    """
    try:
        # A pipe would keep us waiting for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else None
    except OSError as failure:
        raise error(
            f"{what}: cannot be read",
            seen=f"{path}: {failure.strerror}",
            expected="a file of your own, with mode 0600",
            remedy=remedy,
        ) from failure
    if content is None or len(content) > MAX_FILE_BYTES:
        raise error(
            f"{what}: no file with keys",
            seen=f"{path}: " + ("no regular file" if content is None else f"more than {MAX_FILE_BYTES} bytes"),
            expected=f"a file of at most {MAX_FILE_BYTES} bytes",
            remedy=remedy,
        )
    if not is_private(status):
        raise error(
            f"{what}: others may read its keys",
            seen=f"{path}: mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}",
            expected=f"mode 0600, your own (owner {os.getuid()})",
            remedy=f"chmod 600 {path}, and change its keys: others may have read them",
        )
    return content


def is_private(status: os.stat_result) -> bool:
    """Returns whether a file is this user's, and no one else's to read or write."""
    return not stat.S_IMODE(status.st_mode) & 0o077 and status.st_uid == os.getuid()
