"""`metrics.sinks`: what it takes, what must be installed, and where trackers keep their rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.config.load import load_config
from moerl.config.trackers import LIBRARIES, check_trackers, tracker_environment
from moerl.errors import ConfigError


def error(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(["recipe=tiny", *overrides], command="train")
    return str(caught.value)


def test_a_run_writes_json_lines_and_tensorboard_unless_told_otherwise() -> None:
    assert load_config(["recipe=tiny"], command="train").metrics.sinks == ["jsonl", "tensorboard"]
    assert load_config(["recipe=tiny", "metrics.sinks=[jsonl]"], command="train").metrics.sinks == ["jsonl"]


def test_json_lines_cannot_be_left_out() -> None:
    message = error("metrics.sinks=[tensorboard]")
    assert "metrics.sinks: jsonl is missing, which a run that goes on and its reports read" in message
    assert "remedy: set metrics.sinks=[jsonl,tensorboard]" in message


def test_a_sink_that_comes_twice_and_one_that_does_not_exist_are_refused() -> None:
    assert "metrics.sinks: one comes twice" in error("metrics.sinks=[jsonl,tensorboard,jsonl]")
    assert "metrics.sinks" in error("metrics.sinks=[jsonl,comet]")
    assert "metrics.project" in error("metrics.project=a/b")


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_tracker_that_is_not_installed_is_refused_with_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    message = error(f"metrics.sinks=[jsonl,{name}]", f"run_dir={tmp_path}")
    assert f"metrics.sinks: {name} is not installed; seen: no package {name}" in message
    assert f'remedy: pip install "moerl[{name}]", or leave {name} out of metrics.sinks' in message


def test_a_folder_called_like_a_library_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_tracker_of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(LIBRARIES, "wandb", ("a_tracker_of_nobody",))
    with pytest.raises(ConfigError, match="no package a_tracker_of_nobody"):
        check_trackers(["jsonl", "wandb"])


def test_what_is_installed_is_accepted() -> None:
    check_trackers(["jsonl", "mlflow"], lambda package: package in ("mlflow", "sqlalchemy", "alembic"))
    with pytest.raises(ConfigError, match="no package alembic"):
        check_trackers(["jsonl", "mlflow"], lambda package: package != "alembic")


def test_trackers_are_offline_in_the_run_directory_where_the_user_has_said_nothing() -> None:
    run = Path("/runs/one")
    wandb = tracker_environment("wandb", run / "wandb", {})
    assert (wandb["WANDB_MODE"], wandb["WANDB_DIR"], wandb["WANDB_ERROR_REPORTING"]) == (
        "offline",
        "/runs/one",
        "false",
    )
    mlflow = tracker_environment("mlflow", run / "mlflow", {})
    assert mlflow["MLFLOW_TRACKING_URI"] == "sqlite:////runs/one/mlflow/mlflow.db"
    assert mlflow["MLFLOW_DISABLE_TELEMETRY"] == "true"
    trackio = tracker_environment("trackio", run / "trackio", {})
    assert (trackio["TRACKIO_DIR"], trackio["HF_HUB_OFFLINE"]) == ("/runs/one/trackio", "1")


def test_the_settings_of_the_user_go_before() -> None:
    folder = Path("/runs/one/tracker")
    online = {"WANDB_MODE": "online", "WANDB_DIR": "/elsewhere"}
    assert tracker_environment("wandb", folder, online).items() >= online.items()
    assert "WANDB_ERROR_REPORTING" not in tracker_environment("wandb", folder, online)
    uri = {"MLFLOW_TRACKING_URI": "http://mlflow:5000"}
    assert tracker_environment("mlflow", folder, uri).items() >= uri.items()
    assert "HF_HUB_OFFLINE" not in tracker_environment("trackio", folder, {"TRACKIO_SPACE_ID": "me/space"})
