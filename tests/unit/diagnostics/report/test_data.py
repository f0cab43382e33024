"""The schema of report.json is stable."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_samples import full_report

from moerl.diagnostics.report.data import SCHEMA, encode_report, read_report
from moerl.diagnostics.report.read_run import stored_report
from moerl.errors import MoerlError

GOLDEN = Path(__file__).parent / "report.json"


def test_a_stored_report_reads_as_the_report_that_was_written() -> None:
    assert read_report(GOLDEN) == full_report()


def test_a_report_is_written_as_the_stored_one() -> None:
    """Who changes a name or the order of a field gives the schema another name."""
    assert encode_report(full_report()) == GOLDEN.read_bytes().rstrip(b"\n")


@pytest.mark.parametrize("content", [b"{}", b"not json", b'{"title": 1}'])
def test_what_is_no_report_is_refused_with_a_remedy(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(MoerlError, match="write it again: moerl report RUN_DIR"):
        stored_report(path)


def test_a_report_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(GOLDEN.read_bytes().replace(SCHEMA.encode(), b"moerl-report-0"))
    with pytest.raises(MoerlError, match="moerl-report-0"):
        stored_report(path)
