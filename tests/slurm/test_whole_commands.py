"""The whole commands of docs/recipes.md on emulated nodes: their keys, with a tiny model on fewer ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang_live
from chat_models import CHATML_THINKING, chat_tokenizer
from ray_cluster import needs_ray
from slurm_cluster import Cluster
from slurm_jobs import submit
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from whole_commands import COMMANDS, ROWS, keys_of

from moerl.machine.interfaces import own_address
from moerl.telemetry.sinks import read_rows

LONG = 1500.0
"""For a job with servers, on a busy machine."""
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(2 * LONG),
    pytest.mark.skipif(not sglang_live.ENVIRONMENT.exists(), reason="no environment of SGLang servers: make sglang"),
]

FEWER = (
    *("num_threads=2", "parallel.expert=2", "parallel.data=2", "rollout.tensor=1", "rollout.max_running=8"),
    *("rl.steps=2", "rl.prompts_per_step=2", "rl.group_size=2", "rollout.max_new_tokens=8"),
    *("trainer.microbatch_tokens=512", "task.max_prompt_tokens=64"),
    *("evaluation.dev_problems=2", "evaluation.heldout_problems=2", "evaluation.samples=2"),
    *("task.rewards.right.workers=1", "checkpoint.every=1"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of the family of Qwen3-30B-A3B, with a template as its own."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = chat_tokenizer(CHATML_THINKING)
    tokenizer.save_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("nodes"), 2, own_address("192.0.2.1", 9)) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=needs_ray if row[0] == "two" else (), id=f"{row[0]}-{row[1]}")
        for number, row in enumerate(ROWS)
    ],
)
def test_a_whole_command_runs_on_emulated_nodes(number: int, two_nodes: Cluster, model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = COMMANDS[number]
    servers = 2 if "rollout.placement=colocated" in words else 1
    keys = [*keys_of(words), *FEWER, f"rollout.servers={servers}"]
    keys += [f"model.path='{model}'", f"task.path='{tmp_path / 'rows.jsonl'}'"]
    keys += [f"rollout.environment='{sglang_live.ENVIRONMENT}'"]
    nodes = ["--nodes", "2"] if "--nodes" in words else []
    # A rank and, on one of two nodes, a server of its own.
    site = f"cpus_per_node: {len(nodes) or 1}\n"
    job = submit(two_nodes, tmp_path / "run", *keys, *nodes, "--time", "50", site=site)
    two_nodes.wait_for(job.job_id, "COMPLETED", seconds=LONG)
    assert job.ends() == [(0, 0)], job.told()
    steps = [row for row in read_rows(job.run_dir / "metrics.jsonl") if row["stage"] == "rl"]
    assert [row["step"] for row in steps] == [1, 2]
