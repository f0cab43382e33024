"""The command line of `moerl diagnose`: files and models that it names are checked before torch is imported."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from moerl.buffer.ledger import LEDGER_FILE
from moerl.errors import ConfigError
from moerl.launch.arguments import Parser, page_path, positive

USAGE = "moerl diagnose DUMP|RUN_DIR [DUMP ...] [--model HF_DIR[@VERSION] ...] [--output FILE.html]"
OUTPUT = Path("diagnosis.html")


def diagnose_parser() -> Parser:
    """Makes the parser of the command."""
    parser = Parser("diagnose")
    add = parser.add_argument
    add("dumps", type=Path, nargs="*", metavar="DUMP")
    add(
        "--model",
        action="append",
        default=[],
        metavar="HF_DIR[@VERSION]",
        help="the policy as a Hugging Face directory or OWNER/NAME of the hub, with its policy version; again for other"
        " versions, newest first",
    )
    add("--output", type=Path, default=OUTPUT, metavar="FILE", help=f"page to write, {OUTPUT} if not said")
    rollouts = "most rollouts to score, spread over the dump, 256 if not said"
    add("--rollouts", type=int, default=256, metavar="N", help=rollouts)
    tokens = "most tokens to score, prompts included, 40,000 if not said"
    add("--tokens", type=int, default=40_000, metavar="N", help=tokens)
    backend = "score with transformers (hf, the default) or Megatron"
    add("--backend", choices=("hf", "trainer"), default="hf", help=backend)
    add("--temperature", type=positive, metavar="T", help="of sampling, for dumps that do not say it (1 is assumed)")
    add("--top-p", type=positive, metavar="P", help="of sampling, for dumps that do not say it")
    add("--dtype", metavar="NAME", help="of the arithmetic; that of the model's config if not said")
    return parser


def with_run(options: argparse.Namespace) -> argparse.Namespace:
    """Replaces a run directory that is named without a model by the run's first rollouts and the weights that sampled
    them. Raises `ConfigError` if the run has not kept both."""
    folder = options.dumps[0]
    is_run = (folder / LEDGER_FILE).is_file() and (folder / "rollouts").is_dir()
    if len(options.dumps) != 1 or options.model or not is_run:
        return options
    models = [each for each in (folder / "cold_start", folder / "initial_model") if (each / "config.json").is_file()]
    first = folder / "rollouts" / "step-000001.parquet"
    if not models or not first.is_file():
        raise ConfigError(
            "DUMP: a run directory without the rollouts of its first step, or without the weights that sampled them",
            seen=f"{folder}, no {first.name if models else 'cold_start'}",
            expected="a run that dumped its first step (dump.rollouts_every)",
            remedy=f"moerl export {folder} --step N --output DIR, and moerl diagnose with a file of the rollouts that"
            " these weights sampled, and --model DIR@N",
        )
    return argparse.Namespace(**{**vars(options), "dumps": [first], "model": [f"{models[0]}@0"]})


def check_arguments(options: argparse.Namespace) -> None:
    """Raises `ConfigError` if an argument is missing or wrong, a dump is not there, or a page cannot be written."""
    if not options.dumps:
        raise ConfigError(
            "diagnose: no dump", seen="none", expected="at least one file or directory", remedy=f"usage: {USAGE}"
        )
    for dump in options.dumps:
        if not dump.exists():
            raise ConfigError("DUMP: not there", seen=dump, expected="a file or a directory", remedy="check the path")
    if options.backend == "trainer" and len(options.model) > 1:
        raise ConfigError(
            "--backend trainer: one model at a time",
            seen=f"{len(options.model)} of --model",
            expected="one",
            remedy="compare versions with --backend hf",
        )
    if options.top_p is not None and options.top_p > 1:
        raise ConfigError("--top-p: too large", seen=options.top_p, expected="a number above 0, at most 1")
    for name in ("rollouts", "tokens"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name}: too few", seen=getattr(options, name), expected="at least 1")
    page = page_path(options.output)
    for ending in (".html", ".json", ".parquet"):
        _check_writable(page.with_suffix(ending))


def _check_writable(file: Path) -> None:
    """Raises `ConfigError` if a file cannot be written; leaves no file. Folders that are missing are made later."""
    folder, reason = next(parent for parent in file.parents if parent.exists()), ""
    if file.is_dir():
        reason = "a directory has that name"
    elif not folder.is_dir():
        reason = f"{folder} is no directory"
    else:
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            reason = f"{folder}: {error.strerror or error}"
    if reason:
        raise ConfigError(
            f"--output: cannot write {file}",
            seen=reason,
            expected="a file in a directory that this user may write to",
            remedy="name another page with --output, or mend what is named",
        )
