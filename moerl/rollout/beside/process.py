"""The engine's process: ``python -m moerl.rollout.beside.process SOCKET MEMORY``, started by `BesideEngine`.

SOCKET and MEMORY are descriptors: of the connection to the controller, and of the memory that weights come in. Ends
when told to, or with the controller.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from moerl.config.torch_start import before_torch
from moerl.processes.parent import die_with

CONTROLLER = "MOERL_CONTROLLER_PID"


def main() -> int:
    die_with(int(os.environ[CONTROLLER]))
    before_torch()
    # Takes seconds, in which the controller does other things.
    from moerl.rollout.beside.served import serve

    with socket.socket(fileno=int(sys.argv[1])) as connection, contextlib.suppress(EOFError, BrokenPipeError):
        # Without a controller there is nobody to tell.
        return serve(connection, int(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
