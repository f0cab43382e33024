"""The one list of checks: each broken configuration is refused by every command that can know it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from asked_commands import ALL, Ask, Broken

from moerl.config.load import load_config, load_plan
from moerl.config.run_memory import Machine, checkpoint_bytes
from moerl.errors import ConfigError
from moerl.launch.checks import listed
from moerl.launch.checks.facts import DOORS, Facts
from moerl.launch.checks.inputs import Note
from moerl.launch.checks.listed import CHECKS
from moerl.launch.checks.room import look_at_devices, look_at_disk, look_at_hosts
from moerl.launch.doctor import machine
from moerl.rollout.sglang.patches import DEFAULT_RELEASE, STAMP, read_patches

ROOT = Path(__file__).parents[4]

FEW = (
    *("rl.prompts_per_step=4", "sft.num_examples=8", "sft.batch_size=4"),
    *("evaluation.dev_problems=2", "evaluation.heldout_problems=2"),
)
JSONL = ("recipe=tiny", *FEW, "task=jsonl", "task.path=sums.jsonl", "task.reward=my_rewards:good")
SET = ("recipe=tiny", *FEW, "sft.steps=0", "task=dataset", "task.path=rows.jsonl")
EXACT = ("task.rewards.right.kind=exact", "task.rewards.right.column=answer")
BIG = ("recipe=pretrained", "model.path=big", "task=chain_sum")
APART = (*BIG, "parallel.expert=8", "parallel.data=16", "rollout.tensor=2", "rollout.servers=4")
COLOCATED = (*BIG, "parallel.tensor=2", "parallel.expert=8", "rollout.placement=colocated", "rollout.tensor=2")
SMALL = (
    *("recipe=pretrained_small", "task=chain_sum_short", *FEW, "sft.steps=0"),
    *("rollout.max_new_tokens=16", "trainer.microbatch_tokens=256"),
)
DUMPS = ("recipe=tiny", "rollout=dumps")
ENV = "rollout.environment='{env}'"
SERVED = ("recipe=tiny", "rollout=sglang", ENV)


def stamp(folder: Path) -> Path:
    return next(folder.glob(f"env/lib/*/*/{STAMP}"))


def release(folder: Path) -> Path:
    return next(folder.glob("env/lib/*/*/sglang-*.dist-info"))


def made_for_gpus(folder: Path) -> None:
    (folder / "env" / "moerl-sglang.json").write_text(json.dumps({"sglang": DEFAULT_RELEASE, "device": "cuda"}))


def wide_server_file(folder: Path) -> None:
    file = folder / "server.json"
    file.write_text("{}")
    file.chmod(0o644)


BROKEN = {
    # Keys, layout, lengths: all four know.
    "a misspelt key": Broken(("recipe=tiny", "rl.stepps=3"), "rl.stepps: unknown key", ALL),
    "a wrong value": Broken(("recipe=tiny", "rl.group_size=1"), "rl.group_size: wrong value", ALL),
    "a rule between keys": Broken(("recipe=tiny", "rl.minibatches=3"), "rl.minibatches: does not divide", ALL),
    "a layout that the model cannot be cut into": Broken(
        ("recipe=tiny", "parallel.tensor=3"), "parallel.tensor: ", ALL
    ),
    "a response that is longer than the model": Broken(
        ("recipe=tiny", "rollout.max_new_tokens=5000", "trainer.microbatch_tokens=9000"), "no room for a prompt", ALL
    ),
    "no such model": Broken((*BIG, "model.path=nowhere"), "model.path: not a Hugging Face model directory", ALL),
    "an unknown family": Broken((*BIG, "model.path=dense"), "unknown mixture-of-experts architecture", ALL),
    # What a command needs.
    "a greedy sampler": Broken(("recipe=tiny", "rollout.temperature=0"), "rollout.temperature: greedy"),
    "a tracker that is not installed": Broken(
        ("recipe=tiny", "metrics.sinks=[jsonl,trackio]"), "metrics.sinks: trackio is not installed"
    ),
    "no such file of the task": Broken((*JSONL, "task.path=nowhere.jsonl"), "task.path: no such file"),
    "no such folder of a tokenizer": Broken(("recipe=tiny", "model.tokenizer=folder"), "folder: no tokenizer"),
    "no rewards": Broken(SET, "task.rewards: there is none"),
    # The model.
    "a model without weights": Broken((*SMALL, "model.path=empty"), "empty: no weights"),
    # Data.
    "a missing column": Broken((*SET, *EXACT, "task.prompt=question"), "'question' among them"),
    "a line that is no JSON": Broken((*JSONL, "task.path=broken.jsonl"), "task.path: bad line"),
    "too few problems": Broken((*JSONL, "rl.prompts_per_step=1000"), "rl.prompts_per_step: the task has fewer"),
    "no demonstrations": Broken((*JSONL, "task.response_key=nothing"), "rows have no demonstration"),
    "no row is left": Broken(
        (*SET, *EXACT, "task.filters=[{column: answer, equals: x}]"), "the task has fewer problems"
    ),
    "a data set of the hub without a network": Broken(
        (*SET, *EXACT, "task.path=null", "task.hub=owner/sums"), "task.hub: cannot read owner/sums"
    ),
    # Rewards.
    "no such reward module": Broken((*JSONL, "task.reward=nowhere:good"), "No module named 'nowhere'"),
    "no such reward function": Broken((*JSONL, "task.reward=my_rewards:nope"), "has no function 'nope'"),
    "a reward that raises": Broken((*JSONL, "task.reward=my_rewards:raises"), "KeyError: 'answre'"),
    "a reward that is no number": Broken((*JSONL, "task.reward=my_rewards:text"), "not a number: '1.0'"),
    "a column of a reward that no row has": Broken((*SET, *EXACT, "task.rewards.right.column=solution"), "'solution'"),
    "rows without a value in the column of a reward": Broken(
        (*SET, *EXACT, "task.path=half.jsonl"), "split have no value in column 'answer'"
    ),
    "a teacher that is not there": Broken(
        ("recipe=tiny", "scorers={teacher: {kind: model, path: nowhere}}"),
        "scorers.teacher.path: not a Hugging Face",
        ALL,
    ),
    "a server of a teacher that does not answer": Broken(
        ("recipe=tiny", "rollout.temperature=1.0", "scorers={teacher: {kind: server, url: 'http://127.0.0.1:1'}}"),
        "scorers.teacher: the server at http://127.0.0.1:1 does not score",
        ("train", "doctor"),
    ),
    # Dumps.
    "no such dumps": Broken((*DUMPS, "rollout.path=nowhere"), "DUMP: no rollouts", ("train", "doctor")),
    "dumps without groups": Broken((*DUMPS, "rollout.path=ungrouped.jsonl"), "rollouts without a group"),
    "dumps of another number of groups": Broken(
        (*DUMPS, "rollout.path=one_group.jsonl"), "rl.prompts_per_step: the dump has another number"
    ),
    "a choice of prompts, of dumps": Broken(
        (*DUMPS, "rollout.path=one_group.jsonl", "rl.skip_above=0.9"), "a run from dumps chooses no prompts", ALL
    ),
    # Servers.
    "no environment of servers": Broken(("recipe=tiny", "rollout=sglang"), "SGLang environment"),
    "an environment that was not finished": Broken(
        SERVED, "not there", spoil=lambda folder: (folder / "env" / "moerl-sglang.json").unlink()
    ),
    "an environment without patches": Broken(SERVED, "not patched", spoil=lambda folder: stamp(folder).unlink()),
    "patches of another version": Broken(
        SERVED, "other patches", spoil=lambda folder: stamp(folder).write_text('{"fingerprint": "f"}')
    ),
    "a release without patches": Broken(
        SERVED,
        r"0.5.99",
        spoil=lambda folder: release(folder).rename(release(folder).with_name("sglang-0.5.99.dist-info")),
    ),
    "an environment of GPUs on CPUs": Broken(SERVED, "made for GPUs", spoil=made_for_gpus),
    "an environment of CPUs on GPUs": Broken((*SERVED, "rollout.servers=1"), "made for CPUs", gpus=2),
    "a relative environment in a container": Broken(
        ("recipe=tiny", "rollout=sglang"),
        "servers run in a container",
        ("dry run",),
        site={"container": {"runtime": "apptainer", "image": "moerl.sif"}},
    ),
    "no such server file": Broken(
        ("recipe=tiny", "rollout=sglang_server", "rollout.server=nowhere.json"), "server file "
    ),
    "a server file that others may read": Broken(
        ("recipe=tiny", "rollout=sglang_server", "rollout.server=server.json"), "server.json", spoil=wide_server_file
    ),
    # Where what is fetched goes.
    "another cache of the hub on the nodes": Broken(
        (*SET, *EXACT, "task.path=null", "task.hub=owner/sums"),
        "HF_HOME: the job looks",
        ("dry run",),
        site={"environment": {"HF_HOME": "/shared/hf"}},
    ),
    # Devices and memory.
    "fewer GPUs than ranks": Broken(("recipe=tiny", "parallel.tensor=2"), "needs more GPUs than it gets", gpus=1),
    "fewer GPUs than ranks and servers": Broken(
        ("recipe=tiny", "rollout=sglang", "rollout.servers=2", ENV), "needs more GPUs than it gets", gpus=2
    ),
    "fewer GPUs in gres than ranks": Broken(
        ("recipe=tiny", "parallel.tensor=2"),
        "needs more GPUs than it gets",
        ("dry run",),
        site={"gres": "gpu:h100:1,nvme:1"},
    ),
    "shared prompts on a GPU": Broken(
        ("recipe=tiny", "trainer.share_prompts=true"), "cannot be shared on a GPU", gpus=1
    ),
    "an embedded engine that the GPU of a rank does not hold, too": Broken(
        ("recipe=laptop", "rollout.max_running=9000000"), "rollout: the embedded engine does not fit", ALL, gpus=1
    ),
    "a server that is larger than a node": Broken(
        (*APART, "rollout.tensor=16"), "rollout.tensor: more ranks of a server than GPUs of a node", ("plan",)
    ),
    "colocated servers that would be on two nodes": Broken(
        (*COLOCATED, "parallel.data=8", "rollout.memory_share=0.1", "rollout.tensor=3", "rollout.servers=5"),
        "rollout.servers: a server would be on two nodes",
        ("plan",),
    ),
    "experts that a server cannot share": Broken(
        (*APART, "rollout.expert=3"), "rollout.expert: no divisor of the ranks of a server", ALL, gpus=24
    ),
    "a rank that does not fit": Broken((*APART, "parallel.data=8"), "a rank of the trainer does not fit", ALL, gpus=16),
    "a colocated server and a rank that do not fit together": Broken(
        (*COLOCATED, "rollout.memory_share=0.4"),
        "rollout.memory_share: a server's share and the trainer's",
        ALL,
        gpus=8,
    ),
    "a share that does not hold the weights": Broken(
        (*APART, "rollout.memory_share=0.3"), "rollout.tensor: the weights of a server", ALL, gpus=24
    ),
    "a host that does not hold a checkpoint": Broken(APART, "memory of a host", ALL, gpus=24, host_gib=256),
    "a disk that does not hold the checkpoints": Broken(APART, "room on the disk", ("doctor",), gpus=24, disk_gib=512),
    "a pool that does not hold a response": Broken(
        (*APART, "rollout.max_pool_tokens=4096"), "rollout.max_pool_tokens: the pool", ALL, gpus=24
    ),
}


def test_there_are_thirty_configurations_and_more() -> None:
    assert len(BROKEN) >= 30


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_configuration_is_refused_by_each_command_that_can_know_it(name: str, ask: Ask, place: Path) -> None:
    broken = BROKEN[name]
    broken.spoil(place)
    for door in broken.knows:
        status, text = ask(door, broken)
        assert status in (1, 2), (door, text)
        assert broken.said in text, (door, text)
        assert "expected: " in text, (door, text)
        assert "remedy: " in text, (door, text)
        assert not (place / "run").exists(), door
    if "plan" not in broken.knows and "train" in broken.knows:
        status, text = ask("plan", broken)
        assert status == 0, text


GOOD = (Broken(JSONL, ""), Broken((*SET, *EXACT), ""), Broken(("recipe=tiny", "parallel.tensor=2"), "", gpus=2))


@pytest.mark.parametrize("good", GOOD, ids=["jsonl", "dataset", "two GPUs"])
def test_what_can_work_is_green_everywhere(good: Broken, ask: Ask) -> None:
    for door in ("doctor", "dry run", "plan"):
        status, text = ask(door, good)
        assert status == 0, (door, text)
    with pytest.raises(ModuleNotFoundError, match="orchestration"):  # the run would begin
        ask("train", good)


def test_a_disk_without_room_is_a_note_of_a_dry_run_and_no_job_is_submitted(ask: Ask) -> None:
    status, text = ask("dry run", Broken(JSONL, "", disk_gib=0))
    assert status == 0, text
    assert "note: room on the disk: 0.0 GiB free" in text
    config = load_config(JSONL, command="train")
    needed = 3 * checkpoint_bytes(config)
    full, tight, wide = (Facts("dry run", config, fetches=True, disk_bytes=int(s * needed)) for s in (0.9, 1.1, 1.6))
    with pytest.raises(ConfigError, match="run_dir: checkpoints do not fit the disk"):
        look_at_disk(full)
    assert isinstance(look_at_disk(tight), Note)
    assert isinstance(look_at_disk(wide), str)


def test_a_job_of_a_large_model_that_may_have_no_gpus_gets_a_note(files: Path) -> None:
    config = load_plan([*APART, f"model.path='{files / 'big'}'"])
    none, unknown, all_of_them = (look_at_devices(Facts("dry run", config, num_gpus=n)) for n in (0, None, 24))
    assert isinstance(none, Note)
    assert "16 ranks of the trainer, 8 devices of servers, on CPUs" in none.seen
    assert isinstance(unknown, Note)
    assert all_of_them == "24 GPUs for 16 ranks of the trainer, 8 devices of servers"
    small = load_plan(["recipe=tiny"])
    assert isinstance(look_at_devices(Facts("dry run", small, num_gpus=0)), str)
    assert isinstance(look_at_devices(Facts("train", config)), str), "the run itself will see"


def test_memory_of_nodes_that_is_not_known_is_a_note(files: Path) -> None:
    large = load_plan([*APART, f"model.path='{files / 'big'}'"])
    found = look_at_hosts(Facts("dry run", large, Machine(80 * 2**30, 8, 3)))
    assert isinstance(found, Note)
    assert "its memory is not known" in found.seen
    assert isinstance(look_at_hosts(Facts("dry run", large, Machine(80 * 2**30, 8, 3, 4096 * 2**30))), str)
    assert isinstance(look_at_hosts(Facts("dry run", load_plan(["recipe=tiny"]), Machine(None, 0, 1))), str)


def test_doctor_counts_the_gpus_that_a_run_would_see(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    status, text = ask("doctor", Broken(("recipe=tiny", "parallel.tensor=2"), "", gpus=2))
    assert status == 1
    assert "the run needs more GPUs than it gets" in text


def test_what_a_login_node_cannot_see_is_said_by_name(ask: Ask) -> None:
    container: dict[str, object] = {"container": {"runtime": "apptainer", "image": "moerl.sif"}}
    keys = (*JSONL, "rollout=sglang", "rollout.environment=/opt/moerl/env")
    for site, where in (({}, "on the nodes alone"), (container, "in the container moerl.sif")):
        status, text = ask("dry run", Broken(keys, "", site=site))
        assert status == 0, text
        assert f"note: SGLang environment: /opt/moerl/env: cannot be seen from here; it has to be {where}" in text
    assert "note: rewards: not tried from here: my_rewards:good runs in the container moerl.sif" in text
    assert "rollout.environment=/opt/moerl/env" in text
    judge = ("task.rewards.j.kind=judge", "task.rewards.j.url=http://10.0.0.1/v1", "task.rewards.j.model=m")
    more = ("task.rewards.j.question='{prompt}'", "task.rewards.j.pattern='(1)'")
    status, text = ask("dry run", Broken((*SET, *EXACT, *judge, *more), ""))
    assert status == 0, text
    assert "not tried from here: http://10.0.0.1/v1 is asked from the node" in text
    teacher = ("rollout.temperature=1.0", "scorers={teacher: {kind: server, url: 'http://10.0.0.2:30000'}}")
    status, text = ask("dry run", Broken(("recipe=tiny", *teacher), ""))
    assert status == 0, text
    assert "note: scorers: not tried from here: http://10.0.0.2:30000 is asked from the node" in text


def test_a_job_gets_the_absolute_path_of_its_environment(
    ask: Ask, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moerl.launch.checks.inputs.verify_installation", lambda site: read_patches())
    status, text = ask("dry run", Broken(("recipe=tiny", "rollout=sglang", "rollout.environment=env"), ""))
    assert status == 0, text
    assert f"rollout.environment='\"'\"'{place}/env'\"'\"''" in text


def test_a_checkpoint_that_takes_longer_than_the_grace_time_is_a_note_with_what_to_set(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moerl.launch.slurm.facts.disk_rate", lambda _: 1e3)
    monkeypatch.setattr(machine, "machine_checks", lambda *_, **__: ([], 1e3))
    status, text = ask("dry run", Broken(JSONL, ""))
    assert status == 0
    found = re.search(
        r"note: time of a checkpoint: .* at 0 MB/s of one writer: ([\d,]+) s; expected: less than the 240 s", text
    )
    assert found is not None, text
    assert f"--signal-seconds {round(int(found[1].replace(',', '')) / 0.8)}"[:20] in text
    status, text = ask("doctor", Broken((*JSONL, "checkpoint.grace_seconds=30"), ""))
    assert (status, "yellow  run | time of a checkpoint" in text) == (0, True)
    assert "remedy: set checkpoint.grace_seconds=" in text


def test_doctor_shows_all_that_fails_and_what_depends_on_it_once(ask: Ask) -> None:
    both = Broken((*JSONL, "task.path=nowhere.jsonl", "parallel.tensor=2"), "", gpus=1)
    status, text = ask("doctor", both)
    assert status == 1
    assert re.findall(r"^red +run \| ([\w ]+):", text, re.MULTILINE) == ["command", "devices"]


def test_a_module_of_moerl_that_is_not_there_is_no_package_that_a_user_lacks(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(facts: Facts) -> str:
        raise ModuleNotFoundError("No module named 'x'", name=missed)

    monkeypatch.setattr(listed, "CHECKS", (replace(CHECKS[0], look=look), CHECKS[1]))
    missed = "einops"
    status, text = ask("doctor", Broken(JSONL, ""))
    assert (status, "red     run | keys: a package is not installed: no module einops" in text) == (1, True)
    assert "green   run | layout" in text
    missed = "moerl.nowhere"
    with pytest.raises(ModuleNotFoundError):
        ask("doctor", Broken(JSONL, ""))


def test_every_check_has_a_command_that_takes_it_and_follows_what_it_depends_on() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for check in CHECKS:
        assert check.doors
        assert not check.after or names.index(check.after) < names.index(check.name)


def test_the_table_of_the_documentation_is_the_list() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    cells = [[cell.strip() for cell in line.split(" | ")] for line in page.splitlines() if line.count(" | ") == 6]
    listed = [[each.name, *("yes" if door in each.doors else "-" for door in DOORS)] for each in CHECKS]
    assert [[name.removeprefix("| "), *doors] for name, _, *doors, _ in cells[2:]] == listed
