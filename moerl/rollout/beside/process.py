"""The engine's process: ``python -m moerl.rollout.beside.process SOCKET``, started by `LocalProcess`.

SOCKET is the descriptor of the connection to the controller. Ends on `CloseEngine`, or with the controller.
"""

from __future__ import annotations

import contextlib
import socket
import sys

from moerl.machine.torch_start import before_torch
from moerl.processes.parent import belong_to_parent


def main() -> int:
    belong_to_parent()
    before_torch()
    # Takes seconds, in which the controller does other things.
    from moerl.rollout.beside.served import serve

    with socket.socket(fileno=int(sys.argv[1])) as connection, contextlib.suppress(EOFError, BrokenPipeError):
        # Without a controller there is nobody to tell.
        return serve(connection)
    return 0


if __name__ == "__main__":
    sys.exit(main())
