"""Arguments that a run passes on to its SGLang servers, compared with those of the release in their environment.

Runs in the process that checks a run, before anything of the run starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from moerl.config.passed_on import SERVER_ARGS, SERVER_KEYS, fixed_argument
from moerl.errors import EngineError
from moerl.rollout.sglang.install import server_arguments


def check_server_args(environment: Path, passed: Mapping[str, Any]) -> None:
    """Checks that the release has arguments of these names, and that none of them is another name of one that is
    refused. Takes seconds: the environment's interpreter imports SGLang.

    Raises:
        EngineError: it has not, or one is; or the arguments cannot be listed.
    """
    if not passed:
        return
    known = server_arguments(environment)
    refused = {field: name for name, field in known.items() if name in SERVER_KEYS or fixed_argument(name)}
    for name, value in passed.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise EngineError(
                f"{SERVER_ARGS}.{name}: SGLang in {environment} has no such argument",
                seen=value,
                expected="one that `python -m sglang.launch_server --help` lists, with underscores",
                remedy=f"did you mean {near[0]}?" if near else "leave it away",
            )
        if known[name] in refused:
            raise EngineError(
                f"{SERVER_ARGS}.{name}: another name of {refused[known[name]]}, which cannot be passed on",
                seen=value,
                expected="no value",
                remedy="leave it away",
            )
