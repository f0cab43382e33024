"""The engine's process: ``python -m moerl.rollout.engine_process.process SOCKET``, started by `LocalProcess`.

SOCKET is the descriptor of the connection to the controller. Ends on `CloseEngine`, or with the controller.
"""

from __future__ import annotations

import sys

from moerl.machine.torch_start import before_torch
from moerl.processes.parent import connected


def main() -> int:
    with connected(sys.argv[1]) as connection:
        before_torch()
        # Takes seconds, in which the controller does other things.
        from moerl.rollout.engine_process.served import serve

        return serve(connection)
    return 0


if __name__ == "__main__":
    sys.exit(main())
