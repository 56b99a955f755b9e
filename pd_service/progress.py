"""How a start is shown: who is starting and what each does now.

On a terminal one small table changes in place; elsewhere each phase of each starter is one line. A phase is what is
said without the percentage at its end, so that loading weights is one line and not a hundred.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

Progress = Callable[[str, str], None]  # who, what

READY = "ready"
_PERCENTAGE = re.compile(r"\s*(\d{1,3})%$")
_BAR_CELLS = 20


@contextmanager
def shown_progress(console: Console) -> Iterator[Progress]:
    """Yields what to call with each piece of news; at the end a table on the terminal is gone again."""
    if not console.is_terminal:
        yield _Lines(console).tell
        return
    table = _ChangingTable()
    with Live(table, console=console, transient=True, refresh_per_second=12):
        yield table.tell


def split_percentage(what: str) -> tuple[str, int | None]:
    """The phase, and the percentage of it that is done if it says so."""
    found = _PERCENTAGE.search(what)
    return (what[: found.start()], min(100, int(found[1]))) if found else (what, None)


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()
        self._phases: dict[str, str] = {}

    def tell(self, who: str, what: str) -> None:
        phase, _ = split_percentage(what)
        if self._phases.get(who) != phase:
            self._phases[who] = phase
            elapsed_s = time.monotonic() - self._start
            self._console.print(f"{elapsed_s:5.1f} s  {who}: {phase}", soft_wrap=True)


class _ChangingTable:
    """Drawn anew by rich several times a second."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._news: dict[str, str] = {}
        self._spinner = Spinner("dots")

    def tell(self, who: str, what: str) -> None:
        self._news[who] = what

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for who, what in list(self._news.items()):
            phase, percentage = split_percentage(what)
            table.add_row("[green]✓[/green]" if phase == READY else self._spinner, who, phase, _bar(percentage))
        table.add_row("", "", "", f"{time.monotonic() - self._start:.1f} s")
        return table


def _bar(percentage: int | None) -> str:
    if percentage is None:
        return ""
    done = _BAR_CELLS * percentage // 100
    return f"{'━' * done}[dim]{'━' * (_BAR_CELLS - done)}[/dim] {percentage}%"
