"""Places of the product at which tests put faults: slow tests name some of them, and CI does not run these."""

from __future__ import annotations

import importlib
import re
from functools import reduce
from pathlib import Path

TESTS = Path(__file__).parents[1]
PLACE = re.compile(r'"(moerl\.[\w.]+):([A-Za-z_][\w.]*)"')


def test_every_place_that_a_test_names_is_there() -> None:
    texts = [path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py") if path != Path(__file__)]
    places = {found.groups() for text in texts for found in PLACE.finditer(text)}
    assert len(places) > 20
    for module, name in places:
        reduce(getattr, name.split("."), importlib.import_module(module))
