"""The model families that moerl knows: every module of this package holds the record of one, as `FAMILY`.

Torch-free; any process. A new family is a new module; nothing has to be registered.
"""

from __future__ import annotations

import importlib
import pkgutil

from moerl.models.family import Family


def _read_records() -> dict[str, Family]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    records: list[Family] = [importlib.import_module(f"{__name__}.{name}").FAMILY for name in names]
    return {record.model_type: record for record in records}


FAMILIES = _read_records()
"""By `model_type`."""
