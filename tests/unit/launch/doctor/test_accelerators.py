"""GPUs, driver, NCCL and Transformer Engine, from what the driver's tool and torch say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moerl.launch.checks.gpus import Gpu, query_gpus, read_gpus, usable_gpus
from moerl.launch.checks.outcome import Check
from moerl.launch.doctor.accelerators import Torch, accelerator_checks, ask_torch, check_gpus

H100 = "NVIDIA H100 80GB HBM3, 580.65.06, 81559, 4\n"
GPUS = [Gpu("NVIDIA H100 80GB HBM3", "580.65.06", 81559.0, 4.0)] * 2
CUDA = Torch("2.13.0+cu130", "13.0", "2.28.9", 2, True)
CPU = Torch("2.13.0+cpu", None, None, 0, True)
WITH_ENGINE = {"transformer-engine": "2.9.0"}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def shell(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_machine_of_gpus_is_green() -> None:
    found = accelerator_checks(GPUS, CUDA, WITH_ENGINE)
    assert [check.level for check in found] == ["green"] * 4
    assert "driver 580.65.06" in by_name(found)["GPUs"].seen


def test_a_machine_of_cpus_is_green_without_transformer_engine() -> None:
    found = by_name(accelerator_checks([], CPU, {}))
    assert {check.level for check in found.values()} == {"green"}
    assert found["Transformer Engine"].seen == "absent; CPU machines need none"


def test_gpus_without_transformer_engine_are_a_fault() -> None:
    assert by_name(accelerator_checks(GPUS, CUDA, {}))["Transformer Engine"].level == "red"


def test_torch_built_for_cpus_on_a_machine_of_gpus_is_a_fault() -> None:
    found = by_name(accelerator_checks(GPUS, CPU, WITH_ENGINE))
    assert "can use none" in found["GPUs"].seen
    assert found["GPUs"].remedy == "install torch built for CUDA"
    assert found["NCCL"].level == "red"


def test_a_driver_too_old_for_torch_is_a_fault() -> None:
    old = Torch("2.13.0+cu130", "13.0", "2.28.9", 0, True)
    found = check_gpus(GPUS, old)
    assert (found.level, "newer driver" in found.remedy) == ("red", True)


def test_gpus_that_others_use_are_a_note() -> None:
    found = check_gpus([GPUS[0], Gpu("NVIDIA H100 80GB HBM3", "580.65.06", 81559.0, 40_960.0)], CUDA)
    assert found.level == "yellow"
    assert "1 of them hold up to 40.0 GiB of others" in found.seen


def test_gpus_that_are_hidden_from_torch_are_counted() -> None:
    assert check_gpus(GPUS, Torch("2.13.0", "13.0", "2.28.9", 1, True)).seen.endswith("torch may use 1 of them")


def test_the_output_of_the_drivers_tool_is_read() -> None:
    assert query_gpus(shell(f"print({2 * H100!r}, end='')")) == GPUS


@pytest.mark.parametrize("text", ["NVIDIA H100, 580\n", "a, b, c, d\n"])
def test_output_that_cannot_be_read_is_quoted(text: str) -> None:
    assert read_gpus(text) == f"nvidia-smi: {text!r}"


def test_a_driver_that_fails_is_a_fault() -> None:
    code = "import sys; print('NVIDIA-SMI has failed because it could not communicate with the driver'); sys.exit(9)"
    found = query_gpus(shell(code))
    assert isinstance(found, str)
    check = check_gpus(found, CUDA)
    assert check.level == "red"
    assert "ended with 9: NVIDIA-SMI has failed" in check.seen


def test_a_torch_that_cannot_be_imported_is_a_fault(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ImportError: libcudart.so.13: cannot open shared object file' >&2\nexit 1\n")
    broken.chmod(0o755)
    found = ask_torch(str(broken))
    assert isinstance(found, str)
    check = accelerator_checks([], found, {})[0]
    assert (check.name, check.level) == ("torch", "red")
    assert "libcudart.so.13" in check.seen


def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's tool that lists four GPUs, and torch of CUDA."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nfor i in 1 2 3 4; do echo 'H100, 580.1, 81559, 0'; done\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("moerl.launch.checks.gpus.version", lambda name: "2.13.0")


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-a,GPU-b,GPU-c", 3)]
)
def test_a_run_counts_the_gpus_that_it_may_use(
    visible: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch)
    found = usable_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert len(found) == count


def test_a_torch_of_cpus_uses_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch)
    monkeypatch.setattr("moerl.launch.checks.gpus.version", lambda name: "2.13.0+cpu")
    assert usable_gpus({}) == []
