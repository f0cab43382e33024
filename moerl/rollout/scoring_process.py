"""The process of a model that scores: ``python -m moerl.rollout.scoring_process SOCKET``, started by
`moerl.scorers.model`.

SOCKET is the descriptor of the connection to the controller. Ends with the connection, or with the controller.
"""

from __future__ import annotations

import sys

from moerl.machine.torch_start import before_torch
from moerl.processes.parent import connected


def main() -> int:
    with connected(sys.argv[1]) as connection:
        before_torch()
        # Takes seconds, in which the controller does other things.
        from moerl.rollout.scoring_model import serve

        serve(connection)
    return 0


if __name__ == "__main__":
    sys.exit(main())
