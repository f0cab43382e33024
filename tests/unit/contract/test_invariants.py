"""Every invariant, broken one by one in an otherwise valid trajectory, is refused under its own reason."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from factories import FULL, GREEDY, NUCLEUS, SPEC, make_trajectory, trajectories, values_of
from hypothesis import given, settings

from moerl.contract.invariants import check_trajectory
from moerl.contract.reasons import Reason
from moerl.contract.requirements import MAX_NAMES, MAX_TEXT_BYTES
from moerl.contract.trajectory import KeptSets, Lineage, ModelSpec, SamplingParams, Trajectory, Turn, TurnKind
from moerl.errors import ContractError

Values = dict[str, Any]


class Text(str):
    """Equal to anything, and not to be looked at."""

    __slots__ = ()
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __repr__(self) -> str:
        raise RuntimeError("looked at")


class Whole(int):
    def __repr__(self) -> str:
        raise RuntimeError("looked at")


class Named(dict[str, float]):
    pass


class Array(np.ndarray):
    pass


HUGE = 10**5000
"""Python refuses to write it as a decimal."""


# Rows 0-2 prompt, 3-7 sampled from kept sets.
BASE = make_trajectory(np.random.default_rng(7), scores={"teacher": np.zeros(8, np.float32)})


def put(name: str, index: Any, value: Any) -> Callable[[Values], None]:
    """Breaks one element of one array."""

    def breaks(values: Values) -> None:
        values[name][index] = value

    return breaks


def swap_in(name: str, make: Callable[[Any], Any]) -> Callable[[Values], None]:
    """Replaces one field by a function of itself."""

    def breaks(values: Values) -> None:
        values[name] = make(values[name])

    return breaks


def replaced(name: str, **changes: Any) -> Callable[[Values], None]:
    return swap_in(name, lambda value: dataclasses.replace(value, **changes))


def turns(*spans: tuple[int, int, TurnKind, SamplingParams | None]) -> Callable[[Values], None]:
    return swap_in("turns", lambda _: tuple(Turn(*span) for span in spans))


def sampling(params: Any) -> Callable[[Values], None]:
    return turns((0, 3, TurnKind.PROMPT, None), (3, 8, TurnKind.SAMPLED, params))


def kept_row(t: int, ids: list[int]) -> Callable[[Values], None]:
    """Replaces the kept set of token t, offsets adjusted."""

    def breaks(values: Values) -> None:
        kept = values["kept"]
        rows = [kept.ids[kept.offsets[i] : kept.offsets[i + 1]] for i in range(len(kept.offsets) - 1)]
        rows[t] = np.array(ids, np.int32)
        offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
        values["kept"] = KeptSets(offsets, np.concatenate(rows))

    return breaks


def offset(t: int, value: int) -> Callable[[Values], None]:
    def breaks(values: Values) -> None:
        values["kept"].offsets[t] = value

    return breaks


def all_of(*steps: Callable[[Values], None]) -> Callable[[Values], None]:
    def breaks(values: Values) -> None:
        for step in steps:
            step(values)

    return breaks


TOKEN = int(BASE.token_ids[5])
OTHER = (TOKEN + 1) % SPEC.vocab_size
BROKEN: list[tuple[str, Reason, Callable[[Values], None]]] = [
    ("a list for an array", Reason.WRONG_TYPE, swap_in("token_ids", list)),
    ("a string finish reason", Reason.WRONG_TYPE, swap_in("finish_reason", str)),
    ("a list of turns", Reason.WRONG_TYPE, swap_in("turns", list)),
    ("a turn that is a tuple", Reason.WRONG_TYPE, swap_in("turns", lambda t: ((0, 3), *t[1:]))),
    ("a boolean attempt", Reason.WRONG_TYPE, swap_in("attempt", lambda _: True)),
    ("a text reward", Reason.WRONG_TYPE, swap_in("rewards", lambda _: {"reward": "1"})),
    ("a spec that is a dict", Reason.WRONG_TYPE, swap_in("spec", dataclasses.asdict)),
    ("negative attempt", Reason.VALUE_OUT_OF_RANGE, swap_in("attempt", lambda _: -1)),
    ("a lone surrogate in an id", Reason.TEXT_NOT_UTF8, replaced("lineage", prompt_id="\ud800")),
    ("no rollout id", Reason.LINEAGE_INCOMPLETE, replaced("lineage", rollout_id="")),
    ("a fork without a parent", Reason.LINEAGE_INCOMPLETE, replaced("lineage", fork_at=2)),
    ("a parent without a fork", Reason.LINEAGE_INCOMPLETE, replaced("lineage", parent_rollout_id="p")),
    ("no MoE layers", Reason.SPEC_INVALID, replaced("spec", num_moe_layers=0)),
    ("more experts a token than experts", Reason.SPEC_INVALID, replaced("spec", num_experts=1)),
    ("float64 log-probs", Reason.WRONG_DTYPE, swap_in("rollout_logprobs", lambda x: x.astype(np.float64))),
    ("big-endian tokens", Reason.WRONG_DTYPE, swap_in("token_ids", lambda x: x.astype(">i4"))),
    ("wide expert ids", Reason.WRONG_DTYPE, swap_in("expert_ids", lambda x: x.astype(np.uint16))),
    ("a missing routing row", Reason.WRONG_SHAPE, swap_in("expert_ids", lambda x: x[:-1])),
    ("a missing MoE layer", Reason.WRONG_SHAPE, swap_in("expert_ids", lambda x: x[:, :-1])),
    ("a missing log-prob", Reason.WRONG_SHAPE, swap_in("rollout_logprobs", lambda x: x[:-1])),
    ("a missing offset", Reason.WRONG_SHAPE, swap_in("kept", lambda k: KeptSets(k.offsets[:-1], k.ids))),
    ("two-dimensional tokens", Reason.WRONG_SHAPE, swap_in("token_ids", lambda x: x.reshape(2, 4))),
    ("a short score", Reason.WRONG_SHAPE, swap_in("scores", lambda _: {"teacher": np.zeros(7, np.float32)})),
    ("one token", Reason.TOO_SHORT, swap_in("token_ids", lambda x: x[:1])),
    ("a negative token", Reason.TOKEN_ID_OUT_OF_RANGE, put("token_ids", 1, -1)),
    ("a token beyond the vocabulary", Reason.TOKEN_ID_OUT_OF_RANGE, put("token_ids", 1, SPEC.vocab_size)),
    ("a sampled first token", Reason.FIRST_TOKEN_SAMPLED, put("sampled", 0, True)),
    ("nothing sampled", Reason.NOTHING_SAMPLED, put("sampled", slice(None), False)),
    ("a trailing observation", Reason.NOT_TRIMMED, put("sampled", 7, False)),
    ("a NaN score", Reason.VALUE_NOT_FINITE, swap_in("scores", lambda s: {"teacher": s["teacher"] * np.nan})),
    ("a NaN reward", Reason.VALUE_NOT_FINITE, swap_in("rewards", lambda _: {"reward": float("nan")})),
    ("an infinite timing", Reason.VALUE_NOT_FINITE, swap_in("timings", lambda _: {"decode": float("inf")})),
    ("a reward beyond float64", Reason.VALUE_NOT_FINITE, swap_in("rewards", lambda _: {"reward": 10**400})),
    ("an id of a text's subclass", Reason.WRONG_TYPE, replaced("lineage", rollout_id=Text("r"))),
    ("an id that is an array", Reason.WRONG_TYPE, replaced("lineage", group_id=np.array(["g", "h"]))),
    ("an engine id of numpy's", Reason.WRONG_TYPE, swap_in("engine_id", np.str_)),
    ("an attempt of an integer's subclass", Reason.WRONG_TYPE, swap_in("attempt", lambda _: Whole(1))),
    ("a huge attempt", Reason.VALUE_OUT_OF_RANGE, swap_in("attempt", lambda _: HUGE)),
    ("a huge fork", Reason.VALUE_OUT_OF_RANGE, replaced("lineage", fork_at=HUGE, parent_rollout_id="p")),
    ("a huge reward", Reason.VALUE_NOT_FINITE, swap_in("rewards", lambda _: {"reward": HUGE})),
    ("a huge number of layers", Reason.SPEC_INVALID, replaced("spec", num_moe_layers=HUGE)),
    ("layers that cannot be shown", Reason.SPEC_INVALID, replaced("spec", num_moe_layers=Whole(3))),
    ("a huge turn", Reason.TURNS_DO_NOT_COVER, turns((0, HUGE, TurnKind.PROMPT, None))),
    (
        "a turn behind a huge one",
        Reason.TURNS_DO_NOT_COVER,
        turns((0, HUGE, TurnKind.PROMPT, None), (3, 8, TurnKind.SAMPLED, NUCLEUS)),
    ),
    ("a turn that starts huge", Reason.TURNS_DO_NOT_COVER, turns((-HUGE, 8, TurnKind.PROMPT, None))),
    ("a turn that cannot be shown", Reason.TURNS_DO_NOT_COVER, turns((0, Text("8"), TurnKind.PROMPT, None))),  # pyright: ignore
    ("a huge temperature", Reason.SAMPLING_INVALID, sampling(SamplingParams(temperature=HUGE))),
    ("a temperature that cannot be shown", Reason.SAMPLING_INVALID, sampling(SamplingParams(temperature=Whole(1)))),
    ("a huge seed", Reason.SAMPLING_INVALID, sampling(SamplingParams(seed=HUGE))),
    ("rewards of a dict's subclass", Reason.WRONG_TYPE, swap_in("rewards", Named)),
    ("a reward of a float's subclass", Reason.WRONG_TYPE, swap_in("rewards", lambda _: {"reward": Whole(1)})),
    ("a reward wider than float64", Reason.WRONG_TYPE, swap_in("rewards", lambda _: {"reward": np.longdouble(1)})),
    ("a reward's name of a text's subclass", Reason.WRONG_TYPE, swap_in("rewards", lambda _: {np.str_("reward"): 1.0})),
    ("an array of a subclass", Reason.WRONG_TYPE, swap_in("token_ids", lambda x: x.view(Array))),
    ("a masked array", Reason.WRONG_TYPE, swap_in("token_ids", np.ma.masked_array)),
    ("a lineage without its fields", Reason.WRONG_TYPE, swap_in("lineage", lambda _: object.__new__(Lineage))),
    ("kept sets without their fields", Reason.WRONG_TYPE, swap_in("kept", lambda _: object.__new__(KeptSets))),
    ("a turn without its fields", Reason.WRONG_TYPE, swap_in("turns", lambda _: (object.__new__(Turn),))),
    ("a long id", Reason.TEXT_TOO_LONG, replaced("lineage", agent_id="é" * (MAX_TEXT_BYTES // 2 + 1))),
    ("a long name", Reason.TEXT_TOO_LONG, swap_in("rewards", lambda _: {"r" * (MAX_TEXT_BYTES + 1): 1.0})),
    ("many rewards", Reason.TOO_MANY_NAMES, swap_in("rewards", lambda _: {str(i): 1.0 for i in range(MAX_NAMES + 1)})),
    ("many timings", Reason.TOO_MANY_NAMES, swap_in("timings", lambda _: {str(i): 1.0 for i in range(MAX_NAMES + 1)})),
    ("many scores", Reason.TOO_MANY_NAMES, swap_in("scores", lambda s: {str(i): s["teacher"] for i in range(65)})),
    ("no turns", Reason.TURNS_DO_NOT_COVER, turns()),
    (
        "a gap between turns",
        Reason.TURNS_DO_NOT_COVER,
        turns((0, 2, TurnKind.PROMPT, None), (3, 8, TurnKind.SAMPLED, NUCLEUS)),
    ),
    (
        "turns that end early",
        Reason.TURNS_DO_NOT_COVER,
        turns((0, 3, TurnKind.PROMPT, None), (3, 7, TurnKind.SAMPLED, NUCLEUS)),
    ),
    (
        "an empty turn",
        Reason.TURNS_DO_NOT_COVER,
        turns((0, 0, TurnKind.PROMPT, None), (0, 8, TurnKind.SAMPLED, NUCLEUS)),
    ),
    (
        "turns that disagree with sampled",
        Reason.TURN_KIND_DISAGREES,
        turns((0, 2, TurnKind.PROMPT, None), (2, 8, TurnKind.SAMPLED, NUCLEUS)),
    ),
    (
        "sampling parameters on a prompt",
        Reason.SAMPLING_MISPLACED,
        turns((0, 3, TurnKind.PROMPT, NUCLEUS), (3, 8, TurnKind.SAMPLED, NUCLEUS)),
    ),
    ("no sampling parameters", Reason.SAMPLING_MISPLACED, sampling(None)),
    ("a negative temperature", Reason.SAMPLING_INVALID, sampling(SamplingParams(temperature=-1.0))),
    ("a NaN temperature", Reason.SAMPLING_INVALID, sampling(SamplingParams(temperature=float("nan")))),
    ("top-p of zero", Reason.SAMPLING_INVALID, sampling(SamplingParams(top_p=0.0))),
    ("min-p of one", Reason.SAMPLING_INVALID, sampling(SamplingParams(min_p=1.0))),
    ("top-k above the bound", Reason.SAMPLING_INVALID, sampling(SamplingParams(top_k=4097))),
    ("a seed beyond 64 bits", Reason.SAMPLING_INVALID, sampling(SamplingParams(top_k=12, seed=2**63))),
    ("a NaN log-prob", Reason.LOGPROB_NOT_FINITE, put("rollout_logprobs", 4, np.nan)),
    ("an infinite log-prob", Reason.LOGPROB_NOT_FINITE, put("rollout_logprobs", 4, -np.inf)),
    ("a positive log-prob", Reason.LOGPROB_POSITIVE, put("rollout_logprobs", 4, 1e-7)),
    ("a log-prob on a prompt token", Reason.LOGPROB_NOT_ZERO, put("rollout_logprobs", 1, -0.5)),
    ("a NaN kept mass", Reason.KEPT_MASS_NOT_FINITE, put("kept_logmass", 4, np.nan)),
    ("a positive kept mass", Reason.KEPT_MASS_POSITIVE, put("kept_logmass", 4, 0.1)),
    ("a kept mass on a prompt token", Reason.KEPT_MASS_NOT_ZERO, put("kept_logmass", 1, -0.1)),
    ("a negative version", Reason.VERSION_NEGATIVE, put("policy_versions", 4, -1)),
    ("a version on a prompt token", Reason.VERSION_NOT_SAMPLED, put("policy_versions", 1, 0)),
    ("offsets that start late", Reason.OFFSETS_NOT_FROM_ZERO, offset(0, 1)),
    ("offsets that fall", Reason.OFFSETS_FALL, offset(2, 1)),
    ("ids beyond the offsets", Reason.OFFSETS_END_WRONG, offset(8, len(BASE.kept.ids) + 1)),
    (
        "a kept set on a prompt token",
        Reason.TRUNCATED_NOT_SAMPLED,
        all_of(put("truncated", 1, True), kept_row(1, [int(BASE.token_ids[1])])),
    ),
    ("kept sets under full sampling", Reason.TRUNCATED_UNDER_FULL_SAMPLING, sampling(FULL)),
    (
        "no kept set under a finite top-k",
        Reason.KEPT_SET_MISSING,
        all_of(put("truncated", 5, False), put("kept_logmass", 5, 0.0), kept_row(5, [])),
    ),
    ("an empty kept set", Reason.KEPT_SET_EMPTY, kept_row(5, [])),
    ("ids where nothing was cut", Reason.KEPT_SET_NOT_TRUNCATED, kept_row(1, [4])),
    ("a kept set above its top-k", Reason.KEPT_SET_TOO_LARGE, kept_row(5, list(range(13)))),
    ("a negative kept id", Reason.KEPT_ID_OUT_OF_RANGE, kept_row(5, [-1, TOKEN])),
    ("a kept id beyond the vocabulary", Reason.KEPT_ID_OUT_OF_RANGE, kept_row(5, [TOKEN, SPEC.vocab_size])),
    ("a repeated kept id", Reason.KEPT_IDS_UNSORTED, kept_row(5, [TOKEN, TOKEN])),
    ("descending kept ids", Reason.KEPT_IDS_UNSORTED, kept_row(5, sorted([TOKEN, OTHER], reverse=True))),
    ("a kept set without its token", Reason.SAMPLED_TOKEN_NOT_KEPT, kept_row(5, [OTHER])),
    (
        "an uncertain draw from one id",
        Reason.SINGLETON_LOGPROB_NOT_ZERO,
        all_of(kept_row(5, [TOKEN]), put("rollout_logprobs", 5, -0.5)),
    ),
    ("an expert out of range", Reason.EXPERT_ID_OUT_OF_RANGE, put("expert_ids", (4, 1, 0), SPEC.num_experts)),
    ("a repeated expert", Reason.REPEATED_EXPERT, put("expert_ids", (4, 1, 0), BASE.expert_ids[4, 1, 1])),
    ("a row that was never filled", Reason.REPEATED_EXPERT, put("expert_ids", 4, 0)),
    ("an MoE layer of zeros", Reason.MOE_LAYER_OF_ZEROS, put("expert_ids", (slice(None), 2), 0)),
    ("content in a row that was not captured", Reason.UNROUTED_ROW_NOT_ZERO, put("routed", 2, False)),
]


@pytest.mark.parametrize(("reason", "breaks"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_invariant_is_refused_by_name(reason: Reason, breaks: Callable[[Values], None]):
    values = values_of(BASE)
    Trajectory(**values_of(BASE))
    breaks(values)
    with pytest.raises(ContractError) as caught:
        Trajectory(**values)
    assert caught.value.reason == reason
    assert caught.value.seen is not None
    assert caught.value.expected is not None


def cut_to(num_tokens: int) -> Callable[[Values], None]:
    """Everything but the routing as for an answer cut to so many tokens."""

    def cuts(values: Values) -> None:
        for name in ("token_ids", "sampled", "rollout_logprobs", "kept_logmass", "policy_versions", "truncated"):
            values[name] = values[name][:num_tokens]
        kept = values["kept"]
        values["kept"] = KeptSets(kept.offsets[: num_tokens + 1], kept.ids[: kept.offsets[num_tokens]])
        values["scores"] = {name: score[:num_tokens] for name, score in values["scores"].items()}
        *turns, last = values["turns"]
        values["turns"] = (*turns, dataclasses.replace(last, end=num_tokens))

    return cuts


def routes(*rows: int) -> Callable[[Values], None]:
    """The routes of these rows, in this order."""

    def take(values: Values) -> None:
        values["expert_ids"], values["routed"] = values["expert_ids"][list(rows)], values["routed"][list(rows)]

    return take


@pytest.mark.parametrize(
    "breaks",
    [routes(*range(7), 6), routes(*range(7), *range(7)), cut_to(6), all_of(cut_to(6), routes(*range(6)))],
    ids=["the last token has one", "twice", "the answer was cut", "one too many after a cut"],
)
def test_routes_that_are_not_one_for_every_token_but_the_last_are_refused(breaks: Callable[[Values], None]):
    values = values_of(BASE)
    breaks(values)
    with pytest.raises(ContractError) as caught:
        Trajectory(**values)
    assert caught.value.reason == Reason.WRONG_SHAPE
    num_tokens = len(values["token_ids"])
    routes(*range(num_tokens - 1))(values)
    assert len(Trajectory(**values)) == num_tokens


def test_a_greedy_span_lists_exactly_the_token():
    greedy = make_trajectory(np.random.default_rng(0), sampling=GREEDY)
    assert greedy.kept.sizes.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    values = values_of(greedy)
    token = int(values["token_ids"][5])
    kept_row(5, sorted({token, (token + 1) % SPEC.vocab_size}))(values)
    with pytest.raises(ContractError, match="kept_set_too_large"):
        Trajectory(**values)


def test_an_untruncated_token_is_fine_where_the_top_k_covers_the_vocabulary():
    values = values_of(make_trajectory(np.random.default_rng(0), sampling=FULL))
    sampling(SamplingParams(top_p=0.999))(values)
    assert not Trajectory(**values).truncated.any()


def test_rows_that_were_not_captured_are_zero_and_exempt_from_distinctness():
    trajectory = make_trajectory(np.random.default_rng(0), unrouted=(0, 4))
    assert trajectory.routed.sum() == 5
    check_trajectory(trajectory)


def test_a_zero_layer_of_a_partly_captured_trajectory_is_refused():
    values = values_of(make_trajectory(np.random.default_rng(0), unrouted=(0, 4)))
    values["expert_ids"][:, 1] = 0
    with pytest.raises(ContractError, match="moe_layer_of_zeros"):
        Trajectory(**values)


@pytest.mark.parametrize("pair", [(0, 1), (0, 7), (3, 4), (6, 7), (2, 5)])
@pytest.mark.parametrize("num_experts", [128, 512])
def test_every_pair_of_slots_is_compared_in_every_chunk(pair: tuple[int, int], num_experts: int):
    spec = ModelSpec(num_moe_layers=4, experts_per_token=8, num_experts=num_experts, vocab_size=50)
    good = make_trajectory(np.random.default_rng(0), spec, num_prompt=2, num_sampled=5000, sampling=FULL)
    for row in (0, 2500, 5000):
        values = values_of(good)
        values["expert_ids"][row, 3, pair[0]] = values["expert_ids"][row, 3, pair[1]]
        with pytest.raises(ContractError, match="repeated_expert") as caught:
            Trajectory(**values)
        assert f"row {row}, MoE layer 3" in str(caught.value)


def test_an_expert_id_is_bounded_by_the_experts_and_not_by_the_dtype():
    spec = ModelSpec(num_moe_layers=1, experts_per_token=1, num_experts=256, vocab_size=50)
    values = values_of(make_trajectory(np.random.default_rng(0), spec))
    values["expert_ids"][0] = 255
    Trajectory(**values)


@settings(max_examples=60, deadline=None)
@given(trajectories())
def test_the_factory_makes_valid_trajectories(trajectory: Trajectory):
    check_trajectory(trajectory)
