from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
from receivers import RELAY

from moerl.errors import EngineError
from moerl.rollout.sglang.patches import (
    DEFAULT_RELEASE,
    STAMP,
    PatchSet,
    apply_patches,
    read_patches,
    release_folder,
    releases,
    verify_installation,
    verify_patches,
)

OLD = "".join(f"line {i}\n" for i in range(12))
PATCH = """--- a/sglang/one.py
+++ b/sglang/one.py
@@ -3,3 +3,4 @@
 line 2
 line 3
+a new line
 line 4
"""
SECOND = """--- a/sglang/one.py
+++ b/sglang/one.py
@@ -4,3 +4,3 @@
 line 3
-a new line
+a newer line
 line 4
--- /dev/null
+++ b/sglang/two.py
@@ -0,0 +1 @@
+new
"""


def record(path: str, content: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).decode().rstrip("=")
    return f"{path},sha256={digest},{len(content)}\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """site-packages with a release of one file."""
    site = tmp_path / "site"
    (site / "sglang").mkdir(parents=True)
    (site / "sglang" / "one.py").write_text(OLD)
    info = site / f"sglang-{DEFAULT_RELEASE}.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(record("sglang/one.py", OLD))
    return site


@pytest.fixture
def patches(tmp_path: Path) -> PatchSet:
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "0001-one.patch").write_text(PATCH)
    (folder / "0002-two.patch").write_text(SECOND)
    return read_patches(folder=folder)


def test_patches_are_applied_in_order_and_stamped(site: Path, patches: PatchSet):
    apply_patches(site, patches)
    assert "line 3\na newer line\nline 4\n" in (site / "sglang" / "one.py").read_text()
    assert (site / "sglang" / "two.py").read_text() == "new\n"
    assert patches.fingerprint in (site / STAMP).read_text()
    verify_patches(site, patches)


def test_applying_twice_does_no_harm(site: Path, patches: PatchSet):
    apply_patches(site, patches)
    before = (site / "sglang" / "one.py").read_text()
    apply_patches(site, patches)
    assert (site / "sglang" / "one.py").read_text() == before


def test_another_release_is_refused_by_name(site: Path, patches: PatchSet):
    (site / "sglang-0.5.21.dist-info").rename(site / "sglang-0.5.23.dist-info")
    with pytest.raises(EngineError, match=r"seen: 0\.5\.23; expected: sglang 0\.5\.21"):
        apply_patches(site, patches)


def test_a_file_that_is_not_as_released_is_refused_and_nothing_is_written(site: Path, patches: PatchSet):
    changed = OLD.replace("line 11", "line eleven")
    (site / "sglang" / "one.py").write_text(changed)
    with pytest.raises(EngineError, match=r"one\.py is not as released"):
        apply_patches(site, patches)
    assert (site / "sglang" / "one.py").read_text() == changed
    assert not (site / "sglang" / "two.py").exists()


@pytest.mark.parametrize(("old", "new"), [("a newer line", "another line"), ("line 11", "line eleven")])
def test_a_change_after_patching_is_found_wherever_it_is(site: Path, patches: PatchSet, old: str, new: str):
    apply_patches(site, patches)
    file = site / "sglang" / "one.py"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(EngineError, match=r"one\.py"):
        verify_patches(site, patches)


def test_missing_patches_and_others_are_told_apart(site: Path, patches: PatchSet, tmp_path: Path):
    with pytest.raises(EngineError, match="not patched"):
        verify_patches(site, patches)
    apply_patches(site, patches)
    (tmp_path / "patches" / "0002-two.patch").write_text(SECOND.replace("+new", "+newer"))
    with pytest.raises(EngineError, match="other patches"):
        apply_patches(site, read_patches(folder=tmp_path / "patches"))


def test_a_release_without_patches_is_refused_with_those_that_have_some(site: Path):
    supported = " or ".join(releases())
    with pytest.raises(EngineError, match=rf"seen: 0\.5\.22; expected: {supported}"):
        read_patches("0.5.22")
    (site / f"sglang-{DEFAULT_RELEASE}.dist-info").rename(site / "sglang-0.5.22.dist-info")
    with pytest.raises(EngineError, match=rf"seen: 0\.5\.22; expected: sglang {supported}"):
        verify_installation(site)


def test_two_releases_in_one_folder_are_refused(site: Path):
    (site / "sglang-0.5.23.dist-info").mkdir()
    with pytest.raises(EngineError, match=r"seen: 0\.5\.21, 0\.5\.23"):
        verify_installation(site)


def test_releases_are_listed_with_the_oldest_first():
    assert releases() == ("0.5.21", "0.5.23")
    assert DEFAULT_RELEASE in releases()


def test_every_release_has_a_fingerprint_of_its_own():
    assert len({read_patches(release).fingerprint for release in releases()}) == len(releases())


def test_equal_patches_of_two_releases_have_two_fingerprints(patches: PatchSet, tmp_path: Path):
    assert read_patches("0.5.23", tmp_path / "patches").fingerprint != patches.fingerprint


def test_the_relay_of_weights_is_the_same_in_every_release():
    """Tests and benchmarks that run it without a server take it from one of them."""
    patches = [patch for release in releases() for patch in read_patches(release).patches]
    relays = [file.hunks for patch in patches for file in patch.files if file.path == RELAY]
    assert len(relays) == len(releases())
    assert all(relay == relays[0] for relay in relays)


@pytest.mark.parametrize("release", releases())
def test_our_own_patches_are_well_formed_and_each_has_a_line_in_the_readme(release: str):
    patches = read_patches(release)
    readme = (release_folder(release) / "README.md").read_text()
    assert [patch.name[:4] for patch in patches.patches] == [f"{i:04d}" for i in range(1, len(patches.patches) + 1)]
    for patch in patches.patches:
        assert f"`{patch.name}`" in readme


@pytest.mark.parametrize("release", releases())
def test_the_readme_names_a_test_for_every_patch_and_each_is_there(release: str):
    tests = Path(__file__).parents[3]
    rows = [line for line in (release_folder(release) / "README.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(read_patches(release).patches)
    for row in rows:
        column = row.split(" | ")[-1]
        files = re.findall(r"`(\w+/test_\w+\.py)`", column)
        assert files, column
        source = "".join((tests / file).read_text() for file in files)
        for name in re.findall(r"`(test_\w+)`", column):
            assert f"def {name}(" in source
