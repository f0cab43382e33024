"""Every model family, in every layout, is the model that transformers has, and goes back as it came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import tiny_moe
import torch
from families import FAMILIES
from ranks import Ranks
from safetensors.torch import load_file

from moerl.contract.batch import Microbatch
from moerl.contract.trajectory import ModelSpec
from moerl.errors import ConfigError
from moerl.models.description import read_model

LENGTHS = (5, 30, 17, 41, 9, 24)
SEQUENCE_MULTIPLE = 8
"""Multiple of packed sequences: enough for two zig-zag chunks on two context ranks, cut again over two tensor ranks."""

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "TP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "EP2": (2, {"expert": 2}),
    "CP2": (2, {"context": 2}),
    "TP2-EP2": (4, {"tensor": 2, "expert": 2}),
    "TP2-PP2-EP2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
}
"""Processes and parallel sizes; data parallelism takes what is left."""
QUICK = {("deepseek_v3", "TP2"), ("deepseek_v3", "VPP2"), ("glm4_moe", "PP2")}
"""Besides each family in one process, for `make test`; the others, and variants, are for `make test-distributed`."""
CASES = [
    pytest.param(
        name,
        *LAYOUTS[layout],
        id=f"{name}-{layout}",
        marks=() if (layout == "one" and "-" not in name) or (name, layout) in QUICK else pytest.mark.distributed,
    )
    for name in FAMILIES
    for layout in LAYOUTS
    if not (name.startswith("olmoe") and "TP2" in layout)
]


def compute(layout: Any, path: Path, spec: ModelSpec, batches: list[list[Microbatch]]) -> dict[str, Any]:
    """Log-probs under natural and enforced routing, the exported weights, and one step of supervised training."""
    from moerl.contract.shares import cut_share
    from moerl.trainer.losses import Scorer, TextLoss
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.trainer import MegatronTrainer

    trainer = MegatronTrainer(read_model(path), layout, ModelOptions(), tiny_moe.OPTIMIZER, 8)
    local = [cut_share(batch, trainer.layout) for batch in batches[layout.data_rank]]
    weights = {name: tensor.clone() for name, tensor in trainer.export()}
    result: dict[str, Any] = {"weights": weights}
    for name, enforce in (("natural", False), ("enforced", True)):
        rows = trainer.score(local, Scorer(local, keep_mask=False), enforce=enforce)
        result[name] = [
            (
                batch.sample_index[~batch.is_pad],
                batch.position_ids[~batch.is_pad],
                row.logprobs_T.numpy()[~batch.is_pad],
            )
            for batch, row in zip(local, rows, strict=bool(rows))
        ]
    denominator = tiny_moe.num_trained([batch for part in batches for batch in part])
    report = trainer.step(local, TextLoss(local, trainer.spec.vocab_size, denominator), enforce=True)
    assert report.update is not None
    return result | {"grad_norm": report.update.grad_norm}


def real_rows(batch: Microbatch, scores: Any) -> tuple[np.ndarray, ...]:
    """Sample, position and log-prob of every row but pad rows."""
    real = ~batch.is_pad
    return batch.sample_index[real], batch.position_ids[real], scores.logprobs_T.numpy()[real]


class Expected:
    """Log-probs and norm of the gradient that transformers computes on the same weights and sequences."""

    def __init__(self, path: Path, name: str, samples: list[Any]) -> None:
        judge = families.Judge(path, FAMILIES[name])
        self.natural, self.enforced = [], []
        total = torch.zeros(())
        for sample in samples:
            with torch.no_grad():
                natural_TV = judge.logits(sample.trajectory.token_ids[:-1])
            enforced_TV = judge.logits(sample.trajectory.token_ids[:-1], sample.trajectory.expert_ids)
            for logits_TV, logprobs in ((natural_TV, self.natural), (enforced_TV, self.enforced)):
                logprobs_TV = tiny_moe.support_logprobs(logits_TV, sample, keep_mask=False)
                logprobs.append(tiny_moe.target_logprobs(logprobs_TV, sample).detach().numpy())
            targets = torch.from_numpy(sample.trajectory.token_ids[1:].astype(np.int64))
            total = (
                total
                - enforced_TV.log_softmax(-1)
                .gather(1, targets[:, None])[torch.from_numpy(sample.trajectory.sampled[1:].copy())]
                .sum()
            )
        (total / sum(int(sample.trajectory.sampled[1:].sum()) for sample in samples)).backward()
        self.grad_norm = float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in judge.gradients().values())))


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Model path, samples and `Expected` by family, each made once."""
    return {"folder": tmp_path_factory.mktemp("families")}


def case(cases: dict[str, Any], name: str) -> tuple[Path, list[Any], Expected]:
    if name not in cases:
        path = families.write_model(cases["folder"] / name, FAMILIES[name], seed=3)
        samples = families.make_samples(FAMILIES[name].spec(), 61, LENGTHS)
        cases[name] = path, samples, Expected(path, name, samples)
    return cases[name]


def processes(request: pytest.FixtureRequest, number: int) -> Ranks:
    return request.getfixturevalue({1: "one_process", 2: "two_processes", 4: "four_processes"}[number])


@pytest.mark.parametrize(("name", "number", "sizes"), CASES)
def test_a_family_is_the_model_of_transformers_and_comes_back_bit_for_bit(
    name: str, number: int, sizes: dict[str, int], cases: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    path, samples, expected = case(cases, name)
    num_data = number // int(np.prod([sizes.get(axis, 1) for axis in ("tensor", "pipeline", "context")]))
    batches = tiny_moe.pack(
        samples,
        num_ranks=num_data,
        multiple=SEQUENCE_MULTIPLE,
        sequence=SEQUENCE_MULTIPLE,
        # An interleaved schedule wants as many microbatches as there are stages, or a multiple.
        count_multiple=sizes.get("pipeline", 1),
    )
    results = processes(request, number).run(compute, path, FAMILIES[name].spec(), batches, **sizes)
    original = load_file(path / "model.safetensors")
    for result in results:
        assert result["weights"].keys() == original.keys()
        for tensor_name, tensor in original.items():
            assert result["weights"][tensor_name].dtype == tensor.dtype
            assert torch.equal(result["weights"][tensor_name], tensor), tensor_name
        assert result["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-4)
    for kind in ("natural", "enforced"):
        assert_logprobs(results, kind, getattr(expected, kind), samples)


def assert_logprobs(results: list[dict[str, Any]], kind: str, expected: list[np.ndarray], samples: list[Any]) -> None:
    """Compares every sampled row of every sample, wherever it was scored."""
    seen = [np.zeros(len(logprobs_T), np.bool_) for logprobs_T in expected]
    for index, position, logprobs in (part for result in results for part in result[kind]):
        for sample in np.unique(index):
            rows = position[index == sample]
            rows_sampled = samples[sample].trajectory.sampled[1:][rows]
            difference = np.abs(logprobs[index == sample] - expected[sample][rows])[rows_sampled]
            assert difference.max(initial=0.0) <= 1e-5
            seen[sample][rows] = True
    assert all(rows.all() for rows in seen)


def build(layout: Any, path: Path, spec: ModelSpec) -> None:
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.trainer import MegatronTrainer

    MegatronTrainer(read_model(path), layout, ModelOptions(), None)


def test_a_family_that_cannot_be_cut_over_tensor_ranks_is_refused(cases: dict[str, Any], two_processes: Ranks) -> None:
    path, _, _ = case(cases, "olmoe")
    with pytest.raises(ConfigError, match=r"parallel\.tensor with a model of type olmoe"):
        two_processes.run(build, path, FAMILIES["olmoe"].spec(), tensor=2)
