"""The command line: help, errors, and what it hands over to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from factories import write_hf_config, write_hf_model
from named_things import DIRECTORY_COMMANDS
from waiting import run_within

from moerl import cli
from moerl.config.command_texts import TEXTS
from moerl.config.compose import split_sweep
from moerl.config.load import load_config, load_plan, resolve_auto
from moerl.config.schema import RunConfig
from moerl.errors import MoerlError
from moerl.launch.arguments import TOLERANCE_NATS, verify_parser
from moerl.launch.sweeps.command import read_options

ROOT = Path(__file__).parents[2]
COMMANDS = ["train", "sft", "rollout", "eval"]
ALL_COMMANDS = [*COMMANDS, "plan memory", "plan weights", "plan run"]


def run_python(code: str, *arguments: str, cwd: Path, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return run_within([sys.executable, "-c", code, *arguments], 120, cwd=cwd, env=environment)


MAIN_WITHOUT_TORCH = """
import sys
from moerl.cli import main
status = main(sys.argv[1:])
heavy = {"torch", "ray", "megatron", "transformers", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
sys.exit(status)
"""


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {command}" in text for command in [*ALL_COMMANDS, *DIRECTORY_COMMANDS])
    assert cli.main([]) == 2


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_the_help_of_a_command_has_examples_options_groups_and_keys(command: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    for part in (f"usage: moerl {command}", "examples:", "--config-dir DIR", "recipe=laptop (default)"):
        assert part in text
    assert "model.path=" in text


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_all_keys_are_in_the_help_of_a_command_on_demand(command: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([*command.split(), "--help", "--all"]) == 0
    text = capsys.readouterr().out
    assert "rl.group_size=8" in text
    assert "optimizer.beta1=" in text
    assert "resume=RUN_DIR" in text


def test_the_help_of_train_is_a_screen_and_says_where_the_rest_is(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["train", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert lines[-1] == "  `moerl train --help --all` lists every key."
    listed = [line.split("=")[0].strip() for line in lines[lines.index("") :] if line.startswith("    ")]
    assert {*cli.COMMANDS["train"].first_keys, "recipe"} <= set(listed)


@pytest.mark.parametrize("option", ["--cfg", "-c"])
def test_the_option_of_hydra_that_shows_a_configuration_is_answered_with_ours(
    option: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["train", "recipe=tiny", option, "job"]) == 2
    assert "remedy: `--show-config` prints the resolved configuration" in capsys.readouterr().err


def test_an_option_of_another_trainer_is_answered_with_our_key(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["train", "--rollout-batch-size", "8"]) == 2
    assert "an option of slime; here it is rl.prompts_per_step=VALUE" in capsys.readouterr().err
    assert cli.main(["train", "--no-such-option", "8"]) == 2
    assert "keys have no dashes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "there", "not_there"),
    [
        ("eval", ["evaluation.heldout_problems=", "rollout.max_new_tokens=", "task.path="], ["optimizer.", "sft."]),
        ("rollout", ["rl.group_size=", "rollout.top_p=", "seed="], ["optimizer.", "sft.", "algorithm."]),
        ("sft", ["sft.optimizer.lr=", "checkpoint.every=", "resume=RUN_DIR"], ["algorithm.", "rl.", "weights."]),
        ("plan memory", ["trainer.recompute=", "parallel.expert="], ["optimizer.", "task.", "evaluation."]),
        ("plan run", ["buffer.max_staleness=", "rollout.max_running="], ["optimizer.", "task.", "sft."]),
        ("plan weights", ["weights.senders=", "rollout.servers="], ["optimizer.", "task.", "sft."]),
    ],
)
def test_the_help_of_a_command_lists_the_keys_that_matter_for_it(
    command: str, there: list[str], not_there: list[str], capsys: pytest.CaptureFixture[str]
):
    assert cli.main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n    {key}" in text for key in there if not key.startswith("resume"))
    assert ("resume=RUN_DIR" in text) == (command == "sft")
    assert not any(f"\n    {key}" in text for key in not_there)
    assert f"`moerl {command} --help --all` lists every key" in text
    if command == "eval":
        assert len(text.splitlines()) < 85


@pytest.mark.parametrize(
    ("family", "members"),
    [("plan", ["plan memory", "plan weights", "plan run"]), ("sglang", ["sglang install", "sglang check"])],
)
def test_a_family_of_commands_lists_its_members(family: str, members: list[str], capsys: pytest.CaptureFixture[str]):
    for words, status in (([family], 2), ([family, "--help"], 0), ([family, "-h"], 0)):
        assert cli.main(words) == status
        text = capsys.readouterr().out
        assert text.startswith(f"usage: moerl {family} COMMAND")
        assert all(f"  moerl {member} " in text for member in members)
        assert "moerl train" not in text


@pytest.mark.parametrize("words", [["plan", "memry"], ["sglang", "instal"]])
def test_an_unknown_member_of_a_family_names_the_members(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: command line: unknown command; seen: {' '.join(words)}; expected: {words[0]} ")
    assert f"did you mean `moerl {words[0]} " in error
    assert f"see `moerl {words[0]} --help`" in error


def test_every_example_of_the_help_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_hf_config(tmp_path, max_position_embeddings=40960)
    (tmp_path / "my.jsonl").write_text("{}\n")
    for name, command in cli.COMMANDS.items():
        for line in command.examples:
            program, words = line.split(maxsplit=1)
            assert program == "moerl"
            assert words.startswith(f"{name} ")
            overrides = words.removeprefix(f"{name} ").replace("DIR", ".").split(" --")[0].split()
            if overrides[0] == "-m":
                common, swept = split_sweep(read_options(overrides[1:]).overrides)
                overrides = [*common, *(f"{key}={values[0]}" for key, values in swept.items())]
            overrides, _ = resolve_auto(overrides, command=name)
            if not overrides[0].startswith("resume="):
                load_plan(overrides) if name in cli.PLANS else load_config(overrides, command=name)


def test_the_help_of_verify_says_what_the_tolerance_means(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["verify", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: moerl verify DUMP --model HF_DIR")
    assert "largest difference of two log-probs of one token, 0.0001 if not said" in text
    for line in TEXTS["verify"].examples:
        options = verify_parser().parse_args(line.removeprefix("moerl verify ").split())
        assert options.tolerance == TOLERANCE_NATS


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["trian"], "unknown command; seen: trian"),
        (["plan", "memory", "--gpu-memory-gib=0"], "--gpu-memory-gib: invalid positive value: '0'"),
        (["plan", "weights", "--engine-gb-per-second=0"], "--engine-gb-per-second: invalid positive value: '0'"),
        (["verify", "dump.parquet"], "the following arguments are required: --model"),
        (["verify", "dump.parquet", "--model=m", "--tolerance=nan"], "--tolerance: invalid not_negative value: 'nan'"),
        (["train", "--fast"], "unrecognized arguments: --fast"),
        (["train", "seed=x"], "seed: wrong value"),
        (["eval", "recipe=tiny"], "model.path: moerl eval needs trained weights"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_one_line_and_status_2(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert part in error
    assert error.count("\n") == 1


def test_traceback_raises_the_error_itself():
    with pytest.raises(MoerlError):
        cli.main(["train", "seed=x", "--traceback"])


def test_a_server_file_is_looked_at_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], handed_over: list[object]
):
    server, run = f"rollout.server='{tmp_path / 'server.json'}'", f"run_dir='{tmp_path / 'run'}'"
    assert cli.main(["train", "recipe=tiny", "rollout=sglang_server", server, run]) == 1
    assert "moerl serve" in capsys.readouterr().err
    assert (handed_over, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("command", ["train", "sft"])
def test_the_servers_environment_is_looked_at_before_anything_starts(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], handed_over: list[object]
):
    environment, run = f"rollout.environment='{tmp_path / 'env'}'", f"run_dir='{tmp_path / 'run'}'"
    assert cli.main([command, "recipe=tiny", "rollout=sglang", environment, run]) == 1
    assert "moerl sglang install" in capsys.readouterr().err
    assert (handed_over, list(tmp_path.iterdir())) == ([], [])


def test_show_config_prints_the_resolved_configuration(capsys: pytest.CaptureFixture[str], handed_over: list[object]):
    assert cli.main(["train", "recipe=tiny", "--show-config", "seed=5"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert (values["recipe"], values["seed"], Path(values["run_dir"]).name[:11]) == ("tiny", 5, "tiny-seed5-")
    assert handed_over == []


def test_train_and_sft_are_handed_over_with_their_configuration(
    tmp_path: Path, handed_over: list[tuple[str, RunConfig, bool | None]]
):
    for command in ("train", "sft"):
        assert cli.main([command, "recipe=tiny", f"run_dir='{tmp_path}'"]) == 0
    assert [(name, config.recipe, resume) for name, config, resume in handed_over] == [
        ("train", "tiny", False),
        ("sft", "tiny", False),
    ]


def test_rollout_and_eval_are_handed_over(tmp_path: Path, handed_over: list[tuple[str, RunConfig, bool | None]]):
    write_hf_model(tmp_path)
    for command in ("rollout", "eval"):
        arguments = [command, "model=pretrained", f"model.path='{tmp_path}'", f"run_dir='{tmp_path}/run'"]
        assert cli.main(arguments) == 0
    assert [name for name, _, _ in handed_over] == ["rollout", "eval"]


def test_resume_is_handed_over_as_such(tmp_path: Path, handed_over: list[tuple[str, RunConfig, bool | None]]):
    from moerl.config.load import dump_config

    (tmp_path / "config.yaml").write_text(dump_config(load_config(["recipe=tiny"], command="train")))
    assert cli.main(["train", f"resume={tmp_path}"]) == 0
    assert handed_over[0][1].run_dir == tmp_path
    assert handed_over[0][2] is True


def test_a_run_dir_that_holds_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], handed_over: list[object]
):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    assert cli.main(["train", "recipe=tiny", f"run_dir='{tmp_path}'"]) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert handed_over == []


def test_notes_about_the_configuration_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], handed_over: list[object]
):
    assert cli.main(["train", f"run_dir='{tmp_path}'", "keep_sampling_mask.enabled=false"]) == 0
    assert capsys.readouterr().err.startswith("note: keep_sampling_mask.enabled is false")
    assert len(handed_over) == 1


def test_a_plan_starts_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handed_over: list[object]
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "memory", "recipe=tiny", "parallel.tensor=2"]) == 0
    assert cli.main(["plan", "memory", "recipe=tiny", "parallel.tensor=2", "--gpu-memory-gib", "0.001"]) == 1
    assert cli.main(["plan", "weights", "recipe=tiny", "parallel.tensor=2", "--engine-gb-per-second", "5"]) == 0
    assert (handed_over, list(tmp_path.iterdir())) == ([], [])


def test_a_thread_that_ends_by_exit_is_no_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert cli.main(["--version"]) == 0
    for end in (sys.exit, lambda: print(1 / 0)):
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
    error = capsys.readouterr().err
    assert "SystemExit" not in error
    assert "ZeroDivisionError" in error


def test_several_ranks_have_one_controller_in_this_process(
    tmp_path: Path, handed_over: list[tuple[str, RunConfig, bool]]
):
    layout = ["parallel.tensor=2", "parallel.expert=2", "parallel.pipeline=2", "parallel.virtual_pipeline=2"]
    assert cli.main(["train", "recipe=tiny", *layout, f"run_dir='{tmp_path}'"]) == 0
    [(_, config, _)] = handed_over
    assert config.parallel.world_size == 4


def test_another_launcher_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], handed_over: list[object]
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(["train", "recipe=tiny", "parallel=ep2", f"run_dir='{tmp_path}'"]) == 2
    assert "WORLD_SIZE: another launcher started this process; seen: 4" in capsys.readouterr().err
    assert handed_over == []


def test_configs_are_found_inside_of_an_installed_package(tmp_path: Path):
    package = tmp_path / "site" / "moerl"
    shutil.copytree(ROOT / "moerl", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", package / "configs")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = run_python(
        MAIN_WITHOUT_TORCH, "train", "recipe=tiny", "--show-config", cwd=elsewhere, path=tmp_path / "site"
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["recipe"] == "tiny"


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m moerl train --help | head -1; echo ${{PIPESTATUS[0]}}"
    done = run_within(["bash", "-c", command], 60)
    assert done.stderr == ""
    assert done.stdout.splitlines()[0].startswith("usage: moerl train")


def test_watching_a_run_and_asking_a_server_need_no_torch(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("{}")
    done = run_python(MAIN_WITHOUT_TORCH, "watch", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no step is done yet" in done.stdout
    done = run_python(MAIN_WITHOUT_TORCH, "conformance", "http://127.0.0.1:9", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: SGLang /server_info: the connection failed")


@pytest.mark.parametrize("command", ["sglang install", "sglang check", "serve"])
def test_server_commands_have_help(command: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"moerl {command}: " in text
    assert "--env DIR" in text


def test_an_unknown_server_command_is_named(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["sglang", "remove"]) == 2
    assert "sglang remove" in capsys.readouterr().err


def test_checking_an_environment_that_is_not_there_says_how_to_make_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["sglang", "check", "--env", str(tmp_path / "none")]) == 1
    assert "moerl sglang install" in capsys.readouterr().err
