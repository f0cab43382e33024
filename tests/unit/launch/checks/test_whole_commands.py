"""The whole commands of docs/recipes.md: the plan fits with the numbers of the page, and the dry run renders."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from asked_commands import Ask, Broken
from factories import QWEN3_30B, write_hf_config, write_hf_model
from small_hub import Cache, hub
from whole_commands import COMMANDS, ROWS, keys_of

from moerl.rollout.sglang.patches import DEFAULT_RELEASE, read_patches

GIB_OF = {"80": 80, "141": 139}
"""GiB of a GPU by its nominal GB."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the address of a hub that has the small files of the model."""
    folder = tmp_path_factory.mktemp("model")
    write_hf_model(folder)
    write_hf_config(folder, **QWEN3_30B)
    small = {name: (folder / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    small["model.safetensors"] = b"not fetched by a dry run"
    with hub({"Qwen/Qwen3-30B-A3B": {"main": small}}, kind="models") as (address, _):
        yield address


def test_the_page_has_a_command_for_each_machine() -> None:
    assert [row[:2] for row in ROWS] == [["one", "80"], ["two", "80"], ["one", "141"], ["two", "141"]]
    assert len(COMMANDS) == 4


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number, id="-".join(row[:2]), marks=[pytest.mark.slow] * (row[:2] not in (["one", "80"], ["two", "141"]))
        )
        for number, row in enumerate(ROWS)
    ],
)
def test_a_whole_command_fits_its_machines(
    number: int, ask: Ask, place: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cache(monkeypatch).use(place / "hub", address)
    (place / "python" / "ray").mkdir(parents=True)
    (place / "python" / "ray" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(place / "python"))
    # Other tests leave the folder tests/ray there.
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    # Its files are those of a release that only the nodes have.
    monkeypatch.setattr("moerl.launch.checks.inputs.verify_installation", lambda site: read_patches())
    (place / "rows.jsonl").unlink()
    rows = [{"prompt": f"say {i}", "answer": str(i)} for i in range(5000)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    nodes, gigabytes, of_rank, of_server, host = ROWS[number]
    words = COMMANDS[number]
    assert ("--nodes" in words) == (nodes == "two")
    (place / "env" / "moerl-sglang.json").write_text(json.dumps({"sglang": DEFAULT_RELEASE, "device": "cuda"}))
    site: dict[str, object] = {"gpu_memory_gib": GIB_OF[gigabytes]}
    options = ("--nodes", "2", "--signal-seconds", "900") if nodes == "two" else ("--signal-seconds", "900")
    keys = (*keys_of(words), "rollout.environment='{env}'")
    run = Broken(keys, "", gpus=8, host_gib=1536, site=site, words=options)
    status, plan = ask("plan", run)
    assert status == 0, plan
    totals = re.findall(r"│ total +│ +([\d.]+) │ +([\d.]+) │ +([\d.]+) │", plan)
    assert [f"{float(gib):.1f}" for gib in totals[0]] == of_rank.split(", ")
    if of_server:
        assert {f"{float(gib):.1f}" for gib in totals[1]} == {of_server}
    assert max(map(float, totals[-1])) == pytest.approx(float(host.replace(",", "")), abs=0.06)
    assert "note: memory of servers" not in plan
    status, text = ask("dry run", run)
    assert status == 0, text
    assert "#SBATCH --gres=gpu:8" in text
    # Weights are fetched when the job is submitted.
    assert re.findall(r"note: (.*)", text) == re.findall(r"note: (model: 1 files of weights .*)", text)
