"""Looks through a msgpack document before anything is built of it. Any process.

A few compressed kilobytes can hold millions of turns or names, each a hundred bytes once it is an object; and of two
values under one key a decoder takes the last. So values are counted against a limit, texts are measured, and each key
of a map must stand once. Types, and which fields there are, are then for msgspec to judge.
"""

from __future__ import annotations

from moerl.contract.reasons import Reason
from moerl.contract.requirements import MAX_TEXT_BYTES
from moerl.errors import ContractError

MAX_DEPTH = 8
"""Lists and maps inside one another. Ours need six."""


# Forms of a value. Plain are numbers, booleans, nothing, and bytes: what they hold is not looked at.
_PLAIN, _TEXT, _LIST, _MAP, _NOT_OURS = range(5)


def _heads() -> tuple[tuple[int, int, int], ...]:
    """Returns for each first byte: the form of the value, the size that the byte states, and in how many more bytes the
    size follows.

    Sizes are bytes behind the head, elements of a list, pairs of a map. Extensions and 0xc1 are not ours.
    """
    table = dict.fromkeys(range(256), (_NOT_OURS, 0, 0))
    table |= dict.fromkeys((*range(128), 192, 194, 195, *range(224, 256)), (_PLAIN, 0, 0))
    table |= {0x80 + size: (_MAP, size, 0) for size in range(16)}
    table |= {0x90 + size: (_LIST, size, 0) for size in range(16)}
    table |= {0xA0 + size: (_TEXT, size, 0) for size in range(32)}
    table |= {0xC4 + i: (_PLAIN, 0, 1 << i) for i in range(3)}
    table |= {0xCA: (_PLAIN, 4, 0), 0xCB: (_PLAIN, 8, 0)}
    table |= {head + i: (_PLAIN, 1 << i, 0) for head in (0xCC, 0xD0) for i in range(4)}
    table |= {0xD9 + i: (_TEXT, 0, 1 << i) for i in range(3)}
    table |= {0xDC + i: (_LIST, 0, 2 << i) for i in range(2)}
    table |= {0xDE + i: (_MAP, 0, 2 << i) for i in range(2)}
    return tuple(table[head] for head in range(256))


_HEADS = _heads()


def check_document(document: memoryview, max_values: int) -> None:
    """Refuses a document that is not worth decoding.

    Args:
        max_values: how many values it may hold; keys, lists and maps count as well.

    Raises:
        ContractError: `frame_too_large`, `text_too_long`, `duplicate_field` or `message_malformed`.
    """
    try:
        end = _Look(document, max_values).behind(0, 0)
    except IndexError:  # a value that would begin behind the end
        raise _malformed(f"{len(document)} bytes", "the whole document") from None
    if end != len(document):
        raise _malformed(f"{len(document)} bytes", f"one value of {end} bytes")


class _Look:
    """A walk over a document; it keeps nothing of it but the keys of the maps that the walk is in."""

    def __init__(self, document: memoryview, max_values: int) -> None:
        self._document = document
        self._max_values = self._left = max_values
        self._count(1)

    def behind(self, offset: int, depth: int) -> int:
        """Looks at the value that begins at `offset`, and returns the offset behind it. Raises `IndexError` if there is
        none."""
        form, size, width = _HEADS[self._document[offset]]
        start = offset + 1 + width
        if width:
            size = int.from_bytes(self._document[offset + 1 : start], "big")
        if form == _PLAIN:
            return start + size
        if form == _TEXT:
            return self._behind_text(start, size)
        if form == _NOT_OURS:
            raise _malformed(f"byte 0x{self._document[offset]:02x} at {offset}", "a value without extensions")
        if depth == MAX_DEPTH:
            raise _malformed("deeper nesting", f"at most {MAX_DEPTH} lists and maps inside one another")
        if form == _MAP:
            return self._behind_map(start, size, depth + 1)
        self._count(size)
        for _ in range(size):
            start = self.behind(start, depth + 1)
        return start

    def _count(self, num_values: int) -> None:
        """Counts the elements that a list or map states, before one of them is looked at."""
        self._left -= num_values
        if self._left < 0:
            raise ContractError(
                Reason.FRAME_TOO_LARGE,
                field="document",
                seen=f"more than {self._max_values} values",
                expected=f"at most {self._max_values}",
                remedy="send fewer trajectories in a frame",
            )

    def _behind_text(self, start: int, size: int) -> int:
        if size > MAX_TEXT_BYTES:
            seen, expected = f"{size} bytes", f"at most {MAX_TEXT_BYTES}"
            raise ContractError(Reason.TEXT_TOO_LONG, field="document", seen=seen, expected=expected)
        return start + size

    def _behind_map(self, offset: int, num_pairs: int, depth: int) -> int:
        self._count(2 * num_pairs)
        document, keys = self._document, set[bytes]()
        for _ in range(num_pairs):
            form, size, width = _HEADS[document[offset]]
            if form != _TEXT:
                raise _malformed(f"a key at {offset} that is no text", "text")
            start = offset + 1 + width
            if width:
                size = int.from_bytes(document[offset + 1 : start], "big")
            end = self._behind_text(start, size)
            key = bytes(document[start:end])
            if key in keys:
                raise ContractError(
                    Reason.DUPLICATE_FIELD,
                    field="document",
                    seen=repr(key.decode(errors="replace")),
                    expected="each key of a map once",
                )
            keys.add(key)
            offset = self.behind(end, depth)
        return offset


def _malformed(seen: str, expected: str) -> ContractError:
    return ContractError(Reason.MESSAGE_MALFORMED, field="document", seen=seen, expected=expected)
