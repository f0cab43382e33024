"""Arguments that are passed on are held against those of the release in the servers' environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moerl.errors import EngineError
from moerl.rollout.sglang.install import check_server_args, server_arguments

RELEASE = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", dest="tp_size", type=int)
        parser.add_argument("--speculative-algorithm", "--draft", dest="speculative_algorithm", type=str)
        parser.add_argument("--attention-backend", type=str)
        parser.add_argument("--disable-radix-cache", action="store_true")
        parser.add_argument("--by-a-function", action="append")
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An interpreter beside a package of the name, with five arguments."""
    site = tmp_path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "sglang" / "srt").mkdir(parents=True)
    (site / "sglang" / "srt" / "server_args.py").write_text(RELEASE)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).parent}\n")
    return tmp_path


def test_an_environment_says_what_a_file_of_options_takes(environment: Path):
    assert server_arguments(environment) == {
        "tensor_parallel_size": "tp_size",
        "tp_size": "tp_size",
        "tp": "tp_size",
        "speculative_algorithm": "speculative_algorithm",
        "draft": "speculative_algorithm",
        "attention_backend": "attention_backend",
        "disable_radix_cache": "disable_radix_cache",
    }


def test_arguments_that_the_release_has_are_passed_on(environment: Path):
    check_server_args(environment, {"attention_backend": "fa3", "disable_radix_cache": True})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("attention_backends", "has no such argument; .*did you mean attention_backend"),
        ("by_a_function", "has no such argument"),
        ("tp", "another name of .*, which cannot be passed on"),
        ("draft", "another name of speculative_algorithm, which cannot be passed on"),
    ],
)
def test_an_unknown_argument_and_another_name_of_ours_are_refused(name: str, said: str, environment: Path):
    with pytest.raises(EngineError, match=rf"rollout\.server_args\.{name}: .*{said}"):
        check_server_args(environment, {name: 1})


def test_nothing_is_asked_where_nothing_is_passed_on(tmp_path: Path):
    check_server_args(tmp_path / "not there", {})
