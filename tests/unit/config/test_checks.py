"""Combinations of values that cannot run, each refused by path with its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import write_hf_config

from moerl.config.checks import config_notes
from moerl.config.load import load_config
from moerl.errors import ConfigError


def error(*overrides: str, command: str = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, command=command)
    assert caught.value.expected
    assert caught.value.remedy
    return caught.value.what


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["model.path=/x"], "model.path and model.architecture: one of them"),
        (["model.architecture=null"], "model.path and model.architecture: one of them"),
        (
            ["model.architecture=null", "model.path=/x", "model.tokenizer=/y"],
            "model.tokenizer: the model of model.path has one",
        ),
        (["model.tokenizer=/nowhere"], "model.tokenizer: /nowhere: no tokenizer"),
        (["model.architecture.experts_per_token=9"], "model.architecture.experts_per_token: more than"),
        (["model.architecture.num_attention_heads=3"], "model.architecture.num_attention_heads: not a multiple"),
        (["model.architecture.head_dim=31"], "model.architecture.head_dim: rotary"),
        (["parallel.expert=4", "parallel.data=2"], "parallel.data: expert groups do not fill a pipeline stage"),
        (["parallel.virtual_pipeline=2"], "parallel.virtual_pipeline: there is no pipeline to interleave"),
        (["parallel.pipeline=5"], "parallel.pipeline: is more than model.architecture.num_layers"),
        (
            ["parallel.pipeline=2", "parallel.virtual_pipeline=4"],
            "parallel.virtual_pipeline: times pipeline does not divide model.architecture.num_layers",
        ),
        (
            [
                "parallel.tensor=2",
                "model.architecture.num_attention_heads=6",
                "model.architecture.num_key_value_heads=3",
            ],
            "parallel.tensor: neither divides model.architecture.num_key_value_heads nor is a multiple",
        ),
        (["parallel.tensor=3"], "parallel.tensor: does not divide model.architecture.num_attention_heads"),
        (["parallel.expert=3"], "parallel.expert: does not divide model.architecture.num_experts"),
        (["parallel.expert_tensor=3"], "parallel.expert_tensor: does not divide model.architecture.moe_intermediate"),
        (["trainer.microbatch_tokens=120", "parallel.context=64"], "parallel.context: a microbatch does not hold"),
        (["parallel.data=65"], "parallel.data: an optimizer step has fewer sequences"),
        (["parallel.data=65", "rl.minibatches=3", "sft.steps=0"], "parallel.data: an optimizer step has fewer"),
        (["trainer.microbatch_tokens=72"], "trainer.microbatch_tokens: does not hold one response"),
        (["rollout.max_new_tokens=512"], "rollout.max_new_tokens: the model has no room"),
        (["rl.minibatches=5"], "rl.minibatches: does not divide rl.prompts_per_step"),
        (["sft.num_examples=63"], "sft.batch_size: more than there are demonstrations"),
        (["task.min_terms=8"], "task.min_terms: above task.max_terms"),
        (["task.min_digits=2"], "task.min_digits: above task.max_digits"),
        (["task.max_terms=8"], "task.worked_probability: a number of terms has no probability"),
        (["rollout.temperature=0"], "rollout.temperature: greedy samples cannot be trained on"),
        (
            ["rollout=sglang", "rollout.placement=colocated", "rollout.memory_share=0.4", "buffer.max_staleness=1"],
            "buffer.max_staleness: colocated servers sleep",
        ),
        (["rollout=sglang", "rollout.placement=colocated"], "rollout.memory_share: what a colocated server may take"),
        (
            ["rollout=sglang", "rollout.placement=colocated", "rollout.memory_share=0.4", "rollout.servers=2"],
            "rollout.servers: more devices than the trainer has",
        ),
        (["rollout=sglang", "rollout.tensor=4", "rollout.expert=3"], "rollout.expert: no divisor of the ranks"),
        (
            ["rollout=sglang", "rollout.tensor=32", "rollout.expert=32"],
            "rollout.expert: does not divide the experts of the model",
        ),
        (
            ["rollout=sglang", "rollout.tensor=1030", "rollout.expert=2"],
            "rollout.expert: an expert cannot be cut evenly",
        ),
        (["rollout=sglang", "rollout.dtype=float8"], "rollout.dtype: 8 bits are emulated in the embedded engine"),
    ],
)
def test_an_impossible_combination_is_refused(overrides: list[str], part: str):
    assert part in error(*overrides)


def jsonl(tmp_path: Path) -> list[str]:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n')
    return ["task=jsonl", f"task.path='{path}'", "task.reward=rewards:score"]


def test_a_jsonl_task_runs_with_a_file_that_is_there(tmp_path: Path):
    assert load_config(jsonl(tmp_path), command="train").task.name == "jsonl"


def test_a_jsonl_file_that_is_not_there_is_refused(tmp_path: Path):
    overrides = ["task=jsonl", f"task.path='{tmp_path}/nope.jsonl'", "task.reward=rewards:score"]
    assert error(*overrides) == "task.path: no such file"


def test_fractions_that_leave_nothing_to_train_on_are_refused(tmp_path: Path):
    assert "nothing is left" in error(*jsonl(tmp_path), "task.heldout_fraction=0.5", "task.dev_fraction=0.5")


@pytest.mark.parametrize("key", ["task.dev_fraction", "task.heldout_fraction"])
def test_a_split_that_is_evaluated_cannot_be_empty(key: str, tmp_path: Path):
    assert f"{key}: wrong value" in error(*jsonl(tmp_path), f"{key}=0.0")


def test_a_cold_start_without_demonstrations_is_refused(tmp_path: Path):
    assert "sft.steps: a cold start needs demonstrations" in error(*jsonl(tmp_path), "task.response_key=null")


def test_sft_with_nothing_to_do_is_refused():
    assert "sft.steps: nothing to do" in error("sft.steps=0", command="sft")


@pytest.mark.parametrize("command", ["rollout", "eval"])
def test_reading_commands_need_a_trained_model_and_one_process(command: str, tmp_path: Path):
    assert f"model.path: moerl {command} needs trained weights" in error("recipe=tiny", command=command)
    write_hf_config(tmp_path)
    model = ["model=pretrained", f"model.path='{tmp_path}'"]
    assert f"parallel: moerl {command} runs in one process" in error(*model, "parallel=tp2", command=command)
    assert load_config([*model, "rollout.temperature=0"], command=command).model.path == tmp_path


def test_a_model_path_without_a_model_is_refused(tmp_path: Path):
    model = ["recipe=laptop", "model=pretrained", f"model.path='{tmp_path}'"]
    assert "not a Hugging Face model directory" in error(*model)
    (tmp_path / "config.json").write_text("{")
    assert error(*model) == f"model.path: {tmp_path}/config.json cannot be read"
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert "config.json: model config: unknown mixture-of-experts architecture" in error(*model)
    write_hf_config(tmp_path, max_position_embeddings=None)
    assert "config.json: max_position_embeddings" in error(*model)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("parallel.tensor=8", "parallel.tensor: does not divide num_attention_heads of "),
        ("parallel.tensor=3", "parallel.tensor: does not divide num_attention_heads of "),
        ("parallel.expert=3", "parallel.expert: does not divide num_experts of "),
        ("rollout.max_new_tokens=128", "rollout.max_new_tokens: the model has no room"),
    ],
)
@pytest.mark.parametrize("experts_key", ["num_experts", "num_local_experts"])
def test_a_model_in_a_directory_must_fit_too(override: str, part: str, experts_key: str, tmp_path: Path):
    write_hf_config(tmp_path, **{"num_experts": None, experts_key: 8})
    assert part in error("recipe=laptop", "model=pretrained", f"model.path='{tmp_path}'", override)


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        (["parallel=single"], 1),
        (["parallel=ep2"], 2),
        (["parallel=tp2"], 2),
        (["parallel.tensor=2", "parallel.expert=2"], 2),
        (["parallel.expert=4"], 4),
        (["parallel.tensor=2", "parallel.expert=4"], 4),
        (["parallel.expert_tensor=2"], 2),
        (["parallel.context=2", "parallel.expert=2"], 2),
        (["parallel.tensor=2", "parallel.expert_tensor=4", "parallel.expert=2"], 8),
        (["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.data=3"], 6),
        (["parallel.tensor=2", "parallel.pipeline=2", "parallel.expert=4"], 8),
    ],
)
def test_the_world_size_follows_from_the_parallel_sizes(overrides: list[str], world_size: int):
    assert load_config(overrides, command="train").parallel.world_size == world_size


def test_a_refused_layout_comes_with_the_nearest_that_work():
    with pytest.raises(ConfigError) as caught:
        load_config(["parallel.tensor=8", "parallel.expert=2"], command="train")
    near = caught.value.remedy.removeprefix("the nearest that work: ").split("; or ")
    assert near[0] == "parallel.tensor=4 parallel.expert=2 parallel.data=2 (8 processes)"
    for line in near:
        overrides, _, processes = line.partition(" (")
        pasted = ["parallel.tensor=8", "parallel.expert=2", *overrides.split()]
        assert load_config(pasted, command="train").parallel.world_size == int(processes.split()[0])


def test_every_rule_that_a_layout_breaks_is_named():
    with pytest.raises(ConfigError, match=r"also wrong: parallel.expert, parallel.pipeline\)"):
        load_config(["parallel.tensor=8", "parallel.expert=3", "parallel.pipeline=5"], command="train")


def test_sampling_without_masks_is_allowed_and_noted():
    config = load_config(["keep_sampling_mask.enabled=false"], command="train")
    assert [note.split(" ")[0] for note in config_notes(config)] == ["keep_sampling_mask.enabled"]


def test_the_top_k_that_comes_with_top_p_is_noted():
    config = load_config(["rollout.top_k=null"], command="train")
    assert any("top_k = 4096 is in force" in note for note in config_notes(config))
    assert config_notes(load_config(["rollout.top_k=null", "rollout.top_p=1.0"], command="train")) == []


def test_the_reference_follows_the_policys_mode_unless_it_has_its_own():
    for mode in ("off", "rollout", "trainer"):
        assert load_config([f"keep_routing.mode={mode}"], command="train").keep_routing.reference_mode == mode
    config = load_config(["keep_routing.mode=trainer", "keep_routing.reference=off"], command="train")
    assert config.keep_routing.reference_mode == "off"


@pytest.mark.parametrize("mode", ["off", "rollout"])
def test_a_reference_cannot_take_a_routing_that_the_policy_does_not_record(mode: str):
    found = error(f"keep_routing.mode={mode}", "keep_routing.reference=trainer")
    assert found == "keep_routing.reference: the trainer's routing is not recorded"


def test_several_senders_need_servers_or_a_disk_and_as_many_ranks():
    found = error("weights.senders=2", "parallel.expert=2")
    assert found == "weights.senders: the embedded engine takes weights from one rank"
    load_config(["weights.senders=2", "rollout=sglang", "parallel.expert=2"], command="train")
    found = error("weights.senders=3", "weights.transport=disk", "parallel.expert=2")
    assert found == "weights.senders: more than there are trainer ranks"
    config = load_config(["weights.senders=2", "weights.transport=disk", "parallel.expert=2"], command="train")
    assert config.weights.senders == 2


@pytest.mark.parametrize("override", ["rl.prompts_per_step=0", "buffer.max_staleness=-1", "buffer.window=0"])
def test_limits_of_the_queue_with_which_no_batch_is_ever_full_are_refused(override: str) -> None:
    assert error(override).startswith(override.partition("=")[0])


def test_sampling_ahead_needs_an_engine_beside_the_trainer_and_a_window_needs_sampling_ahead() -> None:
    assert error("buffer.max_staleness=1").startswith("buffer.max_staleness: the engine and the trainer take turns")
    assert error("buffer.window=2").startswith("buffer.window: nothing can pass a slow group")
    for engine in ("rollout.placement=process", "rollout=sglang"):
        config = load_config(["buffer.max_staleness=1", "buffer.window=5", engine], command="train")
        assert (config.buffer.max_staleness, config.buffer.window) == (1, 5)


def test_a_step_to_profile_that_no_run_reaches_is_refused():
    assert load_config(["recipe=tiny", "trainer.profile_steps=[1,3]"], command="train").trainer.profile_steps == [1, 3]
    assert error("recipe=tiny", "trainer.profile_steps=[1,4]") == "trainer.profile_steps: no such step"


def test_a_trainer_sleeps_only_while_servers_sample_on_its_devices():
    assert error("recipe=tiny", "trainer.sleep=true").startswith("trainer.sleep: no server samples on the trainer's")


def test_optimizer_state_in_host_memory_is_split_over_replicas():
    offload = "trainer.optimizer_offload=0.5"
    assert error("recipe=tiny", offload).startswith("trainer.optimizer_offload: every rank would keep the state")
    split = load_config(["recipe=tiny", offload, "trainer.distributed_optimizer=on"], command="train")
    assert split.trainer.optimizer_offload == 0.5
