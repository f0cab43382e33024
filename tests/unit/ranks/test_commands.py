"""Messages between the controller and ranks come out as they went in, errors as errors."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from moerl.contract.commands import Failure, Reply, Save, Step, decode_command, decode_reply, encode
from moerl.contract.trainer import DeviceUse, PassReport, UpdateReport, sum_reports
from moerl.errors import (
    ConfigError,
    ContractError,
    MoerlError,
    ReplayError,
    TrainerError,
    UnprovedError,
    WeightSyncError,
)


def report(seed: int) -> PassReport:
    rng = np.random.default_rng(seed)
    return PassReport(
        rng.normal(size=(seed, 6)).astype(np.float32),
        0.5,
        3,
        rng.integers(9, size=(2, 4)),
        rng.normal(size=(2, 5)),
        rng.integers(9, size=2),
        UpdateReport(1.5, 1e-3, skipped=True, skipped_in_a_row=2),
    )


def test_commands_come_out_as_they_went_in():
    for command in (Step(3, prove=True), Save("0-rl-000001", {"step": 1, "run": {"a": [0.5]}}, ["0-rl-000000"])):
        assert decode_command(encode(command)) == command


def test_a_report_survives_the_way_bit_for_bit_also_without_rows():
    for each in (report(0), report(5)):
        message = decode_reply(encode(Reply(report=each))).report
        assert message is not None
        for name in ("rows_RC", "load_LE", "agreement_LS", "live_rows_L"):
            np.testing.assert_array_equal(getattr(message, name), getattr(each, name), strict=True)
        assert (message.loss_sum, message.rows_verified, message.update) == (0.5, 3, each.update)


def test_reports_of_ranks_add_up_in_rank_order():
    both = sum_reports([report(2), report(3)])
    np.testing.assert_array_equal(both.rows_RC, np.concatenate([report(2).rows_RC, report(3).rows_RC]))
    np.testing.assert_array_equal(both.load_LE, report(2).load_LE + report(3).load_LE)
    assert (both.loss_sum, both.rows_verified) == (1.0, 6)


def test_ranks_without_losses_leave_those_of_others_alone():
    without = replace(report(2), loss_sum=None)
    assert sum_reports([without, report(3), without]).loss_sum == 0.5
    assert sum_reports([without, without]).loss_sum is None
    back = decode_reply(encode(Reply(report=without))).report
    assert back is not None
    assert back.loss_sum is None


def test_what_a_rank_says_of_its_device_comes_out_as_it_went_in():
    reply = Reply(device=DeviceUse("NVIDIA H100 80GB HBM3", 1 << 40, 2 << 40))
    assert decode_reply(encode(reply)) == reply


def test_an_array_whose_bytes_do_not_fit_its_shape_is_refused():
    table = {"dtype": "float32", "shape": (2, 2), "data": b"\0" * 12}
    with pytest.raises(TrainerError, match=r"12 bytes; expected: float32 \(2, 2\)"):
        decode_reply(msgspec.msgpack.encode({"tables": [table]}))


def test_arrays_come_out_in_c_order_and_of_their_own_memory():
    advantages = np.arange(6, dtype=np.float32)[::2]
    back = decode_command(encode(Step(0, prove=True, advantages=advantages)))
    assert isinstance(back, Step)
    assert back.advantages is not None
    np.testing.assert_array_equal(back.advantages, advantages, strict=True)
    assert back.advantages.flags.writeable
    assert back.advantages.flags.c_contiguous


def test_an_array_of_another_dtype_is_not_sent():
    with pytest.raises(TypeError, match="int8"):
        encode(Reply(tables=(np.zeros(2, np.int8),)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", [ConfigError, WeightSyncError, ReplayError, MoerlError])
def test_an_error_of_ours_keeps_its_kind_and_words(kind: type[MoerlError]):
    error = kind("what", seen="this", expected="that", remedy="do so")
    error.add_note("a note")
    again = Failure.of(error).error(2, "step")
    assert type(again) is kind
    assert "this" in str(again)
    assert again.__notes__ == ["a note"]


def test_errors_with_fields_of_their_own_keep_them():
    contract = Failure.of(ContractError("some_reason", field="a field", seen=4)).error(1, "load")
    assert isinstance(contract, ContractError)
    assert (contract.reason, contract.field, contract.seen) == ("some_reason", "a field", "rank 1: 4")
    unproved = Failure.of(UnprovedError("what", microbatch=3)).error(1, "step")
    assert isinstance(unproved, UnprovedError)
    assert unproved.microbatch == 3


def test_an_error_of_the_system_in_a_rank_says_which_file_and_what_to_do() -> None:
    error = Failure.of(OSError(28, "No space left on device", "final_model/config.json")).error(1, "export")
    assert str(error).startswith("the system refused final_model/config.json; seen: rank 1: No space left on device; ")
    assert "remedy: make room" in str(error)
