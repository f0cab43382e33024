"""The wire codec: exact round trips, and everything else refused by name."""

import base64
import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from factories import SPEC, make_trajectory, same_trajectory, trajectories
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.contract import wire as wire_module
from moerl.contract.frame import FrameKind, WireLimits, pack_frame, unpack_frame
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import Lineage, ModelSpec, SamplingParams, Trajectory
from moerl.contract.wire import decode_records, decode_trajectories, encode_trajectories
from moerl.errors import ContractError

RNG = np.random.default_rng(3)
GOOD = make_trajectory(RNG, scores={"teacher": RNG.normal(size=8).astype(np.float32)})


def split(frame: bytes) -> tuple[bytes, bytes]:
    """The msgpack document of a frame and the expert ids behind it."""
    payload = unpack_frame(frame, FrameKind.TRAJECTORIES)
    end = 8 + int.from_bytes(payload[:8], "little")
    return payload[8:end], payload[end:]


def sealed(document: bytes, expert_ids: bytes = b"") -> bytes:
    payload = len(document).to_bytes(8, "little") + document + expert_ids
    return pack_frame([payload], len(payload), FrameKind.TRAJECTORIES)


DOCUMENT, EXPERT_IDS = split(encode_trajectories([GOOD]))


def edited(edit: Callable[[dict[str, Any]], None]) -> bytes:
    """A well-sealed frame whose message was edited."""
    message = msgspec.msgpack.decode(DOCUMENT)
    edit(message)
    return sealed(msgspec.msgpack.encode(message), EXPERT_IDS)


def edited_item(edit: Callable[[dict[str, Any]], None]) -> bytes:
    return edited(lambda message: edit(message["trajectories"][0]))


def refusal(frame: bytes, spec: ModelSpec = SPEC) -> ContractError:
    with pytest.raises(ContractError) as caught:
        decode_trajectories(frame, spec=spec)
    return caught.value


@settings(max_examples=150, deadline=None)
@given(trajectories())
def test_any_trajectory_comes_back_bit_for_bit(trajectory: Trajectory):
    (back,) = decode_trajectories(encode_trajectories([trajectory]), spec=trajectory.spec)
    assert same_trajectory(back, trajectory)


def test_many_trajectories_come_back_in_order():
    sent = [make_trajectory(RNG, rollout_id=f"r{i}", num_sampled=1 + i) for i in range(5)]
    back = decode_trajectories(encode_trajectories(sent), spec=SPEC)
    assert all(same_trajectory(a, b) for a, b in zip(sent, back, strict=True))
    assert decode_trajectories(encode_trajectories([]), spec=SPEC) == []


def test_decoded_arrays_are_aligned_contiguous_and_own_their_memory():
    (back,) = decode_trajectories(encode_trajectories([GOOD]), spec=SPEC)
    for array in (back.token_ids, back.rollout_logprobs, back.expert_ids, back.kept.ids, back.scores["teacher"]):
        assert array.flags.c_contiguous
        assert array.flags.aligned


def test_records_carry_identity_and_newest_version():
    (record,) = decode_records(encode_trajectories([GOOD]), spec=SPEC)
    assert (record.rollout_id, record.engine_id, record.policy_version) == ("rollout-0", "engine-0", 3)


def test_trajectories_of_two_models_do_not_share_a_frame():
    other = make_trajectory(RNG, dataclasses.replace(SPEC, fingerprint="other"))
    with pytest.raises(ContractError, match="spec_mismatch"):
        encode_trajectories([GOOD, other])


@pytest.mark.parametrize("name", ["num_moe_layers", "experts_per_token", "num_experts", "vocab_size"])
def test_another_model_is_refused(name: str):
    other = dataclasses.replace(SPEC, **{name: getattr(SPEC, name) + 1})
    assert refusal(encode_trajectories([GOOD]), other).reason == Reason.SPEC_MISMATCH


def test_another_fingerprint_is_refused():
    other = dataclasses.replace(SPEC, fingerprint="other")
    assert refusal(encode_trajectories([GOOD]), other).reason == Reason.FINGERPRINT_MISMATCH


def test_a_frame_without_a_spec_is_refused():
    assert refusal(edited(lambda m: m.update(spec=None))).reason == Reason.SPEC_MISMATCH


MALFORMED: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    ("unknown field", lambda t: t.update(surprise=1)),
    ("missing field", lambda t: t.pop("routed")),
    ("unknown field of the lineage", lambda t: t["lineage"].update(surprise=1)),
    ("text for an array", lambda t: t.update(token_ids="abc")),
    ("a list for an array", lambda t: t.update(token_ids=[1, 2])),
    ("a float for a count", lambda t: t.update(num_tokens=8.5)),
    ("an unknown finish reason", lambda t: t.update(finish_reason="tired")),
    ("an unknown turn kind", lambda t: t["turns"][0].update(kind="system")),
    ("a text reward", lambda t: t.update(rewards={"reward": "1"})),
]


@pytest.mark.parametrize("edit", [case[1] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_unknown_fields_and_types_are_refused(edit: Callable[[dict[str, Any]], None]):
    assert refusal(edited_item(edit)).reason == Reason.MESSAGE_MALFORMED


ARRAYS = [
    "token_ids",
    "sampled",
    "rollout_logprobs",
    "kept_logmass",
    "version_values",
    "version_lengths",
    "routed",
    "kept_sizes",
    "kept_ids",
    "truncated",
]


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_another_length_is_refused(name: str):
    for change in (lambda data: data[:-1], lambda data: data + b"\0" * 4, lambda _: b""):
        frame = edited_item(lambda t, change=change: t.update({name: change(t[name])}))
        assert refusal(frame).reason == Reason.ARRAY_LENGTH_WRONG


@pytest.mark.parametrize("num_tokens", [9, 7, 10**6, 2**62, 2**64 - 1])
def test_a_wrong_token_count_is_refused_before_memory_is_spent(num_tokens: int):
    assert refusal(edited_item(lambda t: t.update(num_tokens=num_tokens))).reason == Reason.ARRAY_LENGTH_WRONG


def test_a_trajectory_without_tokens_is_refused():
    for num_tokens in (1, 0, -5):
        frame = edited_item(lambda t, n=num_tokens: t.update(num_tokens=n))
        assert refusal(frame).reason == Reason.TOO_SHORT


def test_a_run_length_bomb_is_refused():
    runs = {"version_values": b"\0" * 4000, "version_lengths": b"\xff" * 4000}
    assert refusal(edited_item(lambda t: t.update(runs))).reason == Reason.ARRAY_LENGTH_WRONG


def test_spare_flag_bits_must_be_zero():
    frame = edited_item(lambda t: t.update(routed=b"\xff"))
    assert refusal(frame).reason == Reason.ARRAY_LENGTH_WRONG


BROKEN: list[tuple[Reason, Callable[[dict[str, Any]], None]]] = [
    (Reason.LOGPROB_NOT_FINITE, lambda t: t.update(rollout_logprobs=b"\xff" * 32)),
    (Reason.VALUE_NOT_FINITE, lambda t: t["rewards"].update(reward=float("nan"))),
    (Reason.VALUE_NOT_FINITE, lambda t: t["scores"].update(teacher=b"\xff" * 32)),
    (Reason.SAMPLING_INVALID, lambda t: t["turns"][1]["sampling"].update(temperature=float("nan"))),
    (Reason.SAMPLING_INVALID, lambda t: t["turns"][1]["sampling"].update(seed=2**64 - 1)),
    (Reason.TURNS_DO_NOT_COVER, lambda t: t.update(turns=[])),
    (Reason.KEPT_IDS_UNSORTED, lambda t: t.update(kept_ids=bytes(len(t["kept_ids"])))),
    (Reason.KEPT_ID_OUT_OF_RANGE, lambda t: t.update(kept_ids=b"\xff" * len(t["kept_ids"]))),
    (Reason.TRUNCATED_NOT_SAMPLED, lambda t: t.update(truncated=b"\xff")),
    (Reason.LINEAGE_INCOMPLETE, lambda t: t["lineage"].update(rollout_id="")),
]


@pytest.mark.parametrize(("reason", "edit"), BROKEN, ids=[str(reason) for reason, _ in BROKEN])
def test_a_broken_invariant_on_the_wire_is_refused_by_name(reason: Reason, edit: Callable[[dict[str, Any]], None]):
    assert refusal(edited_item(edit)).reason == reason


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x91" * 100_000, id="deep nesting"),
        pytest.param(b"\x82\xa4spec" + b"\x81\xa1x" * 100_000, id="deep nesting in a field"),
        pytest.param(b"\x82\xactrajectories\xdd\x00\x00\xff\xff", id="a list cut off"),
        pytest.param(b"\x82\xa4spec\xc0\xactrajectories\x90\xc0", id="trailing bytes"),
        pytest.param(b"\xc1", id="reserved byte"),
    ],
)
def test_a_malformed_message_is_refused(payload: bytes):
    assert refusal(sealed(payload)).reason == Reason.MESSAGE_MALFORMED


def test_a_list_of_four_billion_is_refused():
    assert refusal(sealed(b"\x82\xactrajectories\xdd\xff\xff\xff\xff")).reason == Reason.FRAME_TOO_LARGE


def test_a_document_that_claims_bytes_beyond_the_payload_is_refused():
    empty = msgspec.msgpack.encode({"spec": None, "trajectories": []})
    assert decode_trajectories(sealed(empty), spec=SPEC) == []
    payload = (len(empty) + 1).to_bytes(8, "little") + empty
    frame = pack_frame([payload], len(payload), FrameKind.TRAJECTORIES)
    assert refusal(frame).reason == Reason.MESSAGE_MALFORMED


def test_a_payload_shorter_than_its_document_is_refused():
    for payload in (b"", b"\x01", (2**63).to_bytes(8, "little"), (9).to_bytes(8, "little") + b"12345678"):
        frame = pack_frame([payload], len(payload), FrameKind.TRAJECTORIES)
        assert refusal(frame).reason == Reason.MESSAGE_MALFORMED


@pytest.mark.parametrize("expert_ids", [EXPERT_IDS[:-1], EXPERT_IDS + b"\0", b""], ids=["short", "long", "none"])
def test_expert_ids_of_another_length_are_refused(expert_ids: bytes):
    assert refusal(sealed(DOCUMENT, expert_ids)).reason == Reason.ARRAY_LENGTH_WRONG


def test_broken_expert_ids_on_the_wire_are_refused_by_name():
    size = len(EXPERT_IDS)
    assert refusal(sealed(DOCUMENT, b"\xff" * size)).reason == Reason.EXPERT_ID_OUT_OF_RANGE
    assert refusal(sealed(DOCUMENT, bytes(size))).reason == Reason.MOE_LAYER_OF_ZEROS


def test_text_that_is_not_utf8_is_refused():
    broken = DOCUMENT.replace(b"rollout-0", b"rollout\xff0", 1)
    assert refusal(sealed(broken, EXPERT_IDS)).reason == Reason.MESSAGE_MALFORMED


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_corrupted_message_raises_nothing_but_contract_errors(data: st.DataObject):
    document = bytearray(DOCUMENT)
    for _ in range(data.draw(st.integers(1, 3))):
        document[data.draw(st.integers(0, len(document) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ContractError):
        decode_trajectories(sealed(bytes(document), EXPERT_IDS), spec=SPEC)


def test_limits_are_applied():
    with pytest.raises(ContractError, match="frame_too_large"):
        decode_trajectories(encode_trajectories([GOOD]), spec=SPEC, limits=WireLimits(max_payload_bytes=100))


@pytest.mark.parametrize("name", ["SpecMessage", "LineageMessage", "SamplingMessage"])
def test_messages_mirror_their_dataclasses(name: str):
    mirrored = {"SpecMessage": ModelSpec, "LineageMessage": Lineage, "SamplingMessage": SamplingParams}[name]
    fields = [field.name for field in dataclasses.fields(mirrored)]
    assert list(getattr(wire_module, name).__struct_fields__) == fields


def test_a_frame_takes_less_than_a_fifth_of_int32_and_base64_in_json():
    spec = ModelSpec(num_moe_layers=48, experts_per_token=8, num_experts=128, vocab_size=150_000)
    trajectory = make_trajectory(np.random.default_rng(0), spec, num_prompt=64, num_sampled=448)

    def base64_of(array: np.ndarray) -> str:
        return base64.b64encode(array.tobytes()).decode()

    baseline = json.dumps(
        {
            "token_ids": base64_of(trajectory.token_ids),
            "rollout_logprobs": base64_of(trajectory.rollout_logprobs),
            "expert_ids": base64_of(trajectory.expert_ids.astype(np.int32)),
            "kept_offsets": base64_of(trajectory.kept.offsets.astype(np.int32)),
            "kept_ids": base64_of(trajectory.kept.ids),
        }
    )
    assert len(encode_trajectories([trajectory])) <= 0.19 * len(baseline)
