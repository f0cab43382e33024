"""When the process of an engine begins, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moerl.config.load import load_config
from moerl.orchestration.engines import begun_early

BESIDE = ("recipe=tiny", "rollout.placement=beside")


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
    with begun_early(load_config([*BESIDE, "run_dir=x"], command="train"), processes) as process:
        (begun,) = processes.begun
        assert process(Path("x/logs/engine.log")) is begun
    assert begun.log == Path("x/logs/engine.log").absolute()
    assert (len(processes.begun), begun.done) == (1, [])


def test_a_process_that_no_engine_took_is_ended_whatever_happened() -> None:
    processes = FakeProcesses()
    with pytest.raises(KeyboardInterrupt), begun_early(load_config([*BESIDE, "run_dir=x"], command="train"), processes):
        raise KeyboardInterrupt
    assert processes.begun[0].done == ["send", "close", "release"]


@pytest.mark.parametrize(("keys", "on"), [(["recipe=tiny"], "local"), ([*BESIDE], "ray")])
def test_no_other_engine_has_a_process_that_begins_early(keys: list[str], on: str) -> None:
    processes = FakeProcesses()
    config = load_config([*keys, "run_dir=x"], command="train")
    config = config.model_copy(update={"launch": config.launch.model_copy(update={"on": on})})
    with begun_early(config, processes) as process:
        assert processes.begun == []
        assert process is processes
