"""When the process of an engine begins, and what becomes of it; the room that an engine begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from moerl.config.engine_memory import DeviceOptions
from moerl.config.load import load_config
from moerl.config.rollouts import EmbeddedRolloutConfig
from moerl.models.description import ModelDescription
from moerl.orchestration import engines
from moerl.orchestration.engines import begun_early
from moerl.rollout import factory

IN_PROCESS = ("recipe=tiny", "rollout.placement=process")


class FakeProcess:
    """Keeps what is done to it."""

    def __init__(self, log: Path) -> None:
        self.log, self.done = log, list[str]()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.done.append(name)


class FakeProcesses:
    """Keeps what it began."""

    def __init__(self) -> None:
        self.begun: list[FakeProcess] = []

    def __call__(self, log: Path) -> Any:
        self.begun.append(FakeProcess(log))
        return self.begun[-1]


def test_the_engine_gets_the_process_that_began_before_it_was_asked_for() -> None:
    processes = FakeProcesses()
    with begun_early(load_config([*IN_PROCESS, "run_dir=x"], command="train"), processes) as process:
        (begun,) = processes.begun
        assert process(Path("x/logs/engine.log")) is begun
    assert begun.log == Path("x/logs/engine.log").absolute()
    assert (len(processes.begun), begun.done) == (1, [])


def test_a_process_that_no_engine_took_is_ended_whatever_happened() -> None:
    processes = FakeProcesses()
    with (
        pytest.raises(KeyboardInterrupt),
        begun_early(load_config([*IN_PROCESS, "run_dir=x"], command="train"), processes),
    ):
        raise KeyboardInterrupt
    assert processes.begun[0].done == ["send", "close", "release"]


@pytest.mark.parametrize(("keys", "on"), [(["recipe=tiny"], "local"), ([*IN_PROCESS], "ray")])
def test_no_other_engine_has_a_process_that_begins_early(keys: list[str], on: str) -> None:
    processes = FakeProcesses()
    config = load_config([*keys, "run_dir=x"], command="train")
    config = config.model_copy(update={"launch": config.launch.model_copy(update={"on": on})})
    with begun_early(config, processes) as process:
        assert processes.begun == []
        assert process is processes


class Engine:
    is_on_device = False


@pytest.mark.parametrize("placement", ["controller", "process"])
def test_an_engine_has_the_room_that_its_memory_is_planned_with(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def inside(model: Any, *, on_device: DeviceOptions, **options: Any) -> Engine:
        given.append(on_device.slot_tokens)
        return Engine()

    def beside(start: Any, process: Any) -> Engine:
        given.append(start.on_device.slot_tokens)
        return Engine()

    monkeypatch.setattr(factory, "embedded_engine", inside)
    monkeypatch.setattr(factory, "engine_in_process", beside)
    monkeypatch.setattr(engines, "check_weights", lambda folder: None)
    overrides = ["recipe=laptop", f"rollout.placement={placement}", "rollout.max_new_tokens=200", f"run_dir={tmp_path}"]
    config = load_config(overrides, command="train")
    assert isinstance(config.rollout, EmbeddedRolloutConfig)

    class Model:
        folder, spec = tmp_path, None

    engines.open_engine(config, cast(ModelDescription, Model), 0, print, process=lambda log: cast(Any, None))
    assert given == [2 * 128 + 128]
