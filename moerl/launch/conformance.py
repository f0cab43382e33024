"""The command line of `moerl conformance`. Torch-free."""

from __future__ import annotations

from pathlib import Path

from moerl.config.command_texts import CONFORMANCE
from moerl.errors import ConfigError
from moerl.launch.arguments import Parser
from moerl.machine.hub import model_directory
from moerl.rollout.conformance.suite import CHECKS, ConformanceCheck, ConformanceOptions

EMBEDDED = "embedded:"


def parser() -> Parser:
    """Makes the parser of the command."""
    made = Parser("conformance")
    add = made.add_argument
    add("engine", metavar="ENGINE")
    model = "model that the engine serves, a directory or OWNER/NAME of the hub: compare with transformers, too"
    add("--model", metavar="HF_DIR", help=model)
    add("--check", action="append", metavar="NAME", help="only this check; may be given several times")
    add("--update-weights", action="store_true", help="replace the engine's weights on the way, and put them back")
    add("--json", action="store_true", help="print one JSON document")
    return made


def read_options(arguments: list[str]) -> ConformanceOptions | None:
    """Reads the command line. If it asks for help, prints the help and returns None.

    Raises:
        ConfigError: there is no such engine, model or check, or --update-weights lacks --model.
    """
    given = parser().read(arguments, "moerl conformance ENGINE [options]", CONFORMANCE)
    if given is None:
        return None
    engine = str(given.engine)
    model = None if given.model is None else _model("--model", given.model)
    embedded = _model("ENGINE", engine.removeprefix(EMBEDDED)) if engine.startswith(EMBEDDED) else None
    is_url = engine.startswith(("http://", "https://"))
    file = None if is_url or embedded else Path(engine)
    if file is not None and not file.is_file():
        raise ConfigError(
            "ENGINE: no engine",
            seen=engine,
            expected=f"http://HOST:PORT, the server.json of a `moerl serve`, or {EMBEDDED}HF_DIR",
            remedy="see `moerl conformance --help`",
        )
    if given.update_weights and model is None and embedded is None:
        raise ConfigError(
            "--update-weights: which weights are put back",
            seen="no --model",
            expected="the model that the server serves",
            remedy="give it with --model HF_DIR",
        )
    return ConformanceOptions(
        engine.rstrip("/") if is_url else "",
        file,
        embedded,
        model,
        _checks(given.check),
        given.update_weights,
        given.json,
    )


def _model(option: str, given: str) -> Path:
    folder = model_directory(given, option)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{option}: not a Hugging Face model directory", seen=given, expected="a directory with config.json"
        )
    return folder


def _checks(names: list[str] | None) -> tuple[ConformanceCheck, ...]:
    known = {check.name: check for check in CHECKS}
    for name in names or ():
        if name not in known:
            raise ConfigError("--check: unknown check", seen=name, expected=f"one of {', '.join(known)}")
    return CHECKS if names is None else tuple(check for check in CHECKS if check.name in names)
