"""`moerl diagnose` on what live servers answered, as anybody who asks /generate can keep it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import sglang_live
from sglang_reference import make_requests

from moerl.cli import main
from moerl.contract.trajectory import SamplingParams
from moerl.diagnostics.report.data import read_report
from moerl.rollout.sglang.server import SGLangServer

pytestmark = pytest.mark.sglang


def test_raw_answers_with_routes_and_kept_sets_are_in_order(server: SGLangServer, model_folder: Path, tmp_path: Path):
    sampling = SamplingParams(temperature=0.8, top_p=0.9, top_k=20)
    requests = [replace(each, sampling=replace(sampling, seed=i)) for i, each in enumerate(make_requests(24))]
    answers = sglang_live.generate(server.endpoint, requests, compact_answer=False)
    dump = tmp_path / "answers.jsonl"
    rows = [
        {"input_ids": request.prompt_ids, "sampling_params": {"temperature": 0.8, "top_p": 0.9}, **answer}
        for request, answer in zip(requests, answers, strict=True)
    ]
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert main(["diagnose", str(dump), "--model", str(model_folder), "--output", str(tmp_path / "page.html")]) == 0

    report = read_report(tmp_path / "page.json")
    assert report.verdict.level == "good", report.verdict.text
    assert set(report.scorers) == {"neither", "kept_sets", "experts", "both", "floor"}
    assert not report.unusable
    gaps = {each.name: each.total.value for each in report.decompositions}
    # Nothing but float32's rounding is left of what sampling masks make.
    assert gaps["as recorded"] < 1e-5 < 0.1 < gaps["nothing kept"]
