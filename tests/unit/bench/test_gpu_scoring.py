"""Contestants of the scoring check: those of other parties by the signatures of their releases, and what is kept."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).parents[3]


@pytest.fixture
def scoring(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("_gpu_scoring")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Installs stubs of other parties; returns the thresholds that cut-cross-entropy is called with."""
    thresholds: list[Any] = []

    def linear_cross_entropy(  # the signature of release 25.1.1
        e: Tensor,
        c: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        softcap: float | None = None,
        reduction: str = "mean",
        shift: bool = False,
        filter_eps: float | str | None = "high",
        impl: str = "cce",
    ) -> Tensor:
        thresholds.append(filter_eps)
        return functional.cross_entropy(e.float() @ c.float().t(), targets)

    class LigerFusedLinearCrossEntropyLoss:
        def __call__(self, lin_weight: Tensor, _input: Tensor, target: Tensor) -> Tensor:
            return functional.cross_entropy(_input.float() @ lin_weight.float().t(), target)

    stubs = {
        "cut_cross_entropy": SimpleNamespace(linear_cross_entropy=linear_cross_entropy),
        "liger_kernel": SimpleNamespace(),
        "liger_kernel.transformers": SimpleNamespace(LigerFusedLinearCrossEntropyLoss=LigerFusedLinearCrossEntropyLoss),
    }
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    return thresholds


@pytest.fixture
def inputs(scoring: Any) -> Any:
    return scoring.draw(scoring.SETTINGS["cpu"], "cpu")


def test_contestants_of_other_parties_are_called_as_their_releases_allow(
    scoring: Any, inputs: Any, others: list[Any]
) -> None:
    expected = float(scoring.full(inputs["realistic"]).detach())
    for _, contestant in scoring.OTHERS.values():
        _, loss = scoring.measure(contestant, inputs["realistic"], "cpu")
        assert loss == pytest.approx(expected, rel=1e-3)
    assert others == ["high", None]


def test_a_contestant_of_another_party_that_fails_is_left_out_with_its_reason(scoring: Any, inputs: Any) -> None:
    def fail(inputs: Any) -> Tensor:
        raise RuntimeError("no kernel image\nis available")

    race = scoring.Race("cpu")
    assert race.run("full", scoring.full, inputs["realistic"], is_timed=True)
    assert race.run("Liger-Kernel", scoring.full, inputs["realistic"], is_timed=True)
    assert not race.run("Liger-Kernel", fail, inputs["realistic"], is_timed=True)
    assert race.left_out == ["Liger-Kernel: failed: RuntimeError: no kernel image"]
    assert race.passes.keys() == race.losses.keys() == {"full"}
    with pytest.raises(RuntimeError, match="no kernel image"):
        race.run("full", fail, inputs["realistic"], is_timed=True)


def test_a_module_that_fails_while_it_is_imported_is_left_out(
    scoring: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_party.py").write_text("import torch\ntorch.no_such_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    problem = scoring.not_importable("planted_party")
    assert problem.startswith("cannot be imported: AttributeError: ")
    assert not scoring.not_importable("json")


def test_slow_passes_and_much_memory_fail_no_check(scoring: Any) -> None:
    names = [f"kept, {case}" for case in scoring.CASES]
    slow = scoring.Pass(wall_seconds=1e3, cpu_seconds=1e3, peak_bytes=2**40)
    quick = scoring.Pass(wall_seconds=1e-3, cpu_seconds=1e-3, peak_bytes=2**20)
    found = scoring.table(
        {**{name: [slow] for name in (*names, "full", "full, overlap")}, "cut-cross-entropy": [quick]}
    )
    values = {result.name: result.value for result in found}
    assert values["full / cut-cross-entropy: time"] == pytest.approx(1e6)
    assert all(result.holds and not result.goal for result in found)


def test_a_limit_of_correctness_still_fails_the_check(scoring: Any) -> None:
    (apart,) = scoring.same_losses({"full": 12.0, "cut-cross-entropy": 13.0})
    assert not apart.holds


def test_what_was_measured_before_a_pass_fails_is_kept(
    scoring: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0

    def measure(contestant: Any, inputs: Any, device: str) -> tuple[Any, float]:
        nonlocal taken
        taken += 1
        if taken == 17:  # the first of the third turn of eight contestants
            raise RuntimeError("an illegal memory access")
        return scoring.Pass(1.0, 1.0, 1), 2.0

    answer = tmp_path / "answer.json"
    monkeypatch.setattr(importlib.import_module("_gpu_checks"), "_answer_path", answer)
    monkeypatch.setattr(scoring, "measure", measure)
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        scoring.check("cpu")
    names = [result["name"] for result in json.loads(answer.read_text())["results"]]
    assert {"kept, realistic: time", "dense KL: time", "kept, flat: log-probs against dense float32"} <= set(names)


def test_all_cases_share_hidden_states_and_head(scoring: Any, inputs: Any) -> None:
    first, *rest = inputs.values()
    assert all(each.hidden_TH is first.hidden_TH and each.weight_VH is first.weight_VH for each in rest)
    assert (first.hidden_TH.dtype, first.weight_VH.dtype) == (torch.bfloat16, torch.bfloat16)


def test_common_ids_are_listed_by_many_rows_and_uniform_ones_by_few(scoring: Any) -> None:
    uniform, common = (scoring.KeptCase.draw("realistic", 4096, num_common=num_common) for num_common in (0, 50))
    assert (uniform.kept.sizes == common.kept.sizes).all()
    assert (rows_by_id(uniform) >= 64).sum() == 0
    assert (rows_by_id(common) >= 64).nonzero()[0].tolist() == list(range(50))
    for row in range(4096):
        ids = common.kept.ids[common.kept.offsets[row] : common.kept.offsets[row + 1]]
        assert (np.diff(ids) > 0).all()
        assert common.target_ids_T[row] in ids


def rows_by_id(case: Any) -> np.ndarray:
    """Returns how many rows list each id."""
    return np.bincount(case.kept.ids, minlength=151_936)
