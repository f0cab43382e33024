"""A transformers model with a parameter that no file fills is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.errors import EngineError
from moerl.rollout.loading import load_model


@pytest.mark.parametrize("missing", ["model.norm.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight"])
def test_a_parameter_that_would_be_random_is_refused(missing: str, untied: Path, tmp_path: Path) -> None:
    tensors = load_file(untied / "model.safetensors")
    (tmp_path / "config.json").write_bytes((untied / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_model(tmp_path, dtype=torch.float32)
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=f"1 without a tensor, first '{missing}'"):
        load_model(tmp_path, dtype=torch.float32)


def test_a_tied_head_needs_no_tensor(tied: Path) -> None:
    load_model(tied, dtype=torch.float32)
