"""The commands that take the list of checks, asked on a machine that is pretended."""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from factories import QWEN3_30B, write_hf_config
from omegaconf import DictConfig
from small_hub import Cache

from moerl import cli
from moerl.config import compose
from moerl.launch.checks import packages
from moerl.launch.checks.facts import DOORS, Door
from moerl.launch.checks.gpus import Gpu
from moerl.launch.doctor import accelerators, machine, servers
from moerl.rollout.sglang.patches import DEFAULT_RELEASE, STAMP, read_patches

STARTED: tuple[Door, ...] = ("train", "doctor", "dry run")
ALL: tuple[Door, ...] = DOORS

REWARDS = """
def good(row, response):
    return 1.0

def raises(row, response):
    return row["answre"]

def text(row, response):
    return "1.0"
"""


@dataclass(frozen=True)
class Broken:
    """A configuration that cannot work.

    said: a part of the error. knows: the commands that can know it. gpus, host_gib, disk_gib: of the one machine and
    the site. site: more of the site file. words: more words of the dry run. spoil: breaks something before a command is
    asked.
    """

    keys: tuple[str, ...]
    said: str
    knows: tuple[Door, ...] = STARTED
    gpus: int = 0
    host_gib: int = 4096
    disk_gib: int = 1 << 20
    site: dict[str, object] = field(default_factory=dict[str, object])
    words: tuple[str, ...] = ()
    spoil: Callable[[Path], object] = lambda folder: None


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the files that configurations name."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "my_rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"say {i}", "response": str(i), "answer": str(i)} for i in range(60)]
    for name in ("sums.jsonl", "rows.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    half = [{**row, "answer": None} if number % 2 else row for number, row in enumerate(rows)]
    (folder / "half.jsonl").write_text("".join(json.dumps(row) + "\n" for row in half))
    (folder / "broken.jsonl").write_text("{\n")
    dumped = {"token_ids": [5, 6, 7], "response_length": 2, "rollout_logprobs": [-1.0, -1.0]}
    (folder / "ungrouped.jsonl").write_text(json.dumps(dumped))
    (folder / "one_group.jsonl").write_text(json.dumps({**dumped, "group": "a"}))
    (folder / "folder").mkdir()
    write_hf_config(folder / "big", **QWEN3_30B)
    write_hf_config(folder / "dense", model_type="qwen3")
    write_hf_config(folder / "empty", max_position_embeddings=512)
    return folder


_COMPOSE = compose._compose
_KNOWN: dict[tuple[str, ...], DictConfig] = {}


def composed_once(overrides: Sequence[str], config_dir: Path | None) -> DictConfig:
    """`_compose`, which is given the same keys by several commands."""
    assert config_dir is None
    if tuple(overrides) not in _KNOWN:
        _KNOWN[tuple(overrides)] = _COMPOSE(overrides, None)
    return copy.deepcopy(_KNOWN[tuple(overrides)])


listed_once = functools.cache(packages.installed_versions)

Ask = Callable[[Door, Broken], tuple[int, str]]


@pytest.fixture
def place(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with links to the files and an environment of servers that a test may break."""
    for file in files.iterdir():
        (tmp_path / file.name).symlink_to(file)
    site = tmp_path / "env" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for folder in (tmp_path / "env" / "bin", site / "sglang", site / f"sglang-{DEFAULT_RELEASE}.dist-info"):
        folder.mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "env" / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).parent}\n")
    (tmp_path / "env" / "moerl-sglang.json").write_text(json.dumps({"sglang": DEFAULT_RELEASE, "device": "cpu"}))
    (site / STAMP).write_text(json.dumps({"fingerprint": read_patches().fingerprint}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ask(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Status and text of a command for a configuration, on a machine that is pretended."""
    Cache(monkeypatch).use(place / "hub", offline=True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    # Beyond these nothing may be started or submitted.
    monkeypatch.setitem(sys.modules, "moerl.orchestration.commands", None)
    monkeypatch.setattr("moerl.launch.slurm.command.submit", None)
    monkeypatch.setattr("moerl.launch.slurm.command.plan_run", lambda *_, **__: 0)
    # Hydra and the list of packages take most of the time: the same keys are composed once, packages listed once, and
    # what recipes set is not told.
    monkeypatch.setattr("moerl.config.compose._compose", composed_once)
    monkeypatch.setattr(packages, "installed_versions", listed_once)
    monkeypatch.setattr("moerl.config.help_text.recipe_text", lambda *_: "")
    monkeypatch.setattr("moerl.launch.slurm.command.recipe_text", lambda *_: "")
    # What doctor looks at without a run has tests of its own.
    monkeypatch.setattr(packages, "package_checks", list)
    monkeypatch.setattr(accelerators, "accelerator_checks", lambda *_: [])
    monkeypatch.setattr(accelerators, "ask_torch", lambda: "not asked")
    monkeypatch.setattr(servers, "own_listeners", list)
    monkeypatch.setattr(machine, "machine_checks", lambda *_, **__: ([], 1e9))
    monkeypatch.setattr("moerl.launch.slurm.facts.disk_rate", lambda _: 1e9)

    def run(door: Door, broken: Broken) -> tuple[int, str]:
        gpu_gib = int(str(broken.site.get("gpu_memory_gib", 80)))
        gpus = [Gpu("H100", "580", gpu_gib * 1024.0, 0.0)] * broken.gpus
        for name in ("facts.usable_gpus", "facts.host_bytes"):
            value = gpus if name.endswith("gpus") else broken.host_gib * 2**30
            monkeypatch.setattr(f"moerl.launch.checks.{name}", lambda value=value: value)
        monkeypatch.setattr("moerl.launch.doctor.command.query_gpus", lambda: gpus)
        for name in ("slurm.facts", "doctor.machine"):
            monkeypatch.setattr(f"moerl.launch.{name}.room_for_checkpoints", lambda _: broken.disk_gib * 2**30)
        site = {"gpus_per_node": broken.gpus, "memory": f"{broken.host_gib}G", **broken.site}
        (place / "site.yaml").write_text(yaml.safe_dump(site))
        words = {
            "train": ["train"],
            "doctor": ["doctor"],
            "dry run": ["launch", "slurm", "--time", "1:00:00", "--site", "site.yaml", "--dry-run", *broken.words],
            "plan": ["plan", "memory", "--host-memory-gib", str(broken.host_gib), "--gpu-memory-gib", str(gpu_gib)],
        }
        keys = [key.replace("{env}", str(place / "env")) for key in broken.keys]
        status = cli.main([*words[door], *keys, f"run_dir='{place / 'run'}'"])
        return status, "".join(capsys.readouterr())

    return run
