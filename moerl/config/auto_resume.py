"""``resume=auto``: goes on with the run in `run_dir` if there is one, and starts it if there is none. Torch-free.

A requeued job needs this: the command line that started a run also goes on with it. Runs in the command line; ranks get
the resolved overrides, because the run directory looks different once the controller has begun.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moerl.config.compose import parse_override
from moerl.config.load import CONFIG_FILE, load_config, load_resolved, split_resume
from moerl.config.reference import COMMAND_KEY
from moerl.config.resume import changed_keys, check_may_change, reason_against
from moerl.config.schema import RunConfig
from moerl.errors import ConfigError

AUTO = "resume=auto"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A command line without ``resume=auto``."""

    overrides: list[str]
    """Overrides in the order given; of a run that goes on ``resume=RUN_DIR`` first."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user: keys that keep the run's value although the recipe has another one."""

    @property
    def goes_on_unchanged(self) -> bool:
        """True if a run goes on and no key changes."""
        return len(self.overrides) == 1 and self.overrides[0].startswith("resume=")


def stored_run(overrides: Sequence[str]) -> RunConfig | None:
    """Returns the configuration of the run that is in ``run_dir=DIR`` already; None if there is none. Raises
    `ConfigError` if it cannot be read."""
    given = [parse_override(text) for text in overrides if text.startswith("run_dir=")]
    stored = Path(str(given[0].value)) / CONFIG_FILE if given else None
    return load_resolved(stored) if stored is not None and stored.exists() else None


def resolve_auto(overrides: Sequence[str], *, command: str, config_dir: Path | None = None) -> Resolved:
    """Returns the overrides of a command line with ``resume=RUN_DIR``, or nothing, in place of ``resume=auto``.

    Keys of the command line that are as the run has them are left away. The others stay, so that the rules of a run
    that goes on apply to them.

    Raises:
        ConfigError: there is no `run_dir=`, or groups and recipe are those of another run.
    """
    if AUTO not in overrides or command not in ("train", "sft"):
        return Resolved(list(overrides))
    split_resume(overrides)
    given = {parse_override(text).key: text for text in overrides if text != AUTO}
    if "run_dir" not in given:
        raise ConfigError(
            f"{AUTO}: needs a run directory",
            seen=" ".join(overrides),
            expected="run_dir=DIR, which may or may not hold a run",
            remedy="add run_dir=DIR",
        )
    rest = [text for text in overrides if text != AUTO]
    before = stored_run(rest)
    known = None if before is None else before.model
    config = load_config(rest, command=command, config_dir=config_dir, known_model=known)
    if before is None:
        return Resolved(rest)
    found = Resolved([f"resume={config.run_dir}"])
    for change in changed_keys(before, config):
        if change.key in ("run_dir", COMMAND_KEY):
            continue
        if change.key == "model.path" and config.model.hub is not None and config.model.commit == before.model.commit:
            continue  # the same model of the hub, in another cache
        if change.key in given:
            found.overrides.append(given[change.key])
        elif reason_against(change.key, command) is None:
            stays, says = json.dumps(change.old), json.dumps(change.new)
            found.notes.append(f"{change.key} stays {stays}, as the run has it; the command line's recipe says {says}")
        else:
            text = f"{change.key}={json.dumps(change.new)}"
            check_may_change(change.key, text, command, config.run_dir)
    return found
