"""Models by their names on a hub on loopback, which the real client library asks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from factories import write_hf_model
from small_hub import Cache, client_environment, commit_of, hub

from moerl.config.hub_model import prepare_model
from moerl.config.load import CONFIG_FILE, dump_config, load_config, load_plan, resolve_auto
from moerl.config.schema import RunConfig
from moerl.errors import ConfigError
from moerl.machine.hub import hub_name, missing_weights, model_directory
from moerl.machine.model_files import INDEX_FILE, SINGLE_FILE, read_header

MAIN, MOVED = commit_of("main"), "b" * 40
RECIPE = ["recipe=pretrained_small", "task=chain_sum", "rollout.max_new_tokens=16", "trainer.microbatch_tokens=256"]
# A process that reads its environment and prints the commit of a model.
CHILD = """
import sys
from moerl.machine.hub import model_directory
from moerl.errors import MoerlError
try:
    print(model_directory(sys.argv[1], "--model"))
except MoerlError as error:
    print(error)
assert "torch" not in sys.modules
"""
Told = tuple[Path | None, str | None, str | None]
"""Directory, name and commit of a configuration."""


def told(config: RunConfig) -> Told:
    return config.model.path, config.model.hub, config.model.commit


def keys(name: str, *others: str) -> list[str]:
    return [*RECIPE, f"model.path={name}", *others]


def begin(name: str, run_dir: str = "run") -> Told:
    """Does what the command line does as a run starts."""
    config = load_config(keys(name, f"run_dir={run_dir}"), command="train")
    prepare_model(config.model)
    config.run_dir.mkdir()
    (config.run_dir / CONFIG_FILE).write_text(dump_config(config))
    return told(config)


def go_on(overrides: list[str]) -> Told:
    config = load_config(overrides, command="train")
    prepare_model(config.model)
    return told(config)


def plan(name: str) -> Told:
    return told(load_plan(keys(name)))


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("model")
    write_hf_model(folder, max_position_embeddings=512)
    others = {
        "pytorch_model.bin": b"a pickle",
        "consolidated.safetensors": b"another form",
        "optimizer.pt": b"a pickle",
    }
    return {
        **{file.name: file.read_bytes() for file in folder.iterdir()},
        **others,
        "README.md": b"about",
        "code.py": b"raise SystemExit",
    }


@pytest.fixture
def models(model_files: dict[str, bytes]) -> dict[str, dict[str, dict[str, bytes]]]:
    older = {**model_files, "generation_config.json": b'{"older": true}'}
    pickles = {name: data for name, data in model_files.items() if not name.endswith(".safetensors")}
    return {"owner/moe": {"main": model_files, "v1": older}, "owner/pickles": {"main": pickles}}


@pytest.fixture
def heads() -> dict[str, str]:
    return {}


@pytest.fixture
def asked(models: Mapping[str, Any], heads: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    with hub(models, kind="models", heads=heads, gated=["owner/gated"]) as found:
        yield found


@pytest.fixture
def cache(tmp_path: Path, asked: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.chdir(tmp_path)
    made = Cache(monkeypatch)
    made.use(tmp_path / "home", asked[0])
    return made


def move(models: dict[str, Any], heads: dict[str, str]) -> None:
    """The branch main of the model gets another commit; the one before stays."""
    before = models["owner/moe"].pop("main")
    models["owner/moe"] |= {"main": {**before, "generation_config.json": b'{"newer": true}'}, MAIN: before}
    heads["main"] = MOVED


def test_a_name_becomes_the_snapshot_of_its_commit(cache: Cache, capsys: pytest.CaptureFixture[str]):
    assert begin("owner/moe") == (cache.snapshot(MAIN), "owner/moe", MAIN)
    says = capsys.readouterr().err
    assert re.fullmatch(
        r"fetching 1 files of weights of owner/moe into \S+/models--owner--moe\n"
        r"fetched owner/moe: 0\.00 GB in \d+s\n",
        says,
    )
    assert f"commit: {MAIN}" in Path("run", CONFIG_FILE).read_text()


def test_a_long_fetch_says_how_far_it_is(
    cache: Cache, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moerl.machine.hub.HEARTBEAT_SECONDS", 1e-4)
    begin("owner/moe")
    assert re.search(r"\nfetching owner/moe: 0\.00 GB, 0s so far\n", capsys.readouterr().err)


def test_pickles_code_and_other_forms_of_the_weights_are_not_fetched(cache: Cache):
    begin("owner/moe")
    assert cache.files == {"config.json", "tokenizer.json", SINGLE_FILE}


def test_a_plan_fetches_no_weights(cache: Cache):
    assert plan("owner/moe") == (cache.snapshot(MAIN), "owner/moe", MAIN)
    assert cache.files == {"config.json", "tokenizer.json"}


def test_only_the_files_of_the_index_are_fetched(cache: Cache, models: dict[str, Any], tmp_path: Path):
    files = models["owner/moe"]["main"] = dict(models["owner/moe"]["main"])
    whole = tmp_path / SINGLE_FILE
    whole.write_bytes(files.pop(SINGLE_FILE))
    index = {"weight_map": dict.fromkeys(read_header(whole), "model-1-of-1.safetensors")}
    files |= {INDEX_FILE: json.dumps(index).encode(), "model-1-of-1.safetensors": whole.read_bytes()}
    begin("owner/moe")
    assert cache.files == {"config.json", "tokenizer.json", INDEX_FILE, "model-1-of-1.safetensors"}
    assert missing_weights(cache.snapshot(MAIN)) == []


def test_a_revision_is_taken_at_its_commit(cache: Cache):
    commit = commit_of("v1")
    assert plan("owner/moe@v1") == (cache.snapshot(commit), "owner/moe@v1", commit)
    assert plan(f"owner/moe@{commit}") == (cache.snapshot(commit), f"owner/moe@{commit}", commit)
    assert (cache.snapshot(commit) / "generation_config.json").read_text() == '{"older": true}'


def test_a_directory_of_that_name_wins(cache: Cache, asked: tuple[str, list[str]], tmp_path: Path):
    folder = tmp_path / "owner" / "moe"
    folder.mkdir(parents=True)
    write_hf_model(folder, max_position_embeddings=512)
    assert begin("owner/moe") == (folder, None, None)
    assert asked[1] == []


def test_a_run_that_goes_on_keeps_its_commit_though_the_branch_moved(
    cache: Cache, models: dict[str, Any], heads: dict[str, str]
):
    began = begin("owner/moe")
    move(models, heads)
    cache.use(cache.home)
    assert go_on(["resume=run"]) == began
    assert go_on(resolve_auto(keys("owner/moe", "run_dir=run", "resume=auto"), command="train")[0]) == began
    assert plan("owner/moe")[2] == MOVED


def test_a_run_that_goes_on_asks_no_hub(cache: Cache, asked: tuple[str, list[str]]):
    began = begin("owner/moe")
    asked[1].clear()
    cache.use(cache.home)
    assert go_on(["resume=run"]) == began
    assert asked[1] == []


def test_a_run_that_goes_on_fetches_its_commit_again_where_the_cache_is_gone(
    cache: Cache, models: dict[str, Any], heads: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    before = begin("owner/moe")[0]
    move(models, heads)
    cache.home.rename(cache.home.with_name("gone"))
    cache.use(cache.home.with_name("other_home"))
    assert go_on(["resume=run"]) == (cache.snapshot(MAIN), "owner/moe", MAIN)
    assert f"note: model.path: {before} is gone; model owner/moe of the hub" in capsys.readouterr().err
    same, _ = resolve_auto(keys("owner/moe", "run_dir=run", "resume=auto"), command="train")
    assert same == [f"resume={Path('run').resolve()}"]


def test_a_run_that_goes_on_takes_no_other_revision(cache: Cache):
    begin("owner/moe")
    with pytest.raises(ConfigError, match=r"model\.hub: cannot change when a run goes on"):
        resolve_auto(keys("owner/moe@v1", "run_dir=run", "resume=auto"), command="train")


def test_what_is_in_the_cache_is_used_without_a_network(cache: Cache, capsys: pytest.CaptureFixture[str]):
    began = begin("owner/moe")
    capsys.readouterr()
    cache.use(cache.home, offline=True)
    assert begin("owner/moe", "next") == began
    assert capsys.readouterr().err == ""
    cache.use(cache.home, "http://127.0.0.1:1")
    assert begin("owner/moe", "third") == began
    says = "note: the hub does not answer (ConnectError); owner/moe is looked for in the cache\n"
    assert capsys.readouterr().err == says


def test_a_model_that_is_not_in_the_cache_is_refused_offline(cache: Cache, tmp_path: Path):
    cache.use(cache.home, offline=True)
    with pytest.raises(ConfigError) as refused:
        plan("owner/moe@v1")
    assert "owner/moe@v1 is no directory here, nor is it whole in the cache of the hub, which HF_HUB_OFFLINE" in str(
        refused.value
    )
    assert refused.value.seen == f"no directory {tmp_path / 'owner/moe@v1'}; cache {cache.home / 'hub'}"
    assert "hf download owner/moe --revision v1" in refused.value.remedy


def test_weights_that_are_not_in_the_cache_are_named_offline(cache: Cache):
    plan("owner/moe")
    cache.use(cache.home, offline=True)
    with pytest.raises(ConfigError) as refused:
        begin("owner/moe")
    assert "the cache has not all weights of owner/moe, and HF_HUB_OFFLINE is set" in str(refused.value)
    assert f"1 files are missing, first {SINGLE_FILE}" in str(refused.value)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owner/nothing", "owner/nothing is neither a directory nor a model of the hub that this user can see"),
        ("owner/moe@v9", "model.path: the model has no such revision; seen: owner/moe@v9"),
        ("owner/pickles", "owner/pickles has no weights in the form of transformers and safetensors; seen: pytorch_mo"),
        ("owner/gated", "model.path: owner/gated is gated"),
        ("owner/a--b", "owner/a--b is neither a directory nor a name on the hub; seen: HFValidationError"),
        ("./owner/moe", "model.path: not a Hugging Face model directory"),
    ],
)
def test_a_name_that_gives_no_model_is_named(cache: Cache, models: dict[str, Any], name: str, message: str):
    models["owner/gated"] = models["owner/moe"]
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan(name)


def test_an_option_takes_a_name_too(cache: Cache, capsys: pytest.CaptureFixture[str]):
    folder = cache.snapshot(commit_of("v1"))
    assert model_directory("owner/moe@v1", "--model") == folder
    says = capsys.readouterr().err
    assert says.startswith(f"model owner/moe@v1 of the hub, commit {commit_of('v1')}: {folder}\nfetching 1 files")
    with pytest.raises(ConfigError, match="--model: owner/nothing is neither"):
        model_directory("owner/nothing", "--model")


def test_the_environment_says_which_hub_and_which_cache(asked: tuple[str, list[str]], tmp_path: Path):
    def found(name: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, name],
            env=client_environment(asked[0], tmp_path / "home", **environment),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    folder = tmp_path / "home" / "hub" / "models--owner--moe" / "snapshots" / MAIN
    assert found("owner/moe") == str(folder)
    assert (folder / SINGLE_FILE).is_file()
    assert found("owner/moe", HF_HUB_OFFLINE="1") == str(folder)
    assert "which HF_HUB_OFFLINE forbids to ask" in found("owner/other", HF_HUB_OFFLINE="1")


def test_keys_of_the_hub_are_the_runs_own():
    with pytest.raises(ConfigError, match=r"model.hub and model.commit: set by a run.*model.path=OWNER/NAME@REVISION"):
        load_plan(keys("somewhere", "model.hub=owner/moe"))


@pytest.mark.parametrize(
    "given", ["model", "/owner/name", "../name", "a/b/c", "owner/name@", "owner/..", "~/name", "owner/na me", ""]
)
def test_other_forms_are_paths(given: str):
    assert hub_name(given) is None
