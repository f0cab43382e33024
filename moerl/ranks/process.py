"""A rank in a process of its own: ``python -m moerl.ranks.process SOCKET [LISTENER]``, started as a `Child`.

SOCKET and LISTENER are descriptors: of the connection to the process that started this one, and, for rank 0 if ranks
meet over the network, of the socket at which it listens for the others.
Receives a command, runs it, replies with its report or its error; ends after `Close`, or with the process that started
it.
"""

from __future__ import annotations

import socket
import sys
import traceback

from moerl.contract.commands import AnyCommand, Close, Failure, Reply, Start, decode_command, encode
from moerl.errors import MoerlError
from moerl.machine.torch_start import before_torch
from moerl.printable import printable
from moerl.processes.channel import receive, send
from moerl.processes.parent import connected


def main() -> int:
    with connected(sys.argv[1]) as connection:
        before_torch()
        _serve(connection, int(sys.argv[2]) if len(sys.argv) > 2 else None)
    return 0


def _serve(connection: socket.socket, listener: int | None) -> None:
    """Runs commands, and replies to each, until `Close`. Raises `EOFError` or `BrokenPipeError` if the controller is
    gone."""
    import msgspec

    from moerl.ranks.start import start_worker
    from moerl.telemetry.spans import peak_rss_bytes

    worker = None
    while True:
        message, frame = receive(connection)
        command: AnyCommand = decode_command(message)
        try:
            if isinstance(command, Start):
                worker = start_worker(
                    command, lambda done, total: send(connection, encode(Reply(progress=(done, total)))), listener
                )
                reply = Reply()
            else:
                assert worker is not None
                reply = worker.run(command, frame)
        except Exception as error:  # noqa: BLE001 - the process boundary: the controller raises it
            if not isinstance(error, MoerlError):
                print(printable(traceback.format_exc()), end="", file=sys.stderr, flush=True)
            reply = Reply(failure=Failure.of(error))
        send(connection, encode(msgspec.structs.replace(reply, peak_rss_bytes=peak_rss_bytes())))
        if isinstance(command, Close):
            return


if __name__ == "__main__":
    sys.exit(main())
