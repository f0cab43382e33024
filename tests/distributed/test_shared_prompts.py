"""A prompt that is computed once trains as if it were computed for each of its responses, in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import matrix
import numpy as np
import pytest
import tiny_moe
from matrix import Case
from packing_samples import fork_of, with_prompt_of
from ranks import Ranks

from moerl.batching.packing import PackOptions, pack_for_ranks, pack_text_for_ranks
from moerl.batching.rows import Padding
from moerl.contract.batch import TextSample
from moerl.contract.shares import cut_share
from moerl.contract.trajectory import ModelSpec
from moerl.errors import ReplayError

pytestmark = pytest.mark.timeout(900)

TP, PP, CP, EP = {"tensor": 2}, {"pipeline": 2}, {"context": 2}, {"expert": 2}
PROMPTS, LENGTHS = (14, 9, 20, 14), (30, 22, 27, 24, 29, 23, 30, 25)
FORKED, FORKS = 2, (30, 29)
CASES = [
    pytest.param(Case(1), id="one process"),
    pytest.param(Case(1, recompute="full"), id="full recompute"),
    pytest.param(Case(2, CP, recompute="selective"), id="CP2"),
    pytest.param(Case(2, TP), id="TP2", marks=pytest.mark.distributed),
    pytest.param(Case(2, PP), id="PP2", marks=pytest.mark.distributed),
    pytest.param(Case(2, EP), id="EP2", marks=pytest.mark.distributed),
    pytest.param(Case(4, CP | TP, recompute="full"), id="CP2-TP2", marks=pytest.mark.distributed),
    pytest.param(Case(4, TP | PP | EP), id="TP2-PP2-EP2", marks=pytest.mark.distributed),
]


def make_groups(seed: int) -> list[Any]:
    """Four groups of eight, some rows of their prompts and responses without captured routing; and of one member of
    each group two forks behind some of its sampled tokens."""
    samples: list[Any] = []
    for group, num_prompt in enumerate(PROMPTS):
        members = tiny_moe.make_samples(seed + 100 * group, LENGTHS, uncaptured=0.25, num_prompt=num_prompt)
        members = [members[0], *(with_prompt_of(members[0], other) for other in members[1:])]
        others = tiny_moe.make_samples(seed + 100 * group + 50, FORKS, uncaptured=0.25, num_prompt=num_prompt + 6)
        samples += [*members, *(fork_of(members[FORKED], other) for other in others)]
    return samples


def train(layout: Any, path: Path, case: Case, share_prompts: bool) -> dict[str, Any]:
    """Log-probs of every trained row, the gradient's norm, rows computed and proved, and the weights, after two
    steps."""
    trainer = matrix.build(layout, path, case)
    tables, norms, rows, verified = [], [], 0, 0
    for seed in (7, 8):
        batches, denominator = tiny_moe.shares(
            trainer, make_groups(seed), token_budget=256, uncaptured="live", share_prompts=share_prompts
        )
        report = trainer.step(batches, tiny_moe.policy_loss(trainer, batches, denominator), enforce=True)
        table = tiny_moe.row_table(trainer, batches, [row.logprobs_T for row in report.rows])
        tables.append(table + np.array([100.0 * seed, 0, 0]) if len(table) else table)
        norms.append(report.update.grad_norm)
        rows += sum(int((~batch.is_pad).sum()) for batch in batches) if tiny_moe.speaks(trainer) else 0
        verified += report.rows_verified
    return {
        "logprobs": np.concatenate(tables),
        "grad_norms": norms,
        "rows": rows,
        "verified": verified,
        "weights": tiny_moe.exported(trainer),
    }


def trained(ranks: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """By sample and position, where the next token was sampled."""
    found = {(int(s), int(t)): value for rank in ranks for s, t, value in rank["logprobs"]}
    samples = {100 * seed + i: sample for seed in (7, 8) for i, sample in enumerate(make_groups(seed))}
    return {
        (index, t): found[index, t]
        for index, sample in samples.items()
        for t in np.flatnonzero(sample.trajectory.sampled[1:]).tolist()
    }


@pytest.fixture(scope="module")
def apart(untied: Path, one_process: Ranks) -> list[dict[str, Any]]:
    """The steps of one process that computes every prompt for each of its responses."""
    return one_process.run(train, untied, Case(1), False)


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_with_every_prompt_computed_again(
    case: Case, untied: Path, processes: Any, apart: list[dict[str, Any]]
) -> None:
    ranks = processes(case.processes).run(train, untied, case, True, **case.sizes)
    found, expected = trained(ranks), trained(apart)
    computed, again = sum(rank["rows"] for rank in ranks), sum(rank["rows"] for rank in apart)
    assert computed < 0.8 * again
    assert max(abs(found[row] - expected[row]) for row in expected) < 1e-5
    np.testing.assert_allclose(ranks[0]["grad_norms"], apart[0]["grad_norms"], rtol=1e-4)
    assert tiny_moe.largest_difference(ranks[0]["weights"], apart[0]["weights"]) < 1e-6


def test_shared_rows_are_computed_and_proved_once(
    untied: Path, one_process: Ranks, apart: list[dict[str, Any]]
) -> None:
    (shared,) = one_process.run(train, untied, Case(1), True)
    saved = 2 * sum((len(LENGTHS) - 2) * (num - 1) + len(FORKS) * (num + 6 - 1) for num in PROMPTS)
    assert shared["rows"] == apart[0]["rows"] - saved
    assert 0 < shared["verified"] < apart[0]["verified"]


def refused(layout: Any, path: Path) -> str:
    """Returns the refusal of a step in which two shared rows have exchanged their experts."""
    trainer = matrix.build(layout, path, Case(1))
    batches, denominator = tiny_moe.shares(
        trainer, make_groups(7), token_budget=1024, uncaptured="live", share_prompts=True
    )
    (batch,) = batches
    assert batch.expert_ids is not None
    assert batch.prefix_of is not None
    start = int(batch.cu_seqlens[int(batch.prefix_of.max())])
    captured = np.flatnonzero(batch.routed[start:])[:2] + start
    experts = batch.expert_ids.copy()
    experts[captured] = experts[captured[::-1]]
    changed = replace(batch, expert_ids=experts)
    with pytest.raises(ReplayError) as caught:
        trainer.step([changed], tiny_moe.policy_loss(trainer, [changed], denominator), enforce=True)
    return str(caught.value)


def test_a_shared_row_with_the_experts_of_another_is_refused(untied: Path, one_process: Ranks) -> None:
    (message,) = one_process.run(refused, untied)
    assert "checksum" in message or "MoE layer" in message


# --- what supervised texts begin with --------------------------------------------------------------------------------

TEXT_CASES = [
    pytest.param(Case(1), id="one process"),
    pytest.param(Case(2, CP), id="CP2"),
    pytest.param(Case(4, TP | PP | EP), id="TP2-PP2-EP2", marks=pytest.mark.distributed),
]


def make_texts(seed: int) -> list[TextSample]:
    """24 texts that begin with the same 17 tokens, of which none is learned."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, tiny_moe.SPEC.vocab_size, 17)
    texts = []
    for length in rng.integers(5, 20, 24).tolist():
        token_ids = np.concatenate([common, rng.integers(0, tiny_moe.SPEC.vocab_size, length)]).astype(np.int32)
        texts.append(TextSample(token_ids, np.arange(len(token_ids)) >= 20))
    return texts


def learn(layout: Any, path: Path, case: Case, share_prompts: bool) -> dict[str, Any]:
    """Log-probs of the rows that are learned, rows computed, the gradient's norm and the weights after a step."""
    from moerl.trainer.losses import TextLoss

    trainer = matrix.build(layout, path, case)
    dims = layout.dims
    options = PackOptions(256, Padding.of(dims), count_multiple=dims.microbatch_multiple, share_prompts=share_prompts)
    ranks = pack_text_for_ranks(make_texts(5), dims.data, options)
    num_learned = tiny_moe.num_trained([batch for rank in ranks for batch in rank])
    batches = [cut_share(batch, layout) for batch in ranks[layout.data_rank]]
    report = trainer.step(batches, TextLoss(batches, trainer.spec.vocab_size, num_learned), enforce=False)
    return {
        "loss": sum(float(row.losses_T.sum()) for row in report.rows) if tiny_moe.speaks(trainer) else 0.0,
        "rows": sum(int((~batch.is_pad).sum()) for batch in batches) if tiny_moe.speaks(trainer) else 0,
        "grad_norm": report.update.grad_norm,
        "weights": tiny_moe.exported(trainer),
    }


@pytest.mark.parametrize("case", TEXT_CASES)
def test_texts_are_learned_as_if_each_were_computed_from_its_first_token(
    case: Case, untied: Path, processes: Any, one_process: Ranks
) -> None:
    (apart,) = one_process.run(learn, untied, Case(1), False)
    ranks = processes(case.processes).run(learn, untied, case, True, **case.sizes)
    assert sum(rank["rows"] for rank in ranks) < 0.8 * apart["rows"]
    assert sum(rank["loss"] for rank in ranks) == pytest.approx(apart["loss"], rel=1e-5)
    assert ranks[0]["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-4)
    assert tiny_moe.largest_difference(ranks[0]["weights"], apart["weights"]) < 1e-6


def scores(layout: Any, path: Path, spec: ModelSpec) -> tuple[dict[tuple[int, int], float], ...]:
    """Log-probs of all sampled tokens by sample and position, with every prompt computed again and with shared ones."""
    from moerl.models.description import read_model
    from moerl.trainer.losses import Scorer
    from moerl.trainer.model import ModelOptions
    from moerl.trainer.trainer import MegatronTrainer

    trainer = MegatronTrainer(read_model(path), layout, ModelOptions(), None)
    first, *others = families.make_samples(spec, 5, (24, 24, 24, 24))
    samples = [first, *(with_prompt_of(first, other) for other in others)]
    found: list[dict[tuple[int, int], float]] = []
    for share_prompts in (False, True):
        ((batch,),) = pack_for_ranks(samples, 1, PackOptions(256, share_prompts=share_prompts), replay=True)
        assert (batch.prefix_of is not None) == share_prompts
        (rows,) = trainer.score([cut_share(batch, layout)], Scorer([batch], keep_mask=False), enforce=True)
        at = zip(batch.sample_index, batch.position_ids, rows.logprobs_T.tolist(), batch.loss_mask, strict=True)
        found.append({(int(sample), int(position)): value for sample, position, value, is_trained in at if is_trained})
    return found[0], found[1]


@pytest.mark.parametrize("family", list(families.FAMILIES))
def test_every_family_scores_the_same_with_shared_prompts(family: str, tmp_path: Path, one_process: Ranks) -> None:
    path = families.write_model(tmp_path, families.FAMILIES[family], seed=3)
    ((apart, together),) = one_process.run(scores, path, families.FAMILIES[family].spec())
    assert apart.keys() == together.keys()
    assert len(apart) == 4 * 16
    assert max(abs(apart[row] - together[row]) for row in apart) < 1e-5
