"""The table of calls in the documentation is what is called."""

from __future__ import annotations

from tests.npu.call_table import PATH, calls_of_every_family, table


def test_the_documented_calls_are_those_that_are_made() -> None:
    assert PATH.read_text() == table(calls_of_every_family()), "run python -m tests.npu.call_table"
