"""Files, output and refusals of `moerl launch slurm`; that SLURM takes the script is tested in `tests/slurm/`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from factories import write_hf_model
from small_hub import Cache, hub

from moerl.cli import main
from moerl.errors import ConfigError
from moerl.launch.slurm.facts import memory_bytes
from moerl.launch.slurm.script import JobSettings, limit_seconds, render
from moerl.launch.slurm.site import Container, Site


def job(tmp_path: Path, **changes: object) -> JobSettings:
    values = {"name": "run", "nodes": 1, "time": "1:00:00", "signal_seconds": 300, "max_requeues": 3}
    return JobSettings(**{**values, "run_dir": tmp_path / "run", "working_dir": tmp_path, **changes})  # type: ignore[arg-type]


def launch(tmp_path: Path, *arguments: str) -> int:
    return main(["launch", "slurm", "recipe=tiny", f"run_dir='{tmp_path / 'run'}'", "--time", "30", *arguments])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("30:10", 1810), ("1:30:00", 5400), ("2-3", 183600), ("1-0:30", 88200), ("1-00:00:01", 86401)],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert limit_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-1", "1-"])
def test_what_is_no_time_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a time limit"):
        limit_seconds(text)


@pytest.mark.parametrize("changes", [{"time": "9"}, {"signal_seconds": 10}, {"run_dir": Path("/a b")}])
def test_a_job_that_could_not_stop_in_time_or_whose_paths_sbatch_cannot_hold_is_refused(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    job(tmp_path).check()
    with pytest.raises(ConfigError):
        job(tmp_path, **changes).check()


def test_what_a_site_asks_for_is_in_the_script(tmp_path: Path) -> None:
    site = Site(
        partition="gpu",
        account="lab",
        gpus_per_node=8,
        cpus_per_node=64,
        memory="500G",
        modules=["cuda/13.0"],
        environment={"NAME": "it's; a value"},
        sbatch=["--mail-type=END", "--comment=two words"],
    )
    lines = render(job(tmp_path), site, ["recipe=tiny"]).splitlines()
    for option in (
        "partition=gpu",
        "account=lab",
        "gres=gpu:8",
        "cpus-per-task=64",
        "mem=500G",
        "mail-type=END",
        'comment="two words"',
    ):
        assert f"#SBATCH --{option}" in lines
    assert "#SBATCH --exclusive" not in lines
    assert "module load cuda/13.0" in lines
    [export] = [line for line in lines if line.startswith("export NAME=")]
    assert shlex.split(export) == ["export", "NAME=it's; a value"]


@pytest.mark.parametrize(
    ("runtime", "options", "start"),
    [
        ("apptainer", "--bind /data --bind /home:/home --bind {} --ipc moerl.sif env --chdir={})\n", ""),
        ("enroot", "--mount /data --mount /home:/home --mount {} --ipc moerl.sif env --chdir={})\n", ""),
        ("pyxis", "--container-workdir={1} --ipc)\n", '--nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" '),
    ],
)
def test_commands_of_moerl_run_in_the_container_and_those_of_slurm_do_not(
    tmp_path: Path, runtime: str, options: str, start: str
) -> None:
    container = Container(
        runtime=runtime,  # type: ignore[arg-type]
        image="moerl.sif",
        mounts=["/data", "/home:/home"],
        arguments=["--ipc"],
    )
    script = render(job(tmp_path), Site(container=container), ["recipe=tiny"])
    assert options.format(tmp_path, tmp_path) in script
    assert f'train=("${{inside[@]}}" {start}python -m moerl train "${{keys[@]}}" resume=auto)\n' in script
    assert script.count('"${inside[@]}"') == 3, "doctor, train and attempts"


def test_a_dry_run_shows_script_configuration_nodes_and_plans_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path, "--dry-run") == 0
    shown = capsys.readouterr().out
    for part in (
        *("#SBATCH --signal=B:USR1@300", "checkpoint.grace_seconds=240", "resume=auto", "prompts_per_step: 4"),
        *("node 1: the controller, trainer rank 0, the embedded engine", "heaviest rank", "senders", "step s"),
    ):
        assert part in shown
    assert list(tmp_path.iterdir()) == []


def test_what_is_to_be_known_of_the_runs_of_a_sweep_is_said_once_with_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-m", "recipe=tiny", f"sweep.dir={tmp_path / 'sweep'}", "rollout.top_p=0.9", "rollout.top_k=null,20")
    assert main(["launch", "slurm", *words, "keep_sampling_mask.enabled=false", "--time", "30", "--dry-run"]) == 0
    of_all, of_one = (line for line in capsys.readouterr().out.splitlines() if line.startswith("note: "))
    if "top_k" in of_all:
        of_all, of_one = of_one, of_all
    assert of_all.endswith("good for a comparison only")
    assert of_one.startswith("note: rollout.top_k is null")
    assert of_one.endswith("null)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "2"), "--nodes: without Ray all ranks and servers of a run are on one machine"),
        (("--nodes", "0"), "a number is too small"),
        (("resume=runs/a",), "resume: a job goes on by itself"),
        (("checkpoint.grace_seconds=250",), "checkpoint.grace_seconds: the job would reach its time limit first"),
        (("--name", "a b"), "--name: not a name of a job"),
        (("rl.step=3",), "rl.step: unknown key"),
    ],
)
def test_what_cannot_be_a_job_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert launch(tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_needs_more_gpus_than_the_site_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.yaml").write_text("gpus_per_node: 1\n")
    assert launch(tmp_path, "--site", str(tmp_path / "site.yaml"), "parallel.expert=2", "--dry-run") == 2
    assert "seen: 1 GPUs for 2 ranks of the trainer, 0 devices of servers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("200G", 200 * 2**30), ("512", 512 * 2**20), ("1500M", 1500 * 2**20), ("2T", 2 * 2**40), ("64GB", 64 * 2**30)],
)
def test_memory_of_a_node_is_read_as_slurm_reads_it(text: str, size: int) -> None:
    assert memory_bytes(text) == size


def test_all_memory_of_a_node_is_no_number_of_bytes_and_what_is_no_size_is_refused() -> None:
    assert memory_bytes("0") is None
    with pytest.raises(ConfigError, match="memory of the site file: no size; seen: much"):
        memory_bytes("much")


def test_a_run_directory_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    words = ["recipe=tiny", f"run_dir='{tmp_path / 'file' / 'run'}'", "--time", "30", "--dry-run"]
    assert main(["launch", "slurm", *words]) == 2
    assert "run_dir: cannot be written; seen: " in capsys.readouterr().err


def test_without_slurm_on_the_machine_the_command_says_where_to_start_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch(tmp_path) == 2
    assert "launch slurm: SLURM is not on this machine; seen: no sbatch" in capsys.readouterr().err


def test_a_dry_run_fetches_no_weights_of_a_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_hf_model(folder, max_position_embeddings=512)
    models = {"owner/moe": {"main": {file.name: file.read_bytes() for file in folder.iterdir()}}}
    keys = ["model=pretrained", "model.path=owner/moe", "sft.steps=0"]
    with hub(models, kind="models") as (address, _):
        cache = Cache(monkeypatch)
        cache.use(tmp_path / "home", address)
        assert launch(tmp_path, *keys, "--dry-run") == 0
        assert cache.files == {"config.json", "tokenizer.json"}
        # Without it the weights come before the job is submitted.
        monkeypatch.setenv("PATH", str(tmp_path))
        assert launch(tmp_path, *keys) == 2
        assert cache.files == {"config.json", "tokenizer.json", "model.safetensors"}
    assert "model owner/moe of the hub, commit " in capsys.readouterr().err


def test_workers_of_ray_start_when_the_head_is_part_of_its_cluster(tmp_path: Path) -> None:
    script = render(JobSettings("run", 2, "10", 60, 0, tmp_path, tmp_path), Site(), ["recipe=tiny"])
    order = [script.index(part) for part in ("--head ", "if come 1 &&", '--address="$address"', 'come "$num_nodes"')]
    assert order == sorted(order)
