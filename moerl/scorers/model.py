"""Scorer ``kind=model``: log-probs of sampled tokens under another model, a teacher, in a process of its own.

A thread of the controller sends one trajectory at a time and waits for its scores. Torch-free; the process is
`moerl.rollout.scoring_process`.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from moerl.contract.array_codec import array_bytes, read_array
from moerl.contract.trajectory import Trajectory
from moerl.errors import ConfigError, ScoreError, as_config_error
from moerl.machine.model_files import check_tokenizer, stored_tensors
from moerl.models.description import CONFIG_FILE, read_config
from moerl.processes.child import Child, describe_output, module_program
from moerl.scorers.messages import ScoreTokens, StartScorer, decode_answer, encode
from moerl.scorers.section import ScorerSection
from moerl.sections import FilePath, FloatName, Positive, Threads

PROGRAM = module_program("moerl.rollout.scoring_process")
LOAD_SECONDS = 1800.0
"""Longest time that the weights may take to load."""
END_SECONDS = 5.0
_BYTES = {"float32": 4, "bfloat16": 2}


class ModelScorer(ScorerSection):
    """Log-prob of each sampled token under another model with the same tokens, at the temperature of the token."""

    kind: Literal["model"]
    """Chooses this kind; each scorer has one."""
    path: FilePath = Field(description="Hugging Face directory of the model, mixture of experts or not.")
    support: Literal["kept", "full"] = Field(
        default="kept",
        description="kept = the model, too, is normalised in the kept set of each token; full = over the vocabulary.",
    )
    dtype: FloatName = Field(default="float32", description="Precision of its weights and activations.")
    num_threads: Threads = Field(default=1, description="CPU threads of its process.")
    timeout_seconds: Positive = Field(default=600.0, description="Longest time of one response.")

    @property
    def tokenizer(self) -> Path | None:
        return self.path

    def host_bytes(self, key: str) -> int:
        with _naming(key):
            read_config(self.path / CONFIG_FILE)
            stored = stored_tensors(self.path).values()
        return sum(math.prod(tensor.shape) for tensor in stored) * _BYTES[self.dtype]

    def check_files(self, key: str, vocab_size: int | None) -> None:
        with _naming(key):
            known = read_config(self.path / CONFIG_FILE).get("vocab_size")
            stored_tensors(self.path)
            check_tokenizer(self.path)
        if type(known) is not int or (vocab_size is not None and known < vocab_size):
            raise ConfigError(
                f"{key}.path: the model has fewer tokens than the one that is trained",
                seen=known,
                expected=f"at least {vocab_size}, and the same tokenizer",
                remedy="take a model with the tokenizer of the one that is trained",
            )

    def open(self, key: str, log: Path) -> RemoteModel:
        return RemoteModel(self, key, log)


class RemoteModel:
    """A `TokenScorer` by a model in a process of its own.

    Args:
        settings: the model, and how it scores.
        key: path of the settings, for errors.
        log: file of the output of the process; removed at the end if nothing was written.
    """

    def __init__(self, settings: ModelScorer, key: str, log: Path) -> None:
        self._settings, self._key = settings, key
        self._child = Child(PROGRAM, log)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._started: Future[NDArray[np.float32]] = Future()
        threading.Thread(target=self._work, name=f"scorer {key}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._child.pid

    def start(self) -> None:
        self._started.result()

    def submit(self, trajectory: Trajectory) -> Future[NDArray[np.float32]]:
        future: Future[NDArray[np.float32]] = Future()
        with self._lock:
            if self._is_closed:
                future.set_exception(self._closed())
            else:
                self._calls.put((trajectory, future))
        return future

    def close(self) -> None:
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if not is_first:
            return
        self._calls.put(None)
        self._child.kill()
        self._child.release()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        start = StartScorer(
            str(self._settings.path), self._settings.dtype, self._settings.support, self._settings.num_threads
        )
        failed = _settle(self._started, lambda: self._ask(encode(start), 0, LOAD_SECONDS))
        while (call := self._calls.get()) is not None:
            trajectory, future = call
            if future.set_running_or_notify_cancel():
                if failed is not None:
                    future.set_exception(failed)
                else:
                    failed = _settle(future, lambda asked=trajectory: self._score(asked))
        while not self._calls.empty():
            call = self._calls.get()
            if call is not None and call[1].set_running_or_notify_cancel():
                call[1].set_exception(self._closed())

    def _score(self, trajectory: Trajectory) -> NDArray[np.float32]:
        places = np.flatnonzero(trajectory.sampled)
        kept, sizes = trajectory.kept, trajectory.kept.sizes[places]
        # Tokens that were not sampled have no kept set: the ids of all others lie one behind the other.
        message = ScoreTokens(
            bytes(array_bytes(trajectory.token_ids)),
            bytes(array_bytes(places.astype(np.int64))),
            bytes(array_bytes(trajectory.temperatures[places])),
            bytes(array_bytes(sizes.astype(np.int64))),
            bytes(array_bytes(kept.ids)),
        )
        found = self._ask(encode(message), len(places), self._settings.timeout_seconds)
        wrong = np.flatnonzero(~np.isfinite(found))
        if len(wrong):
            raise ScoreError(
                f"{self._key}: the model gives a token of {trajectory.lineage.rollout_id} no finite log-prob",
                seen=f"{found[wrong[0]]} for token {places[wrong[0]]}",
                expected="a finite number",
                remedy="look at the weights of the model, or take dtype=float32",
            )
        scores = np.zeros(len(trajectory), np.float32)
        scores[places] = found
        return scores

    def _ask(self, message: bytes, count: int, seconds: float) -> NDArray[np.float32]:
        try:
            reply, frame = self._child.ask(message, seconds)
        except TimeoutError as error:
            raise self._failed(f"no answer for {seconds:g} s") from error
        except (EOFError, OSError) as error:
            raise (
                self._closed() if self._is_closed else self._failed(self._child.describe_end(END_SECONDS))
            ) from error
        answer = decode_answer(reply)
        if answer.problem:
            raise self._failed(answer.problem)
        return read_array(frame, np.float32, count, "scores")

    def _failed(self, seen: str) -> ScoreError:
        return ScoreError(
            f"{self._key}: the model of {self._settings.path} does not score",
            seen=f"{seen}; {describe_output(self._child.log)}",
            expected="log-probs of the sampled tokens",
            remedy="correct the cause, and go on with the run",
        )

    def _closed(self) -> ScoreError:
        return ScoreError(f"{self._key}: the scorer is closed", expected="scores asked for before the end of a run")


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """Names the key of a scorer in errors about its directory, which speak of the model that is trained."""
    try:
        yield
    except ConfigError as error:
        raise as_config_error(error, error.what.replace("model.path", f"{key}.path", 1)) from error


_Call = tuple[Trajectory, Future[NDArray[np.float32]]]


def _settle(future: Future[NDArray[np.float32]], compute: Callable[[], NDArray[np.float32]]) -> Exception | None:
    """Sets the result of a future, or its error; returns the error."""
    try:
        future.set_result(compute())
    except Exception as error:  # noqa: BLE001 - the thread boundary: whoever waits for the future gets it
        future.set_exception(error)
        return error
    return None
