from __future__ import annotations

from pathlib import Path

import pytest
import torch
from full_updates import full
from safetensors.torch import load_file

from moerl.contract import weight_update
from moerl.contract.weight_update import UpdateKind
from moerl.errors import WeightSyncError
from moerl.rollout.weight_staging import WeightStaging, held_dtypes


def _checkpoint(model, folder: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors that `save_pretrained` writes, under the names it writes."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def _state(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_checkpoint_arrives_bit_for_bit(make_model, tmp_path: Path, tied: bool, dtype: torch.dtype):
    source = make_model(seed=1, dtype=dtype, tie_word_embeddings=tied)
    target = make_model(seed=2, dtype=dtype, tie_word_embeddings=tied)
    checkpoint = _checkpoint(source, tmp_path)
    staging = WeightStaging(target, full(4, checkpoint), held_dtypes(target))
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in checkpoint
    assert ("lm_head.weight" in checkpoint) != tied
    items = list(checkpoint.items())
    staging.receive(items[:7])
    staging.receive(reversed(items[7:]))
    staging.commit()
    assert _same(_state(target), _state(source))


def test_nothing_changes_before_the_commit(make_model, tmp_path: Path):
    target = make_model(seed=2)
    before = _state(target)
    checkpoint = _checkpoint(make_model(seed=1), tmp_path)
    staging = WeightStaging(target, full(0, checkpoint), held_dtypes(target))
    staging.receive(checkpoint.items())
    assert _same(_state(target), before)


def test_tensors_are_cast_to_the_dtype_of_the_model(make_model, tmp_path: Path):
    source, target = make_model(seed=1), make_model(seed=2, dtype=torch.bfloat16)
    checkpoint = _checkpoint(source, tmp_path)
    staging = WeightStaging(target, full(0, checkpoint), held_dtypes(target))
    staging.receive(checkpoint.items())
    staging.commit()
    assert _same(_state(target), _state(source.bfloat16()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kind_that_requires_some_tensors_leaves_the_others_as_they_are(
    make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
):
    monkeypatch.setitem(weight_update.REQUIREMENTS, UpdateKind.FULL, lambda listed, held, tied: iter(()))
    source, target = make_model(seed=1, dtype=dtype), make_model(seed=2, dtype=dtype)
    target.float()  # numbers of the narrower type, computed with in a wider one
    expected = _state(target)
    name, expert = "model.layers.2.mlp.experts.down_proj", 3
    expected["model.norm.weight"] = _state(source)["model.norm.weight"].float() + 1
    expected[name][expert] = _state(source)[name][expert].float()
    brought = {
        "model.norm.weight": expected["model.norm.weight"],
        f"model.layers.2.mlp.experts.{expert}.down_proj.weight": expected[name][expert].clone(),
    }
    staging = WeightStaging(target, full(1, brought), dict.fromkeys(expected, dtype))
    staging.receive(brought.items())
    staging.commit()
    assert _same(_state(target), expected)


@pytest.mark.parametrize("fault", ["missing", "unknown", "misshaped", "twice"])
def test_a_set_that_is_not_whole_is_refused_and_the_old_weights_stay(make_model, tmp_path: Path, fault: str):
    target, checkpoint = make_model(seed=2), _checkpoint(make_model(seed=1), tmp_path)
    before, name = _state(target), "model.layers.2.mlp.experts.5.down_proj.weight"
    items = list(checkpoint.items())
    if fault == "missing":
        items = [item for item in items if item[0] != name]
    elif fault == "unknown":
        name = "model.layers.1.mlp.experts.0.up_proj.weight"
        items.append((name, torch.zeros(24, 32)))
    elif fault == "misshaped":
        items = [(key, tensor.T if key == name else tensor) for key, tensor in items]
    else:
        items.append((name, checkpoint[name]))
    staging = WeightStaging(target, full(9, checkpoint), held_dtypes(target))
    if fault == "missing":
        staging.receive(items)
    else:
        with pytest.raises(WeightSyncError, match=f"version 9.*{name}"):
            staging.receive(items)
    with pytest.raises(WeightSyncError, match=f"version 9.*{name}"):
        staging.commit()
    assert _same(_state(target), before)


@pytest.mark.parametrize("fault", ["missing", "unknown", "misshaped"])
def test_an_update_whose_list_is_not_that_of_the_model_is_refused_before_anything_comes(
    make_model, tmp_path: Path, fault: str
):
    target, listed = make_model(seed=2), dict(_checkpoint(make_model(seed=1), tmp_path))
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    if fault == "missing":
        del listed[name]
    elif fault == "unknown":
        name = "model.layers.1.mlp.experts.0.up_proj.weight"
        listed[name] = torch.zeros(24, 32)
    else:
        listed[name] = listed[name].T
    with pytest.raises(WeightSyncError, match=f"version 9.*not for the tensors of this engine; seen: 1: .*{name}"):
        WeightStaging(target, full(9, listed), held_dtypes(target))


def test_a_tied_head_may_come_along_but_must_agree(make_model, tmp_path: Path):
    source, target = (make_model(seed=seed, tie_word_embeddings=True) for seed in (1, 2))
    checkpoint = _checkpoint(source, tmp_path)
    head = checkpoint["model.embed_tokens.weight"].clone()
    listed = {"lm_head.weight": head, **checkpoint}
    staging = WeightStaging(target, full(0, listed), held_dtypes(target))
    staging.receive(listed.items())
    staging.commit()
    assert _same(_state(target), _state(source))
    before = _state(target)
    staging = WeightStaging(target, full(1, listed), held_dtypes(target))
    staging.receive([*checkpoint.items(), ("lm_head.weight", head + 1)])
    with pytest.raises(WeightSyncError, match=r"lm_head\.weight differs"):
        staging.commit()
    assert _same(_state(target), before)
