"""Files of keys, and texts that must not show them."""

from __future__ import annotations

import base64
import html
import json
import os
import traceback
from pathlib import Path
from urllib.parse import quote

import pytest

from moerl.errors import ConfigError, MoerlError
from moerl.http.keys import MAX_FILE_BYTES, Key, is_private, read_key, read_private

VALUE = "sk-Proj_7Hq/x+2\"9&Zk'w<"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.touch(0o600)
    return path


@pytest.mark.parametrize("content", [VALUE, VALUE + "\n", VALUE + "\r\n", f"  {VALUE} \n\n"])
def test_a_key_is_read_without_blanks_around_it(file: Path, content: str):
    file.write_text(content)
    assert read_key(file, "key_file").headers == {"Authorization": f"Bearer {VALUE}"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b" \n",
        b"secret-1\nsecret-2",
        b"secret-1\r\nsecret-2\r\n",
        b"secret-1 secret-2",
        b"secret-1\tsecret-2",
        b"secret-1\x00",
        b"\x00secret-1",
        b"\xef\xbb\xbfsecret-1",
        "secret-1".encode("utf-16"),
        "secr\u00e9t-1".encode(),
        "secr\u00e9t-1".encode("latin-1"),
        b"secret-1\x7f",
        b"secret-1\x1b[2J",
        b"\xff\xfe\xfdsecret-1",
        b"secret-1" * 513,
    ],
)
def test_a_file_of_something_else_than_a_key_is_refused_and_not_shown(file: Path, content: bytes):
    file.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"key_file: not a key alone.*which are not shown.*write the key alone"
    ) as caught:
        read_key(file, "key_file")
    text = "".join(traceback.format_exception(caught.value)) + repr(caught.value.__context__)
    assert "ret-1" not in text
    assert "t-1" not in repr(vars(caught.value))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o777])
def test_a_file_that_others_may_read_or_write_is_refused(file: Path, mode: int):
    file.write_text(VALUE)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"others may read its keys.*mode {mode:04o}.*chmod 600.*change its keys"):
        read_key(file, "key_file")


def test_a_file_of_another_user_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getuid", lambda: os.stat(file).st_uid + 1)
    assert not is_private(file.stat())
    with pytest.raises(ConfigError, match="others may read"):
        read_key(file, "key_file")


@pytest.mark.parametrize("kind", ["folder", "pipe", "missing", "long", "device"])
def test_what_is_no_file_with_keys_is_refused(tmp_path: Path, kind: str):
    path = Path("/dev/null") if kind == "device" else tmp_path / "file"
    if kind == "folder":
        path.mkdir(0o700)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "long":
        path.touch(0o600)
        path.write_bytes(b"a" * (MAX_FILE_BYTES + 1))
    with pytest.raises(MoerlError, match=r"cannot be read|no file with keys"):
        read_private(path, "file", MoerlError, remedy="")


def test_a_key_is_not_shown_by_itself():
    assert VALUE not in repr(Key(VALUE))


@pytest.mark.parametrize(
    "said",
    [
        VALUE,
        VALUE.upper(),
        json.dumps(VALUE),
        json.dumps(json.dumps(VALUE)),
        "".join(f"\\u{ord(each):04X}" for each in VALUE),
        "".join(f"\\x{ord(each):02x}" for each in VALUE),
        "".join(f"%{ord(each):02x}" for each in VALUE),
        "".join(f"&#{ord(each)};" for each in VALUE),
        "".join(f"&#x{ord(each):x};" for each in VALUE),
        quote(VALUE),
        html.escape(VALUE),
        repr(VALUE.encode()),
        VALUE.encode().hex(),
        *(base64.b64encode(b"x" * before + VALUE.encode()).decode() for before in range(4)),
        *(base64.urlsafe_b64encode(b"x" * before + VALUE.encode()).decode() for before in range(4)),
        base64.b64encode(f"Bearer {VALUE}".encode()).decode(),
        VALUE[:12],
        VALUE[4:],
    ],
)
def test_the_key_is_hidden_however_it_is_spelt(said: str):
    text = Key(VALUE).hide(f"before {said} behind")
    assert text.startswith("before ")
    assert text.endswith(" behind")
    assert "[key]" in text
    parts = text.removeprefix("before ").removesuffix(" behind").split("[key]")
    assert not any(said[start : start + 20] in part for part in parts for start in range(len(said) - 19))
    assert sum(len(part) for part in parts) <= 30  # the beginning of "Bearer", quotes, and a character left at each end


def test_text_without_the_key_is_as_it_was():
    text = "model m is not there: \u00e9\u4e2d\U0001f600 %41 &#65; \\u0041 sk-Proj"
    assert Key(VALUE).hide(text) == text


@pytest.mark.parametrize("value", ["k", "EMPTY", "none"])
def test_a_short_key_is_hidden_as_a_whole(value: str):
    assert Key(value).hide(f"<{value}>") == "<[key]>"


@pytest.mark.parametrize("value", ["", "a b", "a\n", "a" * 4097, "\u00e9", "a\0"])
def test_what_fits_into_no_header_is_no_key(value: str):
    with pytest.raises(ValueError, match="a key that cannot be one"):
        Key(value)
