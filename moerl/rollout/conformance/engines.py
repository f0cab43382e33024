"""Our own engines under test: any `PolicyEngine`, and weights that compute the same as its own, with their experts
numbered otherwise. Runs in the engine's process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from moerl.contract.ports import PolicyEngine, RolloutRecord
from moerl.contract.weight_update import UpdateKind, WeightUpdate
from moerl.errors import ending
from moerl.machine.model_files import stored_tensors
from moerl.models.description import ModelDescription
from moerl.rollout.conformance.subject import AcrossUpdate, Answer, Ask, CannotAskError, SubjectFacts

_EXPERT = re.compile(r"^(.*\.layers\.\d+\.mlp\.experts\.)(\d+)(\..+)$")
_ROUTER = re.compile(r"\.layers\.\d+\.mlp\.gate\.(weight|e_score_correction_bias)$")


class EngineSubject:
    """A `Subject` around an engine that implements our port.

    The port has no requests that go on behind sampled tokens: they are put as prompts, and of their rows those before
    `Ask.first_row` are left out.
    """

    def __init__(self, engine: PolicyEngine, facts: SubjectFacts, weights: RenumberedWeights | None = None) -> None:
        """Takes an engine. weights: those that it holds, and others; None if they are not to be replaced."""
        self._engine, self.facts, self._weights = engine, facts, weights

    def ask(self, asks: Sequence[Ask]) -> list[Answer]:
        answers = self._collect(asks, lambda: None)
        return [answers[number] for number in range(len(asks))]

    def abort_midway(self, asks: Sequence[Ask]) -> list[Answer | None]:
        answers = self._collect(asks, self._engine.abort)
        return [answers.get(number) for number in range(len(asks))]

    def across_update(self, asks: Sequence[Ask]) -> AcrossUpdate:
        renumbered_LE = self._sets().renumbered
        old = self._engine.handshake().policy_version
        with ending(lambda: self.update(old, renumbered=False)):
            answers = self._collect(asks, lambda: self.update(old + 1, renumbered=True))
        ordered = tuple(answers[number] for number in range(len(asks)))
        return AcrossUpdate(ordered, old, old + 1, renumbered_LE)

    def close(self) -> None:
        self._engine.close()

    def update(self, version: int, *, renumbered: bool) -> None:
        """Sends one of the two sets of weights.

        Raises:
            CannotAskError: there is none.
        """
        weights = self._sets()
        self._engine.begin_update(WeightUpdate(version, UpdateKind.FULL, weights.shapes))
        self._engine.receive(weights.tensors(renumbered=renumbered))
        self._engine.end_update()

    def _sets(self) -> RenumberedWeights:
        if self._weights is None:
            raise CannotAskError("the engine's weights are not to be replaced")
        return self._weights

    def _collect(self, asks: Sequence[Ask], after_first: Callable[[], None]) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        requests = [ask.request(str(number)) for number, ask in enumerate(asks)]
        for record in self._engine.generate(requests):
            if record.refusal is not None:
                raise record.refusal
            answers[int(record.rollout_id)] = _answer(asks[int(record.rollout_id)], record)
            if len(answers) == 1:
                after_first()
        return answers


def _answer(ask: Ask, record: RolloutRecord) -> Answer:
    values, start = record.values, len(ask.prompt_ids)
    kept = values["kept"]
    return Answer(
        token_ids=values["token_ids"][start:],
        finish_reason=str(values["finish_reason"]),
        expert_ids=values["expert_ids"][ask.first_row :],
        logprobs=values["rollout_logprobs"][start:],
        kept_logmass=values["kept_logmass"][start:],
        kept_sets=tuple(kept.ids[a:b] for a, b in pairwise(kept.offsets[start:].tolist())),
        versions=values["policy_versions"][start:],
    )


class RenumberedWeights:
    """The weights of a model directory as they are, and with every expert moved on by one group.

    Routers that choose groups first choose the same ones: whole groups move. Without groups an expert is a group.

    Args:
        shapes: of the tensors that an engine holds, by checkpoint name; others of the directory are left out.
    """

    def __init__(self, model: ModelDescription, shapes: Mapping[str, tuple[int, ...]]) -> None:
        assert model.folder is not None
        self.shapes = shapes
        self._folder, self._num_experts = model.folder, model.num_experts
        groups = int(model.hf_config.get("n_group") or 1)
        self._shift = model.num_experts // groups if groups > 1 else 1
        self._num_layers = len(model.moe_layers)

    @property
    def renumbered(self) -> NDArray[np.int64]:
        """int64 [L, E]: the new number of each expert."""
        numbers = (np.arange(self._num_experts) + self._shift) % self._num_experts
        return np.tile(numbers, (self._num_layers, 1))

    def tensors(self, *, renumbered: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors by checkpoint name."""
        for file in sorted({tensor.file for tensor in stored_tensors(self._folder).values()}):
            for name, tensor in load_file(file).items():
                if name not in self.shapes:
                    continue
                yield self._renumber(name, tensor) if renumbered else (name, tensor)

    def _renumber(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        found = _EXPERT.match(name)
        if found is not None:
            number = (int(found[2]) + self._shift) % self._num_experts
            return f"{found[1]}{number}{found[3]}", tensor
        if _ROUTER.search(name):
            return name, tensor.roll(self._shift, 0)
        return name, tensor
