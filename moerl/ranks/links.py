"""How senders in rank processes reach an engine in the controller. Runs in the controller."""

from __future__ import annotations

import msgspec

from moerl.config.placement import controller_address
from moerl.config.schema import RunConfig
from moerl.contract.ports import PolicyEngine, ReadsMemory, Taken
from moerl.ranks.weights import SENDER_SHARE, EngineLinks
from moerl.rollout.fleet.engine import FleetEngine
from moerl.weights.plan import PlanOptions
from moerl.weights.remote import SinkServer


class Links:
    """Opens an engine to the senders of a run.

    The first sender begins and ends updates. Where the engine has servers, all send to these side by side; otherwise
    the first sends to the controller.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config, self._host = config, controller_address(config.launch)
        self._server: SinkServer | None = None
        self._takes_beside = False

    def connect(self, engine: PolicyEngine | None) -> str:
        """The links as `Build` takes them. Once for each engine, before its first update."""
        if engine is None:
            return ""
        weights, senders = self._config.weights, PlanOptions.of(self._config).senders
        self.close()
        self._server = SinkServer(engine, self._host)
        servers, self._takes_beside = None, not isinstance(engine, FleetEngine)
        if isinstance(engine, FleetEngine) and weights.transport != "disk":
            servers = engine.share(senders, SENDER_SHARE * weights.step_seconds, self._host)
        memory = engine.memory if isinstance(engine, ReadsMemory) else ""
        return msgspec.json.encode(EngineLinks(self._server.address, memory, servers)).decode()

    def take_beside(self, taken: Taken, *, verify: bool) -> bool:
        """As `Ranks.take_beside`: an engine with servers takes its weights from the senders themselves."""
        if self._server is None or not self._takes_beside:
            return False
        self._server.take_beside(taken, verify=verify)
        return True

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
