"""The table of what is where, in the docs as in the code."""

from __future__ import annotations

from pathlib import Path

from moerl.machine.residence import ALWAYS, ASLEEP, MOMENTS_OF_A_RUN, moments_on_device

PAGE = Path(__file__).parents[3] / "docs" / "sglang.md"


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8").partition(f"| what | {' | '.join(MOMENTS_OF_A_RUN)} |\n")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.partition("\n\n")[0].splitlines()[1:]
    ]
    found = {what: tuple(places) for what, *places in rows}
    asleep = {f"{what}, with `trainer.sleep=true`": places for what, places in ASLEEP.items()}
    assert found == asleep | ALWAYS


def test_weights_leave_the_device_only_if_the_trainer_sleeps() -> None:
    for what in ASLEEP:
        assert moments_on_device(what, sleeps=True) == ("sending", "training")
        assert moments_on_device(what, sleeps=False) == MOMENTS_OF_A_RUN
    assert moments_on_device("server: cache", sleeps=False) == ("sampling",)
