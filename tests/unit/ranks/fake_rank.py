"""Not a rank: says what a rank would say, or fails as one might, for tests of those who start ranks.

Reads its part from fake.json in its working directory: by rank, what it does at which command.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from moerl.contract.commands import Close, Failure, Reply, decode_command, encode
from moerl.errors import CheckpointError, UnprovedError
from moerl.processes.channel import receive, send
from moerl.processes.parent import connected


def main() -> None:
    rank = os.environ["RANK"]
    parts = json.loads(Path("fake.json").read_text())
    with connected(sys.argv[1]) as connection:
        Path(f"pid-{rank}").write_text(str(os.getpid()))
        Path(f"env-{rank}").write_text(json.dumps(dict(os.environ)))
        while True:
            message, frame = receive(connection)
            command = decode_command(message)
            act = parts.get(rank, {}).get(command.name, "")
            if act == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif act == "exit":
                print("out of memory", flush=True)
                sys.exit(3)
            elif act == "hang":
                time.sleep(600)
            reply = Reply(metrics={"rank": float(rank), "frame_bytes": float(len(frame))}, peak_rss_bytes=7)
            if act == "refuse":
                reply = Reply(failure=Failure.of(CheckpointError("it is corrupt", seen="a hole", remedy="mend it")))
            elif act == "crash":
                reply = Reply(failure=Failure.of(ZeroDivisionError("division by zero")))
            elif act.startswith("unproved"):
                seen = "a checksum" if act != "unproved" else None
                microbatch = int(act[8:] or -1)
                reply = Reply(failure=Failure.of(UnprovedError("not proved", seen=seen, microbatch=microbatch)))
            elif act == "progress":
                send(connection, encode(Reply(progress=(1, 2))))
            send(connection, encode(reply))
            if isinstance(command, Close):
                return


main()
