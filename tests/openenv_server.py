"""A server of OpenEnv with a small environment: count up to a number. Prints its port; runs until it is ended.

Runs with an interpreter that has OpenEnv.
"""

import random
import socket
import sys

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Count(Action):
    """A number that is said."""

    said: int


class Heard(Observation):
    """Answer to a number."""

    text: str


class Counting(Environment):
    """Rewards numbers that follow one another, from a first one that the seed decides."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(step_count=0)
        self.number = 0

    def reset(self, seed=None, episode_id=None, start=0, **more):
        """Begins with a number."""
        self._state = State(step_count=0)
        self.number = start + random.Random(seed).randrange(50)
        return Heard(text=f"go on behind {self.number}", reward=None, done=False)

    def step(self, action, timeout_s=None, **more):
        """Ends behind two numbers that follow."""
        if action.said < 0:
            raise ValueError("negative")
        is_right = action.said == self.number + 1
        self._state.step_count += is_right
        self.number += is_right
        done = self._state.step_count == 2
        return Heard(text="yes" if is_right else "no", reward=0.5 * is_right, done=done)

    @property
    def state(self):
        """Steps so far."""
        return self._state


listener = socket.socket()
listener.bind(("127.0.0.1", 0))
app = create_fastapi_app(Counting, Count, Heard, max_concurrent_envs=int(sys.argv[1]))
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
