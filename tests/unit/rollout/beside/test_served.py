from __future__ import annotations

import socket
import threading

import pytest

from moerl.models.spec import spec_from_hf_config
from moerl.processes.channel import receive, send
from moerl.rollout.beside import served
from moerl.rollout.beside.messages import Update, decode_for_controller, encode
from moerl.rollout.embedded import EmbeddedEngine


def test_the_calls_of_an_update_are_all_answered_between_the_same_two_steps(
    make_model, monkeypatch: pytest.MonkeyPatch
):
    """Each is sent when the one before is answered: without patience sampling would go on between them."""
    monkeypatch.setattr(served, "_PATIENCE_SECONDS", 60.0)
    model = make_model()
    ours, theirs = socket.socketpair()
    engine = object.__new__(served._Served)
    engine._connection = theirs
    engine._engine = EmbeddedEngine(
        model, spec_from_hf_config(model.config.to_dict()), engine_id="e", max_running=4, policy_version=0
    )
    answers = []

    def ask() -> None:
        for following in (Update("held_dtypes"), Update("abandon"), None):
            answers.append(decode_for_controller(receive(ours)[0]))
            if following is not None:
                send(ours, encode(following))

    with ours, theirs:
        send(ours, encode(Update("begin", version=1)))
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        assert engine._take(False) == []
        asking.join(2.0)
        assert len(answers) == 3
