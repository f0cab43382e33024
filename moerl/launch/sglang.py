"""`moerl sglang install`, `moerl sglang check` and `moerl serve`. Torch-free."""

from __future__ import annotations

import argparse
import asyncio
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from moerl.errors import ConfigError
from moerl.launch.arguments import Parser, asks_for_help, options_text
from moerl.launch.overview import SGLANG
from moerl.machine.hub import model_directory
from moerl.machine.model_tensors import check_weights
from moerl.rollout.fleet.endpoint import read_endpoint, require_private
from moerl.rollout.sglang.client import server_facts
from moerl.rollout.sglang.handshake import ServerFacts
from moerl.rollout.sglang.http import SGLangHttp
from moerl.rollout.sglang.install import DEVICES, install, site_packages
from moerl.rollout.sglang.patches import DEFAULT_RELEASE, PatchSet, read_patches, releases, verify_installation
from moerl.rollout.sglang.server import ENDPOINT_FILE, ServerOptions, SGLangServer

ENVIRONMENT = Path(".venv-sglang")
_PROBE_SECONDS = 30.0


def run(command: str, arguments: list[str]) -> int:
    """Runs one command, or prints its help; returns the exit status."""
    made = parser(command)
    if asks_for_help(arguments):
        usage = made.format_usage().strip()
        print(f"{usage}\n\nmoerl {command}: {SGLANG[command]}.\n\n{options_text(made)}")
        return 0
    return COMMANDS[command](made.parse_args(arguments))


def parser(command: str) -> Parser:
    """Makes the parser of one command."""
    made = Parser(command)
    add = made.add_argument
    add("--env", type=Path, default=ENVIRONMENT, metavar="DIR", help=f"environment of the server, {ENVIRONMENT}")
    if command == "sglang check":
        add("--server", type=Path, metavar="FILE", help=f"shake hands with the server of this {ENDPOINT_FILE}, too")
    else:
        add("--device", choices=DEVICES, default="cuda", help="cuda, or cpu for tests and laptops")
    if command == "sglang install":
        add("--version", choices=releases(), default=DEFAULT_RELEASE, help=f"release of SGLang, {DEFAULT_RELEASE}")
        add("--python", metavar="PATH", help="interpreter to make it with; the first that fits by default")
    if command == "serve":
        _add_server_options(add)
    made.add_common_options()
    return made


def _add_server_options(add: Callable[..., argparse.Action]) -> None:
    add("--model", required=True, metavar="DIR", help="Hugging Face directory, or OWNER/NAME of the hub, to serve")
    add("--folder", type=Path, required=True, metavar="DIR", help=f"for {ENDPOINT_FILE} (address, keys) and the log")
    add("--host", default="127.0.0.1", metavar="IP", help="loopback or private address, 127.0.0.1")
    add("--port", type=int, default=0, metavar="N", help="a free one by default")
    add("--tensor", type=int, default=1, metavar="N", help="tensor-parallel ranks, 1")
    add("--expert", type=int, default=1, metavar="N", help="groups of these that share the experts, 1")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and activations, bfloat16")
    add("--max-running", type=int, default=64, metavar="N", help="requests side by side, 64")
    add("--max-pool-tokens", type=int, metavar="N", help="tokens in the key-value pool; as memory allows by default")
    add("--vocab-size", type=int, metavar="N", help="sample ids below N only; for embeddings larger than the tokenizer")
    add("--policy-version", type=int, default=0, metavar="N", help="version of the weights in DIR, 0")
    add("--start-seconds", type=float, default=1800.0, metavar="S", help="longest start-up, 1800")


def _install(options: argparse.Namespace) -> int:
    environment = options.env.resolve()
    changed = install(environment, options.device, options.python, options.version)
    done = "installed and patched" if changed else "already installed"
    print(f"sglang {options.version} in {environment}: {done}")
    _list_patches(read_patches(options.version))
    return 0


def _check(options: argparse.Namespace) -> int:
    environment = options.env.resolve()
    patches = verify_installation(site_packages(environment))
    print(f"sglang {patches.version} in {environment}: the release with these patches in files without other changes")
    _list_patches(patches)
    if options.server is not None:
        facts = asyncio.run(_shake_hands(options.server))
        layers = facts.report.moe_layers
        release = f"sglang {facts.version}, fingerprint {facts.report.fingerprint}"
        print(f"server: {release}, policy version {facts.policy_version}, {len(layers)} MoE layers {layers}")
    return 0


async def _shake_hands(server_file: Path) -> ServerFacts:
    http = SGLangHttp(read_endpoint(server_file), max_connections=1, timeout_seconds=_PROBE_SECONDS)
    try:
        return await server_facts(http, None)
    finally:
        await http.close()


def _serve(options: argparse.Namespace) -> int:
    require_private(options.host)
    if options.tensor % options.expert:
        raise ConfigError(
            "--expert: no divisor of --tensor",
            seen=f"--expert {options.expert}, --tensor {options.tensor}",
            expected=f"a divisor of {options.tensor}",
            remedy=f"give --expert {options.tensor}, or leave it away",
        )
    model = model_directory(options.model, "--model")
    check_weights(model)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server_options = ServerOptions(
        model=model,
        environment=options.env.resolve(),
        device=options.device,
        tensor=options.tensor,
        expert=options.expert,
        dtype=options.dtype,
        max_running=options.max_running,
        max_pool_tokens=options.max_pool_tokens,
        vocab_size=options.vocab_size,
        policy_version=options.policy_version,
        host=options.host,
        port=options.port,
    )
    folder = options.folder.resolve()
    with SGLangServer(server_options, folder) as server:
        print(f"starting; log: {server.log}", flush=True)
        server.wait_until_ready(options.start_seconds)
        print(f"ready at {server.endpoint.url}; address and keys: {folder / ENDPOINT_FILE}", flush=True)
        while not stop.wait(1.0):
            server.require_running()
    return 0


def _list_patches(patches: PatchSet) -> None:
    print(f"patches, fingerprint {patches.fingerprint}:")
    for patch in patches.patches:
        print(f"  {patch.name}")


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "sglang install": _install,
    "sglang check": _check,
    "serve": _serve,
}
