"""Laws of the display of a start: lines without a terminal, one changing table on one."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pd_service.progress import shown_progress, split_percentage


def lines_of(news: list[tuple[str, str]]) -> list[str]:
    console = Console(file=StringIO(), force_terminal=False, width=40)
    with shown_progress(console) as progress:
        for who, what in news:
            progress(who, what)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.partition(" s  ")[2] for line in text.splitlines()]


@given(percentages=st.lists(st.integers(0, 100), min_size=1), names=st.lists(st.sampled_from("ab"), min_size=1))
def test_a_phase_is_one_line_however_often_its_percentage_is_told(percentages: list[int], names: list[str]) -> None:
    news = [(name, f"loading weights {percent}%") for percent in percentages for name in names]
    assert lines_of(news) == [f"{name}: loading weights" for name in dict.fromkeys(names)]


def test_each_phase_of_each_starter_is_a_line() -> None:
    news = [
        ("a", "starting"),
        ("b", "starting"),
        ("a", "packing 5%"),
        ("a", "packing 99%"),
        ("b", "ready"),
        ("b", "ready"),
    ]
    assert lines_of(news) == ["a: starting", "b: starting", "a: packing", "b: ready"]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("loading weights 40%", ("loading weights", 40)),
        ("loading weights", ("loading weights", None)),
        ("loading weights 400%", ("loading weights", 100)),
        ("KV cache of 3 % of all", ("KV cache of 3 % of all", None)),
    ],
)
def test_the_percentage_is_the_one_at_the_end(what: str, expected: tuple[str, int | None]) -> None:
    assert split_percentage(what) == expected


def test_a_terminal_shows_everybody_with_the_last_news_and_is_clean_afterwards() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80, legacy_windows=False)
    with shown_progress(console) as progress:
        progress("prefill/1", "loading weights 40%")
        progress("decode/2", "ready")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("prefill/1", "loading weights", "40%", "decode/2", "✓"):
        assert word in text
    assert text.rstrip("\n").endswith("\x1b[2K")  # the last line of the table is erased
