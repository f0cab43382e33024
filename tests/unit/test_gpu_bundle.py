"""The offline folder for a GPU machine: what goes into it, and what is refused. No index is asked here."""

from __future__ import annotations

import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts import gpu_bundle
from scripts.fatbin import trim

ROOT = Path(__file__).parents[2]


# --- kernels of some architectures -----------------------------------------------------------------------------------


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0, 64, len(code)) + bytes(12) + struct.pack("<I", architecture)
    return header.ljust(64, b"\0") + code


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library_of(section: bytes) -> bytes:
    """A 64-bit ELF file with three sections: none, names, fat binaries."""
    names = b"\0.shstrtab\0.nv_fatbin\0"
    names_at, section_at = 64, 64 + 32
    table_at = section_at + len(section)
    header = b"\x7fELF\x02".ljust(0x28, b"\0") + struct.pack("<Q", table_at) + bytes(0x3A - 0x30)
    header += struct.pack("<HHH", 64, 3, 1)
    headers = [(0, 0, 0), (1, names_at, len(names)), (11, section_at, len(section))]
    table = b"".join(struct.pack("<IIQQQQ", name, 0, 0, 0, at, size).ljust(64, b"\0") for name, at, size in headers)
    return header.ljust(64, b"\0") + names.ljust(32, b"\0") + section + table


KEPT, OTHER, PTX = (bytes([value]) * 24 for value in (1, 2, 3))
FAT = fat_binary(entry(2, 90, KEPT), entry(2, 80, OTHER)) + bytes(8) + fat_binary(entry(1, 90, PTX), entry(2, 90, KEPT))


def test_machine_code_of_the_named_architecture_stays_where_it_was_and_all_else_becomes_zeros(tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    before = library_of(FAT)
    library.write_bytes(before)
    assert trim(library, {90}) == {90: 48}
    assert library.read_bytes() == before.replace(OTHER, bytes(24)).replace(PTX, bytes(24))


@pytest.mark.parametrize(
    ("content", "keep", "problem"),
    [
        (library_of(FAT), {90, 100}, "holds no machine code of sm_100"),
        (b"a script", {90}, "is no 64-bit ELF library"),
        (library_of(fat_binary(entry(2, 90, KEPT)[:-1])), {90}, "is not as expected"),
    ],
)
def test_a_library_that_cannot_be_trimmed_is_refused_and_unchanged(
    content: bytes, keep: set[int], problem: str, tmp_path: Path
) -> None:
    library = tmp_path / "kernels.so"
    library.write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        trim(library, keep)
    assert library.read_bytes() == content


# --- packages --------------------------------------------------------------------------------------------------------


def test_a_bundle_holds_what_a_run_needs_and_neither_torch_nor_development_tools_nor_what_the_machine_has() -> None:
    names = gpu_bundle.closure({"torch", "tensorboard"})
    assert {"megatron-core", "megatron-bridge", "transformers", "reasoning-gym", "sympy"} <= set(names)
    assert not {"moerl", "torch", "triton", "nvidia-cublas", "pytest", "ruff"} & set(names)
    # What tensorboard alone depends on goes with it.
    assert not {"tensorboard", "werkzeug"} & set(names)
    gpu_bundle.check_versions(names)


def test_the_locks_have_one_release_of_transformer_engine() -> None:
    releases = [
        line.split()[0]
        for lock in ("transformer_engine.lock", "gpu.lock")
        for line in (ROOT / "requirements" / lock).read_text(encoding="utf-8").splitlines()
        if line.startswith("transformer-engine==")
    ]
    assert len(releases) == 2
    assert len(set(releases)) == 1


def test_a_package_of_another_version_than_the_locked_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "run.lock"
    lock.write_text("sympy==0.1\n")
    monkeypatch.setattr(gpu_bundle, "RUN_LOCK", lock)
    with pytest.raises(ValueError, match=r"sympy [\d.]+ is installed, run.lock has 0.1; run make setup"):
        gpu_bundle.check_versions(["sympy"])


def test_a_bundled_package_is_imported_from_the_bundle(tmp_path: Path) -> None:
    for name in ("typing-inspection", "typing-extensions"):
        gpu_bundle.copy_package(name, tmp_path / "site")
    with tarfile.open(gpu_bundle.pack(tmp_path / "site", tmp_path / "out")) as archive:
        archive.extractall(tmp_path / "there", filter="data")
    code = "import typing_inspection.introspection as module; print(module.__file__)"
    # Without the packages of this environment.
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path / "there")}, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(tmp_path / "there"))


@pytest.mark.parametrize(
    "name", ["transformer_engine_torch-1.0-cp312.whl", "transformer_engine_torch-2.20.2-cp312.whl"]
)
def test_a_wheel_of_another_release_or_that_is_none_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / name
    if "2.20.2" in name:
        wheel.write_text("no archive")
    else:
        with zipfile.ZipFile(wheel, "w"):
            pass
    assert gpu_bundle.main(["--bundle", str(tmp_path / "out"), "--wheel", str(wheel)]) == 1
    assert f"{wheel} is no wheel of transformer_engine_torch 2.20.2; build it against" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_script_makes_a_bundle_if_it_is_asked_to() -> None:
    script = ROOT / "scripts" / "gpu_check.sh"
    done = subprocess.run([script, "--bundle", "out"], capture_output=True, text=True, check=False)
    assert "the following arguments are required: --wheel" in done.stderr
