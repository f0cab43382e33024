"""Program that waits until all nodes of a Ray cluster have come together: ``python -m moerl.ranks.on_ray.nodes ADDRESS
N``.

For scripts that start a cluster (`moerl launch slurm`). Prints the number of nodes and ends with status 0, or 1 after
five minutes. Its environment has the cluster's token.
"""

from __future__ import annotations

import argparse
import sys
import time

from moerl.config.placement import set_ray_variables
from moerl.config.schema import LaunchConfig

SECONDS = 300.0
_POLL_SECONDS = 1.0


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m moerl.ranks.on_ray.nodes", allow_abbrev=False)
    parser.add_argument("address")
    parser.add_argument("nodes", type=int)
    options = parser.parse_args()
    set_ray_variables(LaunchConfig(on="ray", address=options.address))
    from moerl.ranks.on_ray.library import RayError, ray

    deadline, seen = time.monotonic() + SECONDS, 0
    while time.monotonic() < deadline:
        try:
            ray.init(address=options.address, logging_level="ERROR", log_to_driver=False)
            seen = sum(bool(node["Alive"]) for node in ray.nodes())
            print(f"{seen} of {options.nodes} nodes", flush=True)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            print(f"no way in yet: {type(error).__name__}: {error}", flush=True)
        ray.shutdown()
        if seen >= options.nodes:
            return 0
        time.sleep(_POLL_SECONDS)
    return 1


if __name__ == "__main__":
    sys.exit(main())
