"""The process of a tracker: ``python -m moerl.telemetry.trackers.process NAME SOCKET``, started by `TrackerSink`.

The process reads messages of JSON in order. It answers `open`, `flush` and `close`; a row only if it fails. The first
error ends the process, and so does the end of the controller.
"""

from __future__ import annotations

import json
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from moerl.processes.channel import receive, send
from moerl.processes.parent import connected
from moerl.telemetry.trackers.mlflow_tracker import MlflowTracker
from moerl.telemetry.trackers.tracker import Opening, Tracker
from moerl.telemetry.trackers.trackio_tracker import TrackioTracker
from moerl.telemetry.trackers.wandb_tracker import WandbTracker

MAKERS: dict[str, Callable[[], Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker, "trackio": TrackioTracker}


def main() -> int:
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # of a library that is compiled for the first time
    with connected(sys.argv[2]) as connection:
        return serve(connection, MAKERS[sys.argv[1]])
    return 0


def serve(connection: socket.socket, make: Callable[[], Tracker]) -> int:
    """Runs the tracker until it is closed or fails; returns the exit status."""
    tracker: Tracker | None = None
    while True:
        message = json.loads(receive(connection)[0])
        try:
            tracker = tracker or make()
            answer = _do(tracker, message)
        except Exception as error:  # noqa: BLE001 - the process boundary: the controller says it
            traceback.print_exc()
            text = " ".join(str(error).split()) or "no further text"
            send(connection, json.dumps({"error": f"{type(error).__name__}: {text}"[:1000]}).encode())
            return 1
        if answer is not None:
            send(connection, json.dumps(answer).encode())
        if message["do"] == "close":
            return 0


def _do(tracker: Tracker, message: dict[str, Any]) -> dict[str, str] | None:
    """Passes a message to the tracker; returns the answer, None if there is none."""
    match message["do"]:
        case "open":
            return {"run_id": tracker.open(Opening(**message["opening"]))}
        case "write":
            tracker.write(message["stage"], message["step"], message["metrics"])
            return None
        case "flush":
            tracker.flush()
        case _:
            tracker.close(failed=message["failed"])
    return {}


if __name__ == "__main__":
    sys.exit(main())
