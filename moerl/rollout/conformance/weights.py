"""Weights that compute the same as those of a model directory, with their experts numbered otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from moerl.machine.model_files import stored_tensors
from moerl.models.description import ModelDescription

_EXPERT = re.compile(r"^(.*\.layers\.\d+\.mlp\.experts\.)(\d+)(\..+)$")
_ROUTER = re.compile(r"\.layers\.\d+\.mlp\.gate\.(weight|e_score_correction_bias)$")


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
