from __future__ import annotations

import numpy as np
import pytest
import torch

from moerl.contract.trajectory import SamplingParams
from moerl.errors import EngineError
from moerl.rollout.device_sampler import Kinds, draw_rows
from moerl.rollout.sampler import RowParams, require_finite, sample, seeded_uniforms
from moerl.rollout.sampler_kernel import Cuts, Draws, StepResult


@pytest.fixture(autouse=True, params=["on the host", "as on a device"])
def _both_implementations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Tensors on the host are sampled by a kernel; what runs on a GPU runs here, too."""
    if request.param == "as on a device":
        monkeypatch.setitem(globals(), "sample", _sample_on_device)


def _sample_on_device(logits: torch.Tensor, params: RowParams, u: np.ndarray, *, capture: bool = True) -> StepResult:
    cuts = Cuts(*(torch.from_numpy(each) for each in params.cuts))
    drawn = draw_rows(logits, cuts, torch.from_numpy(u), Kinds.of(params, logits.shape[1]))
    require_finite(drawn.log_z.numpy())
    sizes, mass, kept_ids = (each.numpy() for each in (drawn.kept_sizes, drawn.kept_logmass, drawn.kept_ids))
    if not capture:
        sizes, mass = np.zeros_like(sizes), np.zeros_like(mass)
    token_ids, logprobs, log_z = (each.numpy() for each in (drawn.token_ids, drawn.rollout_logprobs, drawn.log_z))
    return Draws(token_ids, logprobs, mass, log_z, sizes, kept_ids[: sizes.sum()])


MIXED = [
    SamplingParams(seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2),
    SamplingParams(top_k=5, seed=3),
    SamplingParams(top_k=7, top_p=0.8, min_p=0.05, temperature=1.3, seed=4),
    SamplingParams(min_p=0.2, seed=5),
    SamplingParams(temperature=0.0, seed=6),
    SamplingParams(top_k=1, seed=7),
    SamplingParams(top_k=4000, top_p=0.999999, seed=8),
    SamplingParams(temperature=2.0, seed=9),
]


def _oracle(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Final weights of one row, float64 [V], written straight from the contract; 0 outside the kept set."""
    num_vocab = len(logits)
    if p.is_greedy:
        weights = np.zeros(num_vocab)
        weights[np.argmax(logits)] = 1.0
        return weights
    z = logits.astype(np.float64) / np.float32(p.temperature)
    probs = np.exp(z - z.max())
    probs /= probs.sum()
    order = np.lexsort((np.arange(num_vocab), -z))
    before = np.concatenate([[0.0], np.cumsum(probs[order])[:-1]])
    inside = (before <= p.top_p) | (p.top_p >= 1)
    is_kept = inside & (np.arange(num_vocab) < (p.effective_top_k or num_vocab))
    is_kept &= probs[order] >= p.min_p * probs.max()
    weights = np.zeros(num_vocab)
    weights[order[is_kept]] = probs[order[is_kept]]
    return weights


def _logits(num_rows: int, num_vocab: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(num_rows, num_vocab, generator=torch.Generator().manual_seed(seed))


def _draw(logits: torch.Tensor, params: list[SamplingParams], position: int = 3, capture: bool = True) -> StepResult:
    seeds = np.array([p.seed for p in params], np.uint64)
    u = seeded_uniforms(seeds, np.full(len(params), position))
    return sample(logits, RowParams.of(params), u, capture=capture)


def _kept(draws: StepResult) -> list[list[int]]:
    return [ids.tolist() for ids in np.split(draws.kept_ids, np.cumsum(draws.kept_sizes)[:-1])]


@pytest.mark.parametrize("num_vocab", [12, 87, 6000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_rows_keep_the_sets_of_the_joint_semantics(num_vocab: int, dtype: torch.dtype):
    logits = _logits(len(MIXED), num_vocab, seed=num_vocab).to(dtype)
    draws = _draw(logits, MIXED)
    for row, (params, kept) in enumerate(zip(MIXED, _kept(draws), strict=True)):
        weights = _oracle(logits[row].float().numpy(), params)
        assert kept == (np.flatnonzero(weights).tolist() if params.cuts else [])


@pytest.mark.parametrize("num_vocab", [12, 87, 6000])
def test_logprobs_and_kept_mass_match_a_float64_oracle(num_vocab: int):
    logits = _logits(len(MIXED), num_vocab, seed=num_vocab)
    draws = _draw(logits, MIXED)
    for row, params in enumerate(MIXED):
        weights = _oracle(logits[row].numpy(), params)
        token = int(draws.token_ids[row])
        assert weights[token] > 0
        expected_logprob = np.log(weights[token] / weights.sum())
        expected_mass = 0.0 if params.is_greedy else np.log(weights.sum())
        assert float(draws.rollout_logprobs[row]) == pytest.approx(expected_logprob, abs=2e-6)
        assert float(draws.kept_logmass[row]) == pytest.approx(expected_mass, abs=2e-6)
    assert (draws.rollout_logprobs <= 0).all()
    assert (draws.kept_logmass <= 0).all()


def test_a_negative_zero_is_as_large_as_zero():
    draws = _draw(torch.tensor([[-1.0, -0.0, 0.0]]), [SamplingParams(top_k=1)])
    assert _kept(draws) == [[1]]


def test_without_top_p_no_mass_is_cut_off():
    # The float32 sum of these probabilities reaches 1.0000001 before the last two.
    draws = _draw(torch.tensor([[2.8, 4.1, 3.4, 18.5]]), [SamplingParams(top_k=4)])
    assert _kept(draws) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("num_vocab", [64, 6000])
def test_sharp_rows_keep_every_id_that_top_k_and_min_p_allow(num_vocab: int):
    logits = _logits(300, num_vocab, seed=7, scale=6.0)
    together = [SamplingParams(top_k=40), SamplingParams(top_k=40, min_p=1e-12), SamplingParams(top_k=9, top_p=0.8)]
    draws = _draw(logits, [together[i % 3] for i in range(300)])
    for row, kept in enumerate(_kept(draws)):
        weights = _oracle(logits[row].numpy(), together[row % 3])
        assert kept == np.flatnonzero(weights).tolist()
        assert int(draws.token_ids[row]) in kept


@pytest.mark.parametrize("top_p", [0.9999999, 1 - 1e-6, 0.999, 0.5])
@pytest.mark.parametrize("num_vocab", [64, 6000])
def test_a_top_p_near_one_cuts_what_lies_beyond_it_and_no_more(num_vocab: int, top_p: float):
    logits = _logits(200, num_vocab, seed=8, scale=6.0)
    params = SamplingParams(top_p=top_p)
    draws = _draw(logits, [params] * 200)
    for row, kept in enumerate(_kept(draws)):
        weights = _oracle(logits[row].numpy(), params)
        assert kept == np.flatnonzero(weights).tolist()
        assert int(draws.token_ids[row]) in kept


@pytest.mark.parametrize("offset", [0.0, 20.0, 1000.0])
def test_rounding_never_leaves_a_mass_above_one(offset: float):
    logits = _logits(2000, 100, seed=9, scale=3.0) + offset
    logits[:, 60:] -= 60.0
    draws = _draw(logits, [SamplingParams(top_k=60, seed=i) for i in range(2000)])
    assert (draws.kept_logmass <= 0).all()
    assert (draws.rollout_logprobs <= 0).all()


def test_top_k_and_top_p_are_joint_and_not_one_after_the_other():
    # Filtering one after the other would renormalise over the top 2 first, where 0.5 / 0.7 exceeds 0.6.
    logits = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    draws = _draw(logits, [SamplingParams(top_k=2, top_p=0.6)])
    assert _kept(draws) == [[0, 1]]


@pytest.mark.parametrize("num_vocab", [10, 5000])
def test_ties_at_the_kth_place_go_to_the_smaller_token_ids(num_vocab: int):
    logits = torch.zeros(3, num_vocab)
    logits[0, num_vocab - 1] = 1.0
    logits[1, [3, 7]] = 1.0
    params = [SamplingParams(top_k=4), SamplingParams(top_k=1), SamplingParams(top_p=0.3)]
    kept = _kept(_draw(logits, params))
    assert kept[0] == [0, 1, 2, num_vocab - 1]
    assert kept[1] == [3]
    assert kept[2] == list(range(len(kept[2])))
    assert 0.3 * num_vocab <= len(kept[2]) <= 0.3 * num_vocab + 1.01


def test_top_p_alone_is_bounded_by_the_finite_top_k():
    draws = _draw(torch.zeros(1, 20000), [SamplingParams(top_p=0.99)])
    assert draws.kept_sizes.tolist() == [4096]
    assert float(draws.kept_logmass[0]) == pytest.approx(np.log(4096 / 20000), abs=1e-5)


def test_ids_with_no_weight_left_are_not_listed():
    logits = torch.tensor([[0.0, -500.0, -1.0, -torch.inf]])
    assert _kept(_draw(logits, [SamplingParams(top_k=4)])) == [[0, 2]]


def test_a_kept_set_that_is_the_whole_vocabulary_has_mass_exactly_one():
    draws = _draw(_logits(40, 30), [SamplingParams(top_k=30, seed=i) for i in range(40)])
    assert draws.kept_sizes.tolist() == [30] * 40
    assert (draws.kept_logmass == 0).all()


def test_greedy_takes_the_first_maximum_and_is_a_singleton():
    logits = torch.zeros(1, 50)
    logits[0, [11, 30]] = 2.0
    draws = _draw(logits, [SamplingParams(temperature=0.0)])
    assert draws.token_ids.tolist() == [11]
    assert _kept(draws) == [[11]]
    assert (float(draws.rollout_logprobs[0]), float(draws.kept_logmass[0])) == (0.0, 0.0)


def test_uniforms_depend_on_seed_and_position_alone_and_are_spread_evenly():
    seeds = np.arange(2000, dtype=np.uint64)
    u = seeded_uniforms(seeds, np.full(2000, 5))
    assert u[7] == seeded_uniforms(np.array([7], np.uint64), np.array([5]))[0]
    assert (u >= 0).all()
    assert (u < 1).all()
    assert len(np.unique(u)) == 2000
    along = seeded_uniforms(np.full(2000, 3, np.uint64), np.arange(2000))
    for values in (u, along):
        counts, _ = np.histogram(values, bins=20, range=(0, 1))
        assert ((counts - 100) ** 2 / 100).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.07


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(top_p=0.8, temperature=1.5), SamplingParams(top_k=6)],
    ids=["open", "top_p", "top_k"],
)
def test_draws_follow_the_distribution(params: SamplingParams):
    num_draws, num_vocab = 20000, 15
    logits = _logits(1, num_vocab, seed=4, scale=1.0)
    rows = [params] * num_draws
    u = seeded_uniforms(np.arange(num_draws, dtype=np.uint64), np.full(num_draws, 9))
    draws = sample(logits.expand(num_draws, -1), RowParams.of(rows), u)
    weights = _oracle(logits[0].numpy(), params)
    expected = num_draws * weights / weights.sum()
    seen = np.bincount(draws.token_ids, minlength=num_vocab)
    support = expected > 0
    assert (seen[~support] == 0).all()
    chi_square = ((seen - expected)[support] ** 2 / expected[support]).sum()
    assert chi_square < 36.1  # 14 degrees of freedom, p = 0.001


def test_a_row_does_not_depend_on_its_batchmates():
    logits = _logits(len(MIXED), 500)
    together = _draw(logits, MIXED)
    backwards = _draw(logits.flip(0), MIXED[::-1])
    assert together.token_ids.tolist() == backwards.token_ids[::-1].tolist()
    assert _kept(together) == _kept(backwards)[::-1]
    for row, params in enumerate(MIXED):
        alone = _draw(logits[row : row + 1], [params])
        assert int(alone.token_ids[0]) == int(together.token_ids[row])
        assert float(alone.rollout_logprobs[0]) == pytest.approx(float(together.rollout_logprobs[row]), abs=1e-6)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9)], ids=["open", "cut"])
@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_draw_a_token_with_weight(params: SamplingParams, u: float):
    logits = _logits(64, 300)
    logits[:, 0] = -torch.inf
    logits[:, -1] = -torch.inf
    draws = sample(logits, RowParams.of([params] * 64), np.full(64, u))
    assert torch.isfinite(logits.gather(1, torch.from_numpy(draws.token_ids)[:, None])).all()
    assert np.isfinite(draws.rollout_logprobs).all()


def test_capture_does_not_change_the_draws():
    logits = _logits(len(MIXED), 700)
    with_capture, without = _draw(logits, MIXED), _draw(logits, MIXED, capture=False)
    assert np.array_equal(with_capture.token_ids, without.token_ids)
    assert np.array_equal(with_capture.rollout_logprobs, without.rollout_logprobs)
    assert len(without.kept_ids) == 0
    assert not without.kept_sizes.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_are_refused(bad: float):
    logits = _logits(3, 20)
    logits[1, 4] = bad
    with pytest.raises(EngineError, match=r"rows \[1\] of 3"):
        _draw(logits, [SamplingParams(top_k=3)] * 3)
