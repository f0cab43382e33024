"""The layouts of published models: accepted, and as large as docs/recipes.md says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from factories import QWEN3_30B
from published_models import DEEPSEEK_V3, GLM_45, GLM_45_AIR, QWEN3_235B

from moerl.config.architecture import describe_model
from moerl.config.load import load_plan
from moerl.machine.layouts import as_overrides
from moerl.machine.memory import USABLE_SHARE, heaviest_rank, total_parameters

ROOT = Path(__file__).parents[3]
MODELS = {
    "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen3-235B-A22B": QWEN3_235B,
    "GLM-4.5": GLM_45,
    "GLM-4.5-Air": GLM_45_AIR,
    "DeepSeek-V3": DEEPSEEK_V3,
}
GIB_OF = {80: 80, 141: 139}
"""GiB of a GPU by its nominal GB."""
ROWS = [
    [cell.strip() for cell in row]
    for row in re.findall(
        r"^\| `(\w+)` \| ([\w.\-]+) \| (\d+) of (\d+) GB(?:, with `([^`]+)`)? \| ([^|]+) \| ([\d.]+) \| ([^|]+) \|$",
        (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
]


def test_the_page_lists_every_layout_of_a_published_model():
    shipped = {path.stem for path in (ROOT / "configs" / "parallel").glob("*_*x*.yaml")}
    assert {row[0] for row in ROWS} == shipped
    assert len(ROWS) == 11


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_layout_fits_with_the_memory_that_the_page_says(row: list[str], tmp_path: Path):
    name, model, count, gigabytes, more, layout, gib, server = row
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    config = load_plan(["recipe=math", f"parallel={name}", f"model.path='{tmp_path}'", *more.split()])
    dims = config.parallel.dims
    assert dims.world_size == int(count)
    keys = {"TP": "tensor", "PP": "pipeline", "EP": "expert", "DP": "data"}
    said = " ".join(f"parallel.{keys[part[:2]]}={part[2:]}" for part in layout.split())
    assert as_overrides(dims) == said
    sizes = describe_model(config.model)
    rank = heaviest_rank(sizes, dims, config.rank_needs())
    assert rank.total_bytes / 2**30 == pytest.approx(float(gib), abs=0.05)
    assert rank.total_bytes <= USABLE_SHARE * GIB_OF[int(gigabytes)] * 2**30
    weights = 2 * total_parameters(sizes)
    for_weights = 0.8 * GIB_OF[int(gigabytes)] * 2**30
    if server.startswith("`rollout.tensor="):
        assert weights / int(server.strip("`").partition("=")[2]) < for_weights
    else:
        assert weights / 8 > for_weights
    assert USABLE_SHARE == 0.9
